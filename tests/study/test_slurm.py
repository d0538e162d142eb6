"""A real one-node Slurm (started by tests/study/slurm/test.sh) against the local engine."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import oelm, results, state
from .test_local import steps, wait_until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("sbatch") is None, reason="there is no Slurm here"),
]
NEEDS = {"slurm": {"cpus_per_task": 1, "time": 30}}
RUNS = [Path(f"runs/tiny/{arm}/seed-{seed}") for arm in ("baseline", "frozen") for seed in (0, 1)]


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def job(run: Path) -> str:
    return json.loads((run / "slurm.json").read_text())["job"]


def restarts(run: Path) -> int:
    return int(re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", job(run)))[1])


def finished() -> bool:
    return all(state(run).get("state") == "finished" for run in RUNS)


def test_requeued_and_preempted_yet_the_same_weights(make_study: Callable[..., Path]) -> None:
    path = make_study(
        defaults={"max_steps": 10_000, "device": "cpu", "save_interval": 100}, needs=NEEDS
    )
    submitted = oelm("run", path, "--on", "slurm")
    assert "4 jobs submitted" in submitted.stdout
    again = oelm("run", path, "--on", "slurm")
    assert "0 jobs submitted" in again.stdout

    wait_until(lambda: steps() > 400)
    shown = json.loads(oelm("status", "tiny", "--json").stdout)
    assert {r["state"] for r in shown["runs"]} <= {"running", "queued", "configuring"}
    running = [run for run in RUNS if state(run).get("state") == "running"]
    assert state(running[0])["where"].startswith("slurm ")
    slurm("scontrol", "requeue", job(running[0]))
    wait_until(lambda: state(running[0]).get("attempt", 1) > 1 or finished())
    so_far = steps()
    wait_until(lambda: steps() > so_far + 300)
    slurm("sbatch", "-p", "high", "-c", "2", "-o", "/dev/null", "--wrap", "sleep 3")
    wait_until(finished, 1200)

    times = [restarts(run) for run in RUNS]
    assert sum(times) >= 2, times
    resumed = "".join((run / "training.log").read_text() for run in RUNS)
    assert resumed.count("continuing from step") >= 2
    assert all(not (run / "attempts.jsonl").exists() for run in RUNS)  # nothing counts as a crash
    found = results(Path("runs/tiny"))
    oelm("run", path, "--slots", "2", "--runs", "here")
    assert found == results(Path("here/tiny"))
    assert "0 jobs submitted" in oelm("run", path, "--on", "slurm").stdout


def test_stop_and_continue(make_study: Callable[..., Path]) -> None:
    path = make_study(defaults={"max_steps": 10**6, "device": "cpu"}, needs=NEEDS)
    oelm("run", path, "--on", "slurm")
    wait_until(lambda: steps() > 20)
    stopped = oelm("stop", "tiny")
    assert "taken out of Slurm's queue" in stopped.stdout
    wait_until(lambda: not slurm("squeue", "-h", "-n", "oelm-tiny", "-t", "PENDING,RUNNING"))
    assert {state(run).get("state") for run in RUNS} <= {"stopped", None}
    assert "4 jobs submitted" in oelm("run", path, "--on", "slurm").stdout
    oelm("stop", "tiny")


def test_what_slurm_refuses_is_one_line(make_study: Callable[..., Path]) -> None:
    path = make_study(defaults={"device": "cpu"}, needs=NEEDS)
    done = oelm("run", path, "--on", "slurm", "--partition", "nowhere", check=False)
    assert done.returncode == 2
    assert "Slurm refused the jobs" in done.stderr
    assert "partition" in done.stderr
    assert len(done.stderr.splitlines()) == 1
