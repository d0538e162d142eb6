"""Runs so small that a test can afford many."""

import pytest

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
