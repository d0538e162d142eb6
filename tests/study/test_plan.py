from pathlib import Path

import pytest
import yaml

from oelm.errors import UserError
from oelm.study.plan import essence, find_study, load_study

SMALL = {
    "name": "small",
    "defaults": {"model": "nano", "dataset": "sotu-bpe2048", "max_steps": 4, "max_lr": "3e-3"},
    "seeds": [0, 1],
    "arms": {"base": {"method": "baseline"}, "frozen": {"method": "oelm_v2"}},
    "claims": {"c": {"metric": "ppl", "arm": "frozen", "vs": "base", "at_most": "+5%"}},
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_study(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_arms_times_seeds(tmp_path: Path) -> None:
    runs = load_study(write(tmp_path)).runs(Path("runs"))
    assert [r.name for r in runs] == [
        "base/seed-0",
        "frozen/seed-0",
        "base/seed-1",
        "frozen/seed-1",
    ]
    assert runs[1].folder == Path("runs/small/frozen/seed-0")
    assert runs[1].config.method == "oelm_v2"
    assert runs[1].config.max_lr == 3e-3
    assert runs[3].config.seed == 1


def test_a_list_is_a_grid_and_arms_override_defaults(tmp_path: Path) -> None:
    arms = {
        "one": {"max_lr": ["1e-3", 3e-3], "warmup": [10, 20]},
        "two": {"max_lr": [0.001]},
        "three": {"batch_size": 2},
    }
    runs = load_study(write(tmp_path, arms=arms, claims={}, seeds=[7])).runs(Path("runs"))
    assert [r.name for r in runs] == [
        "one/max_lr=0.001,warmup=10/seed-7",
        "one/max_lr=0.001,warmup=20/seed-7",
        "one/max_lr=0.003,warmup=10/seed-7",
        "one/max_lr=0.003,warmup=20/seed-7",
        "two/seed-7",
        "three/seed-7",
    ]
    assert [r.config.max_lr for r in runs] == [1e-3, 1e-3, 3e-3, 3e-3, 1e-3, 3e-3]
    assert [r.config.warmup_steps for r in runs[:2]] == [10, 20]


def test_inline_methods(tmp_path: Path) -> None:
    spec = {"base": "oelm_v2", "qk": {"rank": 4}, "name": "rank four"}
    arms = {"base": {"method": "oelm_v2,qk.rank=4"}, "frozen": {"method": spec}}
    a, b, *_ = load_study(write(tmp_path, arms=arms)).runs(Path("runs"))
    assert a.config.resolved_method().q.rank == 4
    assert essence(a.config) == essence(b.config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": [1]}, ["seed", "did you mean 'seeds'?"]),
        ({"arms": {"base": {"metod": "baseline"}}, "claims": {}}, ["metod", "'method'"]),
        ({"arms": {"base": {"method": "oelm_v3"}}, "claims": {}}, ["oelm_v3", "did you mean"]),
        ({"claims": {"c": {"metric": "ppl", "arm": "x", "vs": "base", "less": True}}}, ["'x'"]),
        ({"arms": {"base": {"max_lr": []}}, "claims": {}}, ["max_lr", "empty"]),
        ({"arms": {"base": {"max_lr": [1e-3, 0.001]}}, "claims": {}}, ["max_lr=0.001", "twice"]),
        ({"arms": {"base": {"max_steps": -5}}, "claims": {}}, ["max_steps", "-5"]),
        ({"arms": {"base": {"seed": 3}}, "claims": {}}, ["seed", "itself"]),
        ({"arms": {"a/b": {}}, "claims": {}}, ["a/b", "folder"]),
        ({"arms": {"base": 3}, "claims": {}}, ["'base'", "mapping"]),
        ({"arms": {}, "claims": {}}, ["at least one arm"]),
        ({"seeds": [1, 1]}, ["[1, 1]"]),
        ({"seeds": []}, ["at least one"]),
        ({"needs": {"gpus_per_run": 0}}, ["gpus_per_run"]),
        ({"needs": {"slurm": {"partion": "x"}}}, ["partion", "'partition'"]),
    ],
)
def test_bad_studies_are_refused(tmp_path: Path, changes: dict, words: list[str]) -> None:
    message = refusal(write(tmp_path, **changes))
    assert "small.yaml" in message
    for word in words:
        assert word in message


def test_duplicate_arm(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("name: x\nseeds: [0]\narms:\n  a: {}\n  b: {}\n  a: {max_lr: 1.0}\n")
    assert "'a' is given twice, again in line 6" in refusal(path)


def test_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("name: [unclosed\narms: }")
    assert "not readable as YAML" in refusal(path)
    path.write_bytes(b"\xff\xfe\x00binary")
    assert "not readable as YAML" in refusal(path)
    path.write_text("just words")
    assert "mapping" in refusal(path)


def test_essence_ignores_how_a_run_is_carried_out(tmp_path: Path) -> None:
    def first(**defaults: object) -> dict:
        study = load_study(write(tmp_path, defaults={**SMALL["defaults"], **defaults}))
        return essence(study.runs(tmp_path)[0].config)

    assert first() == first(threads=1, device="cpu", save_interval=7, log_interval=3)
    assert first() == first(model={"preset": "nano"}) == first(min_lr=3e-4)
    assert first() != first(max_steps=5)
    assert first() != first(model="nano,n_layers=2")
    assert first() == first(dataset="elsewhere/" + SMALL["defaults"].get("dataset", "sotu-bpe2048"))
    assert first() != first(dataset="another")
    tsv = "train.tsv,text=a+b,label=c,val={}dev.tsv"
    classify = {"task": "classification", "model": "nano"}
    assert first(dataset="here/" + tsv.format(""), **classify) == first(
        dataset=tsv.format("/there/"), **classify
    )


def test_shipped_studies_are_found_by_name_and_load(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = find_study("quickstart")
    folder = path.parent
    for each in sorted(folder.glob("*.yaml")):
        study = load_study(each)
        assert study.name == each.stem
        assert study.question
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        find_study("quickstrat")
    with pytest.raises(UserError, match="no study at"):
        find_study("nowhere/study.yaml")
