"""`oelm train` that kills itself with SIGKILL: after a step, or amid the writing of a checkpoint.

A killer outside would have to be quick enough to find a run of milliseconds at the right moment.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from oelm.cli import main
from oelm.train import checkpoint
from tests.train.runs import at_step


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def inside_a_save(patch, count):
    """Die before the given piece of what is saved is written."""
    write, pieces = checkpoint._Hashing.write, 0

    def writing(self, data):
        nonlocal pieces
        pieces += 1
        if pieces == count:
            self.flush()
            die()
        return write(self, data)

    patch.setattr(checkpoint._Hashing, "write", writing)


def before_a_rename(patch, count):
    """Die before the given renaming of a checkpoint, of which a save with one before it has two."""
    replace, renamings = os.replace, 0

    def renaming(source, target):
        nonlocal renamings
        renamings += Path(target).suffix == ".pt"
        if renamings == count:
            die()
        return replace(source, target)

    patch.setattr(os, "replace", renaming)


if __name__ == "__main__":
    place, count, config = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    patch = pytest.MonkeyPatch()
    if place == "step":
        at_step(patch, count, die)
    else:
        {"save": inside_a_save, "rename": before_a_rename}[place](patch, count)
    main(["train", "--config", config])
