import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from oelm.config import to_mapping
from oelm.errors import UserError
from oelm.train import checkpoint
from oelm.train.loop import train
from tests.train.runs import metrics

SETTINGS = {"dropout": 0.0, "thaw_warmup": 2, "method": "oelm_thaw", "test": True}
EVERY = "oelm_v2,qk.trains=every,qk.every=3"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(jobs, tmp_path, world=2, timeout=300):
    """Train configurations in `world` processes; returns what each rank said of each."""
    listed = [{"config": to_mapping(config), **more} for config, more in jobs]
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump(listed))
    ranks = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in place.items()}}
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(path)]
        ranks.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        ended = [process.communicate(timeout=timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, ended, strict=True):
        assert process.returncode == 0, errors
    return [[json.loads(line) for line in out.splitlines()] for out, _ in ended]


def assert_close(folder, reference):
    """The same losses and the same weights, to float tolerance; and exactly the same frozen ones."""
    assert len(metrics(folder)) == len(metrics(reference))
    for ours, theirs in zip(metrics(folder), metrics(reference), strict=True):
        assert {k: ours[k] for k in ("kind", "step", "tokens")} == {
            k: theirs[k] for k in ("kind", "step", "tokens")
        }
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)
    one, two = (checkpoint.read(f / "last.pt") for f in (folder, reference))
    assert one["optimizer"].keys() == two["optimizer"].keys()
    for name, tensor in one["model"].items():
        assert tensor.sub(two["model"][name]).abs().max() < 2e-4, name
    assert json.loads((folder / "freeze_audit.json").read_text())["verdict"] == "pass"


def test_two_processes_match_one_with_thaw_stop_and_change_of_processes(tiny, tmp_path):
    reference = train(tiny("one", **SETTINGS))
    every = train(tiny("one-every", **SETTINGS | {"method": EVERY, "grad_accumulation": 2}))
    ddp, fsdp = tiny("ddp", **SETTINGS), tiny("fsdp", **SETTINGS, parallel="fsdp")
    ddp_every = tiny("ddp-every", **SETTINGS | {"method": EVERY, "grad_accumulation": 2})
    moved = tiny("moved", **SETTINGS, parallel="fsdp")
    said = together(
        [
            (ddp, {}),
            (fsdp, {}),
            (ddp_every, {}),
            (moved, {"stop_at": 4}),
            (tiny("moved", **SETTINGS), {"stop_at": 8}),
            (tiny("nan", **SETTINGS, skip_bad_steps=1), {"poison_at": 5}),
            (tiny("nan-fsdp", **SETTINGS, skip_bad_steps=1, parallel="fsdp"), {"poison_at": 5}),
            (tiny("forgotten", **SETTINGS), {"forget_thaw": True}),
        ],
        tmp_path,
    )
    for rank in said:
        assert rank[:3] == ["finished"] * 3
        assert "at step 4, and saved" in rank[3]
        assert "at step 8, and saved" in rank[4]
        assert rank[5:7] == ["finished"] * 2
        # q's own gradients also change the norm by which all are clipped, perhaps only in the last bit.
        assert "the processes hold different values of " in rank[7]
    assert_close(ddp.out_dir, reference)
    assert_close(fsdp.out_dir, reference)
    assert_close(ddp_every.out_dir, every)
    # A NaN on one rank is a bad step on all: passed over, and the same under DDP and FSDP.
    assert_close(tiny("nan-fsdp").out_dir, tiny("nan").out_dir)
    # Begun under FSDP, thawed and continued under DDP, ended by a single process.
    assert_close(train(tiny("moved", **SETTINGS)), reference)


@pytest.mark.slow
def test_twenty_repetitions_in_a_row(tiny, tmp_path):
    reference = train(tiny("one", **SETTINGS))
    jobs = []
    for i in range(20):
        jobs += [
            (tiny(f"ddp-{i}", **SETTINGS), {}),
            (tiny(f"fsdp-{i}", **SETTINGS, parallel="fsdp"), {}),
            (tiny(f"stopped-{i}", **SETTINGS), {"stop_at": 5 + i % 4}),
            (tiny(f"stopped-{i}", **SETTINGS, parallel="fsdp" if i % 2 else "ddp"), {}),
            # An error of its own must not leave a rank waiting for its process group's threads.
            (tiny(f"forgotten-{i}", **SETTINGS), {"forget_thaw": True}),
        ]
    said = together(jobs, tmp_path, timeout=1200)
    for rank in said:
        assert sum(word == "finished" for word in rank) == 60
        assert sum("the processes hold different values" in word for word in rank) == 20
    for config, more in jobs:
        if "forget_thaw" not in more:
            assert_close(config.out_dir, reference)


def test_a_killed_rank_ends_the_others_within_seconds_and_the_run_goes_on(tiny, tmp_path):
    config = tiny(max_steps=100_000, save_interval=10, log_interval=10, eval_interval=10**6)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_mapping(config)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += [f"--master_port={free_port()}", "-m", "oelm", "train", "--config", str(path)]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not (config.out_dir / "last.pt").exists():
            assert time.monotonic() < until
            assert launcher.poll() is None, launcher.stderr.read()
            time.sleep(0.05)
        ranks = {p.environ()["RANK"]: p for p in psutil.Process(launcher.pid).children()}
        os.kill(ranks["1"].pid, signal.SIGKILL)
        _, errors = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode != 0
    assert "rank 0 lost contact with another rank" in errors
    assert "Signal 9 (SIGKILL)" in errors
    state = json.loads((config.out_dir / "state.json").read_text())
    assert state["state"] == "failed"
    assert "lost contact" in state["error"]
    assert checkpoint.read_last(config.out_dir)["step"] >= 10


def test_a_batch_that_cannot_be_split_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="batch_size 8 cannot be split into 3 processes × 1"):
        train(tiny())


def test_an_unusable_device_is_refused(tiny):
    with pytest.raises(UserError, match=r"cannot use device 'cuda:77'.*try --device cpu"):
        train(tiny(device="cuda:77"))
