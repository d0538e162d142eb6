"""How the tests cut runs short, and what they read off run folders."""

import json

from oelm.train import checkpoint
from oelm.train.loop import Trainer


def at_step(monkeypatch, step, action):
    """Do something right after a step, once."""
    original = Trainer.step

    def stepping(self, batch):
        result = original(self, batch)
        if self.state.progress.step == step and not getattr(stepping, "done", False):
            stepping.done = True
            action()
        return result

    monkeypatch.setattr(Trainer, "step", stepping)


def crash():
    raise MemoryError("the machine went away")


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
