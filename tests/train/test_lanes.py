"""Two halves of a batch side by side: the same gradient, whichever half is first."""

import math
import os
import threading
from pathlib import Path

import pytest
import torch

from oelm.train.lanes import Lanes
from oelm.train.loop import train
from tests.train.runs import assert_same_run, at_step, crash, metrics


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_each_lane_has_half_of_the_threads_and_the_caller_keeps_its_own(two_threads):
    meet = threading.Barrier(2)

    def threads(_):
        meet.wait(10)
        return torch.get_num_threads()

    assert Lanes().map(threads, [0, 1]) == [1, 1]
    assert torch.get_num_threads() == 2


def test_an_error_in_a_lane_reaches_the_caller(two_threads):
    with pytest.raises(ZeroDivisionError):
        Lanes().map(lambda n: 1 // n, [1, 0])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux to count threads")
def test_the_callers_helpers_do_not_wait_beside_the_lanes(two_threads):
    lanes, many = Lanes(), torch.ones(2**20)
    many.exp()
    before = len(os.listdir("/proc/self/task"))
    assert lanes.map(lambda n: len(os.listdir("/proc/self/task")), [0]) == [before - 1]
    assert many.exp().sum() == pytest.approx(2**20 * math.e)  # with a new helper


def test_a_run_in_two_lanes_repeats_and_resumes_bit_for_bit_and_matches_one(
    tiny, two_threads, monkeypatch
):
    train(tiny("first", threads=2, dropout=0.0))
    with monkeypatch.context() as patch:
        at_step(patch, 5, crash)
        with pytest.raises(MemoryError):
            train(tiny("again", threads=2, dropout=0.0))
    train(tiny("again", threads=2, dropout=0.0))
    train(tiny("one", threads=1, dropout=0.0))
    first, again, one = (tiny(out).out_dir for out in ("first", "again", "one"))
    assert_same_run(first, again)
    losses = [
        [line["loss"] for line in metrics(folder) if "loss" in line] for folder in (first, one)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
