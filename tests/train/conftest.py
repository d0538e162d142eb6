"""Runs so small that a test can afford many."""

import contextlib
import os
import resource
import shutil
import subprocess

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


@pytest.fixture
def small_disk(tmp_path):
    """A folder that holds 700 KiB, and functions that clear and fill it up to the last byte.

    A tmpfs where we may mount one; else a limit on the size of files stands in for it.
    """
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    if os.geteuid() == 0 and shutil.which("mount") and subprocess.run(mount).returncode == 0:
        filler = folder / "filler"

        def fill():
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

        yield folder, filler.unlink, fill
        subprocess.run(["umount", str(folder)], check=True)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit(size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

        yield folder, lambda: limit(soft), lambda: limit(50_000)
        limit(soft)
