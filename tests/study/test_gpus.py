import json
import os
import sys
from pathlib import Path

import pytest

from oelm.errors import UserError
from oelm.study import gpus
from oelm.study.engines.local import GpuGroups, threads_each
from oelm.study.gpus import Waiting, chosen

STAND_IN = Path(__file__).parent / "nvml"


class Box:
    """The machine whose GPUs a test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self, *states: dict) -> None:
        self.path.write_text(json.dumps(states))


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("NVML_STAND_IN", str(tmp_path / "gpus.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    import pynvml

    monkeypatch.setattr(gpus, "pynvml", pynvml)
    return Box(tmp_path / "gpus.json")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(gpus.time, "monotonic", lambda: now[0])
    return now


def test_a_machine_without_a_driver_has_no_gpu() -> None:
    if not Path("/proc/driver/nvidia").exists():
        assert gpus.gpus() == []


def test_who_holds_what(box: Box) -> None:
    box.set({"used": 5 * 2**30, "utilisation": 97, "pids": [os.getpid()]}, {"old": True})
    first, second = gpus.gpus()
    assert (first.memory_used, first.utilisation, first.idle) == (5 * 2**30, 97, False)
    assert first.holders[0].pid == os.getpid()
    assert first.holders[0].user not in ("", "?")
    assert second.idle


def test_choosing(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.set({}, {}, {})
    assert chosen(None) == [0, 1, 2]
    assert chosen("2,0") == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert chosen(None) == [1]
    for text, word in (
        ("0,3", "no GPU 3; this machine has 0, 1, 2"),
        ("a", "numbers"),
        ("1,1", "twice"),
    ):
        with pytest.raises(UserError, match=word):
            chosen(text)


def test_groups(box: Box) -> None:
    groups = GpuGroups([0, 1, 2, 3], per_run=2)
    assert groups.threads == threads_each(4)  # a process for each GPU
    first = groups.take([])
    second = groups.take([first])
    assert (first.gpus, second.gpus, groups.take([first, second])) == ((0, 1), (2, 3), None)
    assert second.environment()["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(UserError, match="gpus_per_run is 2, and there are 1"):
        GpuGroups([0], per_run=2)


def test_waits_until_idle_for_a_while(box: Box, clock: list[float]) -> None:
    waiting = Waiting([0, 1], idle_for=60)
    box.set({"utilisation": 90}, {"used": 8 * 2**30})
    assert waiting.free([]) == []
    clock[0] += 30
    box.set({}, {"used": 8 * 2**30})
    assert waiting.free([]) == []  # free, but not for long enough
    clock[0] += 40
    box.set({"utilisation": 50}, {"used": 8 * 2**30})
    assert waiting.free([]) == []  # taken again: the clock starts anew
    clock[0] += 20
    box.set({}, {"used": 8 * 2**30})
    assert waiting.free([]) == []
    clock[0] += 61
    assert waiting.free([]) == [0]
    clock[0] += 61
    assert waiting.free(busy=[0]) == []  # our own is not free


def test_looks_less_often_while_nothing_is_free(box: Box, clock: list[float]) -> None:
    box.set({"utilisation": 90})
    waiting = Waiting([0], idle_for=600)
    looks = 0
    for _ in range(600):
        before = waiting._next_look
        waiting.free([])
        looks += waiting._next_look != before
        clock[0] += 1
    assert looks < 30


def test_gives_way_to_whoever_came_at_the_same_time(box: Box, clock: list[float]) -> None:
    waiting = Waiting([0], idle_for=10)
    box.set({"pids": [os.getppid()]})
    assert [h.pid for h in waiting.intruders([0], ours=[])] == [os.getppid()]
    box.set({"pids": [os.getpid(), 2**22 + 5]})  # ourselves, and a process outside our container
    assert waiting.intruders([0], ours=[os.getpid()]) == []
    box.set({})
    waiting.give_back([0])
    for _ in range(9):
        assert waiting.free([]) == []
        clock[0] += 1
    for _ in range(60):
        clock[0] += 1
        if waiting.free([]) == [0]:
            break
    else:
        pytest.fail("never tried again")
