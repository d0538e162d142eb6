import json
import signal
from pathlib import Path

import pytest

from oelm.study.check import Cost, duration
from oelm.study.plan import load_study

from .conftest import alive, oelm, start, trainers, wait_until

NO_COST = {
    "parameters": 1, "trainable": 1, "frozen": 0, "flops": 1.0, "step_seconds": 1.0, "memory": 1,
    "disk": 1, "tokens": 1, "epochs": 1.0, "validation_share": 0.0, "validation_tokens": 1,
}  # fmt: skip


def test_duration_is_that_of_slots_which_take_the_next_run(make_study) -> None:
    runs = load_study(make_study()).runs(Path("runs"))  # baseline, frozen, baseline, frozen
    seconds = {"baseline": 10.0, "frozen": 3.0}
    found = {arm: Cost(arm=arm, seconds=s, **NO_COST) for arm, s in seconds.items()}
    assert duration(runs, found, slots=1) == 26
    assert duration(runs, found, slots=2) == 13  # 10 then 3; 3 then 10
    assert duration(runs, found, slots=9) == 10


def test_check_measures_and_leaves_nothing(make_study, place: Path) -> None:
    done = oelm("check", make_study(defaults={"max_steps": 4000}), "--slots", "2", "--json")
    data = json.loads(done.stdout)
    assert len(data["runs"]) == 4
    base, frozen = data["costs"]
    assert base["parameters"] == frozen["parameters"]
    assert (base["frozen"], frozen["frozen"]) == (0, 2 * 32 * 32)
    assert base["trainable"] - frozen["trainable"] == 2 * 32 * 32
    assert base["tokens"] == 4000 * 2 * 32
    assert (
        base["epochs"]
        == base["tokens"]
        / json.loads((Path(data["runs"][0]["config"]["dataset"]) / "meta.json").read_text())[
            "splits"
        ]["train"]["tokens"]
    )
    assert base["seconds"] > 4000 * base["step_seconds"] > 0
    assert base["flops"] > frozen["flops"] > 4000 * 2 * 32 * 6 * 12000
    assert {c["kind"] for c in data["confounds"]} >= {"seeds", "init_scale", "epochs"}
    assert sorted(p.name for p in place.iterdir()) == ["tiny.yaml"]


def test_a_classifier_is_measured_on_its_texts(make_study, place: Path) -> None:
    texts = "".join(f"{'good' if i % 2 else 'bad'} film number {i}\t{i % 2}\n" for i in range(200))
    (place / "films.tsv").write_text(texts)
    data = "films.tsv,columns=text+label,tokenizer=bytes"
    settings = {"task": "classification", "dataset": data, "max_steps": 4000}
    claims = {"c": {"metric": "accuracy", "arm": "frozen", "vs": "baseline", "at_least": "-1pt"}}
    path = make_study(defaults=settings, claims=claims)
    found = json.loads(oelm("check", path, "--slots", "2", "--json").stdout)
    base, frozen = found["costs"]
    assert base["trainable"] - frozen["trainable"] == 2 * 32 * 32
    assert base["seconds"] > 4000 * base["step_seconds"] > 0
    two, each = found["seconds"] / 2, (base["seconds"], frozen["seconds"])  # two runs on each slot
    assert 0.999 * sum(each) / 2 <= two <= 1.001 * max(each)

    (place / "films.tsv").unlink()
    done = oelm("check", path, "--slots", "2")
    assert "nothing was measured: " in done.stdout
    assert "films.tsv" in done.stdout


def test_a_check_that_is_stopped_ends_at_once(make_study, place: Path) -> None:
    scratch = place / ("scratch" * 12)  # longer than a socket's name may be
    scratch.mkdir()
    path = make_study(defaults={"batch_size": 512})
    checking = start("check", path, "--slots", "1", TMPDIR=str(scratch))

    def measuring() -> list[int]:
        return [pid for runs in scratch.glob("*/runs/measured") for pid in trainers(runs)]

    wait_until(lambda: measuring() or checking.poll() is not None)
    held = measuring()
    checking.send_signal(signal.SIGTERM)
    output = checking.communicate(timeout=60)[0]
    said = "measuring a few steps of 2 arms; a large model takes minutes\n"
    last = "oelm: stopped before everything was measured\n"
    assert (checking.returncode, output) == (3, said + last)
    wait_until(lambda: not any(alive(pid) for pid in held))
    assert not list(scratch.iterdir())


def test_the_source_ablation_without_its_corpus(place: Path, monkeypatch) -> None:
    monkeypatch.setenv("OELM_HOME", str(place / "home"))
    done = oelm("check", "tinystories-ablation", "--no-measure")
    for words in (
        "0.001 in oelm_v2 and 0.0003 in baseline",
        "std 0.044 in oelm_v2 and 0.02",
        "one seed:",
    ):
        assert words in done.stdout
    assert "not known" in done.stdout


@pytest.mark.slow
def test_a_dataset_that_is_not_here_is_costed_on_noise(
    make_study, monkeypatch, place: Path
) -> None:
    monkeypatch.setenv("OELM_HOME", str(place / "home"))
    path = make_study(defaults={"dataset": "tinystories-gpt2"}, arms={"a": {}}, claims={})
    done = oelm("check", path)
    assert "epochs and the last evaluation are not known" in done.stdout
    assert f"{50257 * 32 + 17728 - 257 * 32:,}" in done.stdout  # the vocabulary of GPT-2
