"""A finished run to export, trained once for all tests."""

import pytest

from oelm.train.config import TrainConfig
from oelm.train.loop import train


@pytest.fixture(scope="session")
def finished_run(tiny_dataset, tmp_path_factory):
    """A small language model after a few real steps."""
    config = TrainConfig(
        method="oelm_v2",
        model="nano,n_layers=2,d_model=32,n_heads=2,d_ff=64,seq_len=64",
        dataset=str(tiny_dataset),
        out_dir=tmp_path_factory.mktemp("runs") / "run",
        max_steps=30,
        batch_size=8,
        max_lr=1e-2,
        warmup=3,
        eval_interval=10,
        save_interval=30,
        test=True,
        threads=1,
        device="cpu",
        precision="fp32",
    )
    return train(config)
