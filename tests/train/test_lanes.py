"""Two halves of a batch side by side: the same gradient, whichever half is first."""

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from oelm.train.lanes import Lanes
from oelm.train.loop import train
from tests.train.runs import assert_same_run, at_step, crash, metrics


def test_each_lane_has_half_of_the_threads_and_the_caller_has_its_own_again(two_threads):
    meet = threading.Barrier(2)

    def threads(_):
        meet.wait(10)
        return torch.get_num_threads()

    assert Lanes().both(threads, (0, 1)) == [1, 1]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_halves_side_by_side_are_the_whole_with_its_gradients(two_threads, rows):
    layer = torch.nn.Linear(3, 4)
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    whole, halves = layer(x), Lanes()(layer, x)
    torch.testing.assert_close(halves, whole)
    wanted = (x, layer.weight, layer.bias)
    expected = torch.autograd.grad(whole.square().sum(), wanted)
    halves.square().sum().backward()
    for tensor, grad in zip(wanted, expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad)


def test_backward_in_lanes_imports_no_computer_algebra():
    program = """
import sys, torch
from oelm.train.lanes import Lanes
torch.set_num_threads(2)
x = torch.ones(2, 3, requires_grad=True)
Lanes()(torch.exp, x).sum().backward()
assert x.grad is not None and "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_lanes_know_what_holds_where_they_were_called(two_threads):
    found = []

    def work(half):
        found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return half

    x = torch.ones(2, 3, requires_grad=True)
    lanes = Lanes()
    lanes(work, x)
    with torch.no_grad():
        assert not lanes(work, x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        lanes(work, x)
    assert found == [(True, False)] * 2 + [(False, False)] * 2 + [(True, True)] * 2


@pytest.mark.parametrize("pieces", [(1, 0), (0, 1)])
def test_an_error_in_a_lane_reaches_the_caller_when_both_have_ended(two_threads, pieces):
    ended = []

    def work(n):
        if n:
            time.sleep(0.1)
            ended.append(n)
        return 1 // n

    with pytest.raises(ZeroDivisionError):
        Lanes().both(work, pieces)
    assert ended == [1]
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux to count threads")
def test_the_callers_helpers_do_not_wait_beside_the_lanes(two_threads):
    lanes, many = Lanes(), torch.ones(2**20)
    many.exp()
    before = len(os.listdir("/proc/self/task"))
    counts = lanes.both(lambda n: len(os.listdir("/proc/self/task")), (0, 1))
    assert counts == [before - 1] * 2
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
