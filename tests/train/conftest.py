"""Runs so small that a test can afford many."""

import json

import pytest

from oelm.train import checkpoint
from oelm.train.config import TrainConfig

TINY = "nano,n_layers=2,d_model=32,n_heads=2,d_ff=64,seq_len=32"


@pytest.fixture
def tiny(tiny_dataset, tmp_path):
    """A function that makes the configuration of a tiny run."""

    def make(out="run", **changes):
        given = {
            "method": "oelm_v2",
            "model": TINY,
            "dataset": str(tiny_dataset),
            "out_dir": tmp_path / out,
            "max_steps": 12,
            "batch_size": 8,
            "max_lr": 3e-3,
            "warmup": 3,
            "eval_interval": 6,
            "eval_tokens": 300,
            "save_interval": 4,
            "log_interval": 3,
            "dropout": 0.1,
            "threads": 1,
            "device": "cpu",
            "precision": "fp32",
        }
        return TrainConfig(**{**given, **changes})

    return make


def metrics(folder, timed=False):
    """The lines of a run's metrics, without how long things took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if timed or k != "seconds"} for line in lines]


def assert_same_run(a, b):
    """Two runs agree bit for bit: weights, moments, best weights, metrics."""
    one, two = (checkpoint.read(folder / checkpoint.LAST) for folder in (a, b))
    assert one["step"] == two["step"]
    for part in ("model", "optimizer"):
        assert one[part].keys() == two[part].keys()
    for name, tensor in one["model"].items():
        assert tensor.equal(two["model"][name]), name
    for name, moments in one["optimizer"].items():
        for key, tensor in moments.items():
            assert tensor.equal(two["optimizer"][name][key]), (name, key)
    best_one, best_two = (checkpoint.read(folder / checkpoint.BEST) for folder in (a, b))
    assert best_one["step"] == best_two["step"]
    for name, tensor in best_one["model"].items():
        assert tensor.equal(best_two["model"][name]), name
    assert metrics(a) == metrics(b)
