import json
import re

import pytest
import torch

from oelm.cli import main
from oelm.config import load_yaml
from oelm.errors import UserError
from oelm.train import checkpoint, classification
from oelm.train.classification import ClassificationTask, _scores
from oelm.train.config import TrainConfig
from oelm.train.loop import train
from oelm.train.saved import audit_checkpoint
from tests.train.runs import assert_same_run, metrics

TINY = "nano,n_layers=2,d_model=32,n_heads=2,d_ff=64,seq_len=32"


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """Texts whose first word tells the class; some longer than the model."""
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "home"))
    file = tmp_path / "reviews.tsv"
    words = {"0": "bad", "1": "good"}
    rows = [f"{words[str(i % 2)]} {'film ' * (i % 9)}{i}\t{i % 2}" for i in range(300)]
    file.write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    return file


@pytest.fixture
def make(reviews, tmp_path):
    def configuration(out="run", **changes):
        given = {
            "task": "classification",
            "method": "oelm_v2",
            "model": TINY,
            "dataset": f"{reviews},tokenizer=bytes",
            "out_dir": tmp_path / out,
            "max_steps": 60,
            "batch_size": 16,
            "max_lr": 1e-2,
            "warmup": 5,
            "eval_interval": 20,
            "save_interval": 20,
            "log_interval": 5,
            "dropout": 0.0,
            "test": True,
            "threads": 1,
            "device": "cpu",
            "precision": "fp32",
        }
        return TrainConfig(**{**given, **changes})

    return configuration


@pytest.mark.parametrize("causal", [False, True])
def test_an_encoder_and_a_causal_model_learn(make, causal):
    folder = train(make(causal=causal))
    final = [line for line in metrics(folder) if line["kind"] == "eval" and line["full"]]
    assert [line["split"] for line in final] == ["val", "test"]
    for line in final:
        assert line["accuracy"] > 0.95
        assert line["macro_f1"] > 0.95
        assert line["rows"] == sum(map(sum, line["confusion"]))
        assert (
            line["accuracy"] == (line["confusion"][0][0] + line["confusion"][1][1]) / line["rows"]
        )
        assert set(line["classes"]) == {"0", "1"}
    during = [line for line in metrics(folder) if line["kind"] == "eval" and not line["full"]]
    assert [line["step"] for line in during] == [20, 40, 60]
    assert all("confusion" not in line and "ppl" not in line for line in during)
    stats = json.loads((folder / "timing_stats.json").read_text())
    assert stats["final_accuracy"] == final[0]["accuracy"]
    assert stats["final_perplexity"] is None
    assert json.loads((folder / "freeze_audit.json").read_text())["verdict"] == "pass"
    assert audit_checkpoint(folder)["verdict"] == "pass"


def test_scores_say_what_labels_mean(make, monkeypatch):
    assert classification.MEANINGS["movie-reviews"] == {"0": "negative", "1": "positive"}
    monkeypatch.setitem(classification.MEANINGS, "reviews", {"0": "bad", "1": "good"})
    folder = train(make(max_steps=2))
    final = [line for line in metrics(folder) if line["kind"] == "eval" and line["full"]]
    assert [list(line["classes"]) for line in final] == [["bad", "good"]] * 2
    # The configuration keeps the labels, so that a run begun before continues.
    assert load_yaml(folder / "config.yaml")["resolved"]["dataset"]["classes"] == ["0", "1"]


def test_what_was_cut_and_padded_is_recorded_and_said(make):
    folder = train(make(max_steps=2, test=False))
    about = load_yaml(folder / "config.yaml")["resolved"]["dataset"]
    assert about["truncated"]["train"] > 0
    assert about["padding"]["bucketed"] < about["padding"]["unsorted"]
    log = (folder / "training.log").read_text()
    assert (
        f"train: {about['truncated']['train']} of {about['rows']['train']} texts are longer" in log
    )
    assert re.search(r"padding: [\d.]+ % of tokens, [\d.]+ % unsorted", log)


def test_a_run_cut_short_continues_to_the_same_bits(make, monkeypatch):
    whole = train(make("whole", dropout=0.1))

    class CutError(Exception):
        pass

    batches = ClassificationTask.batches

    def cut(self, start, processes):
        for t, batch in enumerate(batches(self, start, processes), start):
            if t == 45:
                raise CutError
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(ClassificationTask, "batches", cut)
        with pytest.raises(CutError):
            train(make("cut", dropout=0.1))
    assert checkpoint.read(make("cut").out_dir / checkpoint.LAST)["step"] == 40
    assert_same_run(train(make("cut", dropout=0.1)), whole)


def test_arms_of_a_seed_share_what_they_do_not_treat(make):
    one, two = (ClassificationTask(make(method=m)).build() for m in ("baseline", "oelm_v2"))
    same = {n for n, t in one.state_dict().items() if torch.equal(t, two.state_dict()[n])}
    assert one.state_dict().keys() - same == {
        f"blocks.{i}.attention.{p}.weight" for i in (0, 1) for p in "qk"
    }


def test_scores_of_a_known_confusion_matrix():
    found = _scores(torch.tensor([[3, 1, 0], [2, 4, 0], [0, 0, 0]]).double(), ["a", "b", "c"])
    assert found["accuracy"] == 0.7
    assert found["classes"]["a"] == {
        "precision": 0.6, "recall": 0.75, "f1": pytest.approx(2 / 3), "rows": 4,
    }  # fmt: skip
    assert found["classes"]["c"]["f1"] == 0
    assert found["macro_f1"] == pytest.approx((2 / 3 + 8 / 11 + 0) / 3)


def test_the_default_data_set_and_fields_that_contradict():
    assert TrainConfig(task="classification", model="nano").dataset == "movie-reviews"
    assert TrainConfig(model="nano").dataset == "sotu-bpe2048"
    named = TrainConfig(task="classification", model="nano", dataset="sotu-bpe2048")
    assert named.dataset == "sotu-bpe2048"  # refused when it is opened, not replaced
    with pytest.raises(UserError, match="for task: classification"):
        TrainConfig(causal=True)
    with pytest.raises(UserError, match="for task: classification"):
        TrainConfig(model="hf:bert-base-uncased")


def test_bad_input_is_one_line_and_code_2(reviews, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(
            ["train", "--task", "classification", "--model", TINY, "--out_dir", str(tmp_path / "out"),
             "--dataset", f"{reviews},label=stars"]
        )  # fmt: skip
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"oelm: .*has no label column 'stars'.*\n", error)
