"""The local engine with the real trainer: killed, doubled, stopped, on stand-in GPUs."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oelm.study.engines import local
from oelm.study.engines.slurm import rendezvous
from oelm.study.queue import Queue, write_config

from .conftest import alive, oelm, results, start, state, trainers, wait_until
from .test_gpus import STAND_IN

Make = Callable[..., Path]


def steps(study: Path = Path("runs/tiny")) -> int:
    """How far the runs are, all together."""
    return sum(state(f.parent).get("step", 0) for f in study.glob("*/seed-*/state.json"))


def undisturbed(make_study: Make, **options: dict) -> dict:
    path = make_study(**options)
    oelm("run", path, "--slots", "2", "--runs", "calm")
    return results(Path("calm/tiny"))


def test_killed_at_random_and_with_two_runners(make_study: Make) -> None:
    """SIGKILL for runners and trainers; two runners at once: bit for bit as if nothing had been."""
    longer = {"defaults": {"max_steps": 2000}}  # enough for two disturbances before all is done
    expected = undisturbed(make_study, **longer)
    path, dice = make_study(**longer), random.Random(0)
    for _ in range(2):
        enough = steps() + 30
        runners = [start("run", path, "--slots", "1") for _ in range(2)]
        wait_until(lambda enough=enough: steps() > enough)
        if held := trainers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(held), signal.SIGKILL)
        for runner in runners:
            runner.kill()
            runner.communicate()
    runners = [start("run", path, "--slots", "1") for _ in range(2)]
    outputs = [r.communicate(timeout=900)[0] for r in runners]
    assert [r.returncode for r in runners] == [0, 0], outputs
    assert results(Path("runs/tiny")) == expected

    files = {f: f.stat().st_mtime_ns for f in Path("runs/tiny").glob("*/seed-*/metrics.jsonl")}
    again = oelm("run", path, "--slots", "2")
    assert "started" not in again.stdout
    assert "all 4 runs are finished" in again.stdout
    assert files == {f: f.stat().st_mtime_ns for f in files}


def test_ctrl_c_saves_and_the_next_start_continues(make_study: Make) -> None:
    path = make_study(defaults={"max_steps": 10_000, "save_interval": 5000}, seeds=[0])
    runner = start("run", path, "--slots", "2")
    wait_until(lambda: steps() > 20)
    runner.send_signal(signal.SIGINT)
    output = runner.communicate(timeout=300)[0]
    assert runner.returncode == 3
    assert "runs save and end" in output
    folders = [Path(f"runs/tiny/{arm}/seed-0") for arm in ("baseline", "frozen")]
    for folder in folders:
        if state(folder):
            assert state(folder)["state"] == "stopped"
            assert (folder / "last.pt").exists()
    done = oelm("run", path, "--slots", "2")
    assert "finished" in done.stdout
    assert [state(f)["state"] for f in folders] == ["finished", "finished"]
    assert "continuing from step" in "".join((f / "training.log").read_text() for f in folders)


def test_twice_ends_at_once(make_study: Make) -> None:
    runner = start("run", make_study(defaults={"max_steps": 10**6}, seeds=[0]), "--slots", "2")
    wait_until(lambda: steps() > 10)
    held = trainers()
    os.kill(held[0], signal.SIGSTOP)  # it cannot obey a polite request
    runner.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert runner.poll() is None
    runner.send_signal(signal.SIGINT)
    assert runner.wait(timeout=120) == 3
    runner.stdout.close()
    wait_until(lambda: not any(alive(pid) for pid in held))


def test_a_signal_to_the_whole_group_stops_gracefully(make_study: Make) -> None:
    runner = start("run", make_study(defaults={"max_steps": 10**6}, seeds=[0]), "--slots", "2")
    wait_until(lambda: steps() > 10)
    held = trainers()
    os.killpg(runner.pid, signal.SIGTERM)  # as `timeout` does
    output = runner.communicate(timeout=120)[0]
    assert runner.returncode == 3, output
    assert not any(alive(pid) for pid in held)
    states = [state(Path(f"runs/tiny/{arm}/seed-0"))["state"] for arm in ("baseline", "frozen")]
    assert states == ["stopped", "stopped"]


def test_threads_are_shared_out_and_never_more_than_the_user_says(monkeypatch) -> None:
    monkeypatch.setattr(local, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [local.threads_each(n) for n in (1, 2, 3, 20)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [local.threads_each(n) for n in (1, 2, 3, 20)] == [3, 3, 2, 1]


def test_stop_by_command_with_and_without_a_runner(make_study: Make) -> None:
    path = make_study(defaults={"max_steps": 10**6}, seeds=[0])
    runner = start("run", path, "--slots", "2")
    wait_until(lambda: len(trainers()) == 2 and steps() > 10)
    oelm("stop", "tiny/frozen/seed-0")
    assert state(Path("runs/tiny/frozen/seed-0"))["state"] == "stopped"
    wait_until(lambda: len(trainers()) == 1)  # it says so before it has quite ended
    time.sleep(1)
    assert len(trainers()) == 1  # the runner does not start it again
    runner.kill()
    runner.wait()
    runner.stdout.close()
    stopped = oelm("stop", "tiny")  # its trainer lives on without a runner
    assert "continues it" in stopped.stdout
    assert state(Path("runs/tiny/baseline/seed-0"))["state"] == "stopped"
    assert trainers() == []


def test_a_run_that_cannot_succeed_fails_and_the_rest_goes_on(make_study: Make) -> None:
    arms = {"baseline": {"method": "baseline"}, "frozen": {"method": "oelm_v2", "max_lr": 1e30}}
    path = make_study(arms=arms, seeds=[0])
    done = oelm("run", path, "--slots", "2", check=False)
    assert done.returncode == 1
    assert "1 failed; `oelm logs runs/tiny/frozen/seed-0` says why" in done.stderr
    assert state(Path("runs/tiny/baseline/seed-0"))["state"] == "finished"
    shown = json.loads(oelm("status", "tiny", "--json").stdout)["runs"]
    assert [(r["state"], r["attempts"]) for r in shown] == [("finished", 0), ("failed", 1)]
    assert "finite" in shown[1]["error"]
    again = oelm("run", path, check=False)
    assert "started" not in again.stdout
    retried = oelm("run", path, "--retry-failed", check=False)
    assert "frozen/seed-0: started" in retried.stdout


@pytest.mark.slow
def test_detached(make_study: Make) -> None:
    done = oelm("run", make_study(seeds=[0]), "--slots", "2", "--detach")
    assert "oelm stop tiny" in done.stdout
    finished = [Path(f"runs/tiny/{arm}/seed-0") for arm in ("baseline", "frozen")]
    wait_until(lambda: all(state(f).get("state") == "finished" for f in finished))
    log = Path("runs/tiny/runner.log")
    wait_until(lambda: "all 2 runs are finished" in log.read_text())


@pytest.fixture
def gpus(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Four GPUs that only NVML's stand-in knows; the trainers compute on the CPU."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("NVML_STAND_IN", str(place / "gpus.json"))

    def set_to(*states: dict) -> None:
        temporary = place / "gpus.json.new"
        temporary.write_text(json.dumps(states))
        temporary.rename(place / "gpus.json")

    return set_to


@pytest.mark.slow
def test_groups_of_gpus_train_one_run_together(make_study: Make, gpus: Callable[..., None]) -> None:
    gpus({}, {}, {})
    path = make_study(seeds=[0], defaults={"device": "cpu"}, needs={"gpus_per_run": 2})
    done = oelm("run", path, "--gpus", "0,2")
    assert "on local gpu 0,2" in done.stdout
    for arm in ("baseline", "frozen"):
        environment = json.loads(Path(f"runs/tiny/{arm}/seed-0/environment.json").read_text())
        assert environment["processes"] == 2


def test_waits_for_gpus_that_others_hold(make_study: Make, gpus: Callable[..., None]) -> None:
    busy = {"used": 9 * 2**30, "utilisation": 80, "pids": [os.getpid()]}
    gpus(busy, busy)
    path = make_study(seeds=[0], defaults={"device": "cpu"})
    runner = start("run", path, "--wait-idle", "1")
    wait_until(lambda: Path("runs/tiny/plan.json").exists())
    time.sleep(2)
    assert not list(Path("runs/tiny").glob("*/seed-*"))
    shown = oelm("status", "tiny").stdout
    assert f"({os.getpid()}, " in shown
    gpus(busy, {})
    output = runner.communicate(timeout=900)[0]
    assert runner.returncode == 0
    assert output.count("started on local gpu 1") == 2
    assert "gpu 0" not in output


@pytest.mark.slow
def test_nodes_of_a_job_find_each_other(make_study: Make) -> None:
    """What two nodes of a Slurm job run, side by side on this machine."""
    run = Queue(make_study(seeds=[0], defaults={"device": "cpu"})).runs[0]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    command += [*rendezvous("localhost", os.getpid(), 2), "-m", "oelm", "train"]
    nodes = [subprocess.Popen([*command, "--config", str(write_config(run))]) for _ in range(2)]
    assert [node.wait(timeout=900) for node in nodes] == [0, 0]
    assert state(run.folder)["state"] == "finished"
    assert json.loads((run.folder / "environment.json").read_text())["processes"] == 2


def test_bad_input_starts_nothing(make_study: Make, gpus: Callable[..., None]) -> None:
    gpus({})
    path = make_study()

    def refused(*argv: str | Path, path: Path = path) -> str:
        done = oelm("run", path, *argv, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert not Path("runs").exists()
        return done.stderr

    assert "no GPU 3" in refused("--gpus", "0,3")
    assert "exclude" in refused("--gpus", "0", "--slots", "1")
    assert "at least 1" in refused("--slots", "-1")
    assert "baseline, frozen" in refused("--only", "x")
    assert "--on slurm" in refused("--partition", "x")
    assert "for --on local" in refused("--on", "slurm", "--slots", "2")
    assert "did you mean" in refused("--retryfailed")
    gone = make_study(defaults={"dataset": "nowhere"})
    assert "no dataset 'nowhere'" in refused(path=gone)


def test_slurm_that_is_not_there(make_study: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = oelm("run", make_study(), "--on", "slurm", check=False)
    assert done.returncode == 2
    assert "`sbatch` was not found" in done.stderr
    assert not Path("runs").exists()
