"""A tiny dataset and a study that trains in seconds, for tests with the real trainer."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from oelm.data.corpora import Corpus
from oelm.data.prepare import prepare

TINY = "nano,n_layers=1,d_model=32,n_heads=2,d_ff=64,seq_len=32"


class Babble(Corpus):
    """Documents of random words, always the same."""

    name = "babble"
    held_out = 0.2

    def documents(self, split: str) -> Iterator[str]:
        words = ["the", "of", "and", "in", "a", "is", "that", "for", "it", "was", "with", "be"]
        dice = random.Random(1)
        for _ in range(120):
            yield " ".join(dice.choice(words) for _ in range(60))

    def origin(self) -> dict[str, Any]:
        return {"name": self.name}


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(Babble(), "bytes", out=tmp_path_factory.mktemp("data") / "babble").path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with one thread for each process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def make_study(place: Path, dataset: Path) -> Callable[..., Path]:
    """Write a study of two arms × two seeds; `defaults` and top-level keys can be changed."""

    def make(*, defaults: dict | None = None, **changes: Any) -> Path:
        shared = {
            "model": TINY,
            "dataset": str(dataset),
            "max_steps": 40,
            "batch_size": 2,
            "warmup": 5,
            "max_lr": 3e-3,
            "dropout": 0.0,
            "threads": 1,  # sums in another order would give other bits
            "eval_interval": 20,
            "save_interval": 10,
            "eval_tokens": 256,
        }
        study = {
            "name": "tiny",
            "question": "Does it run?",
            "defaults": {**shared, **(defaults or {})},
            "seeds": [0, 1],
            "arms": {"baseline": {"method": "baseline"}, "frozen": {"method": "oelm_v2"}},
            "claims": {"c": {"metric": "ppl", "arm": "frozen", "vs": "baseline", "at_most": "+5%"}},
        }
        path = place / "tiny.yaml"
        path.write_text(yaml.safe_dump({**study, **changes}, sort_keys=False))
        return path

    return make


def oelm(*argv: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "oelm", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def start(*argv: str | Path, **environment: str) -> subprocess.Popen:
    """The same, without waiting, and in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "oelm", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        process_group=0,
    )


def state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "state.json").read_text())
    except (OSError, ValueError):
        return {}


def results(study: Path) -> dict[str, Any]:
    """What a study found: each run's last weights, and its metrics without the timings."""
    found = {}
    for row in json.loads((study / "plan.json").read_text()):
        run = study / row["folder"]
        assert state(run)["state"] == "finished", (row["folder"], state(run))
        lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
        metrics = [{k: v for k, v in x.items() if k != "seconds"} for x in lines]
        weights = torch.load(run / "best.pt", weights_only=True)["model"]
        last = torch.load(run / "last.pt", weights_only=True)["model"]
        bits = {
            f"{i}.{k}": v.numpy().tobytes()
            for i, w in enumerate((weights, last))
            for k, v in w.items()
        }
        found[row["folder"]] = (metrics, bits)
    return found


def wait_until(condition: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def trainers(study: Path = Path("runs/tiny")) -> list[int]:
    """The processes that hold runs."""
    pids = []
    for lock in study.glob("*/seed-*/lock"):
        with contextlib.suppress(OSError, ValueError):
            pids.append(json.loads(lock.read_text())["pid"])
    return pids


def alive(pid: int) -> bool:
    """Whether a process still runs; one that has ended may wait long for somebody to collect it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
