"""`oelm train` that kills itself with SIGKILL: after a step, or amid the writing of a checkpoint.

A killer outside would have to be quick enough to find a run of milliseconds at the right moment.
"""

import os
import signal
import sys

import pytest

from oelm.cli import main
from oelm.train import checkpoint
from tests.train.runs import at_step


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def inside_a_save(patch, piece):
    """Die before the given piece of the first checkpoint is written."""
    write, pieces = checkpoint._Hashing.write, 0

    def writing(self, data):
        nonlocal pieces
        pieces += 1
        if pieces == piece:
            self.flush()
            die()
        return write(self, data)

    patch.setattr(checkpoint._Hashing, "write", writing)


if __name__ == "__main__":
    place, count, config = sys.argv[1:]
    if place == "step":
        at_step(pytest.MonkeyPatch(), int(count), die)
    else:
        inside_a_save(pytest.MonkeyPatch(), int(count))
    sys.argv = ["oelm", "train", "--config", config]
    main()
