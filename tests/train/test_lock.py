import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from oelm.train import lock
from oelm.train.errors import InUseError
from oelm.train.lock import FolderLock, holder


def foreign(folder, age, name="lock", token="x"):
    """A lock of a process on another host, last renewed `age` seconds ago."""
    path = folder / name
    beat = time.time() - age
    path.write_text(
        json.dumps({"host": "far", "pid": 1, "started": 0, "heartbeat": beat, "token": token})
    )
    os.utime(path, (beat, beat))


def test_a_second_holder_is_refused_by_name_and_let_in_afterwards(tmp_path):
    with FolderLock(tmp_path):
        assert holder(tmp_path)["pid"] == os.getpid()
        with pytest.raises(InUseError, match=f"{socket.gethostname()}, process {os.getpid()}"):
            FolderLock(tmp_path).__enter__()
    assert holder(tmp_path) is None
    with FolderLock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_killed_holder_is_replaced_at_once(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from oelm.train.lock import FolderLock\n"
        "FolderLock(Path(sys.argv[1])).__enter__(); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(InUseError):
        FolderLock(tmp_path).__enter__()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped: a zombie
    with FolderLock(tmp_path):
        assert holder(tmp_path)["pid"] == os.getpid()
    process.wait()
    process.stdout.close()


def test_a_process_that_got_a_dead_holders_number_is_not_the_holder(tmp_path):
    content = {"host": socket.gethostname(), "pid": os.getppid(), "started": 1.0}
    (tmp_path / "lock").write_text(json.dumps({**content, "heartbeat": time.time(), "token": "x"}))
    with FolderLock(tmp_path):
        pass


def test_another_host_is_judged_by_its_heartbeat(tmp_path):
    foreign(tmp_path, age=10)
    with pytest.raises(InUseError, match="host far, process 1, heartbeat 10 s ago"):
        FolderLock(tmp_path, stale=60).__enter__()
    foreign(tmp_path, age=100)
    assert holder(tmp_path, stale=60) is None
    with FolderLock(tmp_path, stale=60):
        assert holder(tmp_path)["host"] == socket.gethostname()


def test_of_many_that_find_a_dead_lock_exactly_one_gets_it(tmp_path):
    for attempt in range(60):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        foreign(folder, age=1000)
        locks = [FolderLock(folder) for _ in range(8)]

        def enter(one):
            try:
                return one.__enter__()
            except InUseError:
                return None

        with ThreadPoolExecutor(8) as pool:
            winners = [w for w in pool.map(enter, locks) if w]
        assert len(winners) == 1
        assert [p.name for p in folder.iterdir()] == ["lock"]
        assert holder(folder)["token"] == winners[0].token
        winners[0].__exit__(None, None, None)


def test_a_claim_whose_claimant_died_in_turn_is_taken_as_well(tmp_path):
    for name, token in (("lock", "x"), ("lock.of.x", "y"), ("lock.of.x.of.y", "z")):
        foreign(tmp_path, age=1000, name=name, token=token)
    with FolderLock(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == ["lock"]
        assert holder(tmp_path)["pid"] == os.getpid()


def test_who_is_just_taking_a_dead_lock_over_counts_as_its_holder(tmp_path):
    foreign(tmp_path, age=1000)
    foreign(tmp_path, age=1, name="lock.of.x", token="y")
    with pytest.raises(InUseError, match="host far, process 1, heartbeat 1 s ago"):
        FolderLock(tmp_path).__enter__()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "lock.of.x"]


def test_the_heartbeat_is_renewed_and_a_takeover_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    beats = []
    with FolderLock(tmp_path, on_beat=lambda: beats.append(1)) as held:
        first = holder(tmp_path)["heartbeat"]
        wait_until(lambda: len(beats) > 2)
        assert holder(tmp_path)["heartbeat"] > first
        held.check()
        foreign(tmp_path, age=0)
        wait_until(lambda: held.lost)
        with pytest.raises(InUseError, match="taken over: host far"):
            held.check()
    assert (tmp_path / "lock").exists()  # the other's lock is left alone


def wait_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)
