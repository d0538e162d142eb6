"""`oelm run` and `oelm stop`: start a study's runs, and stop them gracefully."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oelm.cli.options import parse
from oelm.errors import UserError

if TYPE_CHECKING:
    from oelm.study.engines.local import Places
    from oelm.study.plan import Study
    from oelm.study.queue import Queue

FAILED, STOPPED = 1, 3


def run(argv: list[str]) -> int:
    """Entry point of `oelm run`."""
    return parse(_run, argv, prog="oelm run")


def stop(argv: list[str]) -> int:
    """Entry point of `oelm stop`."""
    return parse(_stop, argv, prog="oelm stop")


def _run(
    study: str,
    /,
    *,
    gpus: str | None = None,
    slots: int | None = None,
    on: Literal["local", "slurm"] = "local",
    only: str | None = None,
    retry_failed: bool = False,
    wait_idle: float | None = None,
    detach: bool = False,
    keep_results: bool = False,
    fresh: bool = False,
    runs: Path = Path("runs"),
    partition: str | None = None,
    time: int | None = None,
    gres: str | None = None,
    account: str | None = None,
) -> int:
    """Run a study, or what is left of it: here, on shared GPUs, or on Slurm.

    The folders under runs/ are the truth: the same command again continues what is unfinished and
    repeats nothing, two runners share the work, and a crashed run is tried again from its last
    checkpoint. Ctrl-C lets every run save and end; twice ends them at once. Exit codes: 0 all
    finished (or submitted), 1 some failed, 2 wrong input, 3 stopped.

    Args:
        study: A YAML file, or the name of one in studies/ (`quickstart`).
        gpus: The GPUs to use, such as 0,2; all if not given.
        slots: Runs side by side on the CPU, which share its threads; 1 where there is no GPU.
        on: This machine, or a Slurm cluster.
        only: The one arm to run.
        retry_failed: Give runs that failed for good another chance.
        wait_idle: Wait for GPUs that nobody has used for so many seconds, and give way to others.
        detach: Go on in the background.
        keep_results: At the end, copy the finished runs, without weights, to results/.
        fresh: Train here what results/ holds already, too.
        runs: Where the study's folder is.
        partition: Slurm's partition.
        time: Minutes that Slurm gives a job before it saves and goes back into the queue.
        gres: What a Slurm job needs, such as gpu:1.
        account: Whom Slurm charges.
    """
    from oelm.study.folders import final_failure
    from oelm.study.plan import find_study
    from oelm.study.queue import Queue
    from oelm.study.queue import keep_results as keep

    queue = Queue(find_study(study), runs, only=only)
    flags: dict[str, Any] = {"partition": partition, "time": time, "gres": gres, "account": account}
    asked = {k: v for k, v in flags.items() if v is not None}
    if on == "local" and asked:
        raise UserError(f"--{next(iter(asked))} is for Slurm; add --on slurm")
    if on == "slurm" and (gpus or slots or wait_idle is not None or detach):
        raise UserError("--gpus, --slots, --wait-idle and --detach are for --on local")
    _require_datasets(queue)
    results = None if fresh else Path("results")
    if on == "slurm":
        from oelm.study.engines.slurm import require_slurm, submit

        require_slurm()
        _tell(queue.open(results=results, retry_failed=retry_failed))
        needs = dataclasses.replace(queue.study.needs.slurm, **asked)
        jobs = submit(queue, needs, queue.study.needs.gpus_per_run)
        print(f"{len(jobs)} jobs submitted; `oelm status {queue.study.name}` shows how they do")
        for name, job in jobs.items():
            print(f"  {job}  {name}")
        return 0
    places, _, _ = choose_places(queue.study, gpus, slots, wait_idle)
    _tell(queue.open(results=results, retry_failed=retry_failed))
    if detach:
        return _detach(queue)
    from oelm.study.engines.local import work

    work(queue, places, lambda line: print(line, flush=True))
    if keep_results:
        print(f"finished runs kept in {keep(queue, Path('results'))}")
    left = queue.unfinished()
    if not left:
        print(f"all {len(queue.runs)} runs are finished; `oelm report {queue.folder}` is next")
        return 0
    failed = [r for r in left if final_failure(r.folder)]
    if failed:
        print(f"{len(failed)} failed; `oelm logs {failed[0].folder}` says why", file=sys.stderr)
    return FAILED if failed and len(failed) == len(left) else STOPPED


def choose_places(
    study: "Study", gpus: str | None, slots: int | None, wait_idle: float | None = None
) -> "tuple[Places, int, bool]":
    """Where runs compute, how many at a time, and whether on GPUs: if there are any, they are used."""
    from oelm.study.engines.local import CpuSlots, GpuGroups
    from oelm.study.gpus import Waiting, chosen

    if gpus is not None and slots is not None:
        raise UserError("--gpus and --slots exclude each other: a run is on GPUs or on the CPU")
    indices = chosen(gpus) if slots is None else []
    if not indices:
        if wait_idle is not None:
            raise UserError("--wait-idle waits for GPUs, and this machine has none")
        count = 1 if slots is None else slots
        return CpuSlots(count), count, False
    waiting = None if wait_idle is None else Waiting(indices, idle_for=wait_idle)
    per_run = study.needs.gpus_per_run
    return GpuGroups(indices, per_run, waiting), len(indices) // per_run, True


def _require_datasets(queue: "Queue") -> None:
    """A dataset that is missing is missing for every run: say so before anything starts."""
    from oelm.data.dataset import Dataset

    for name in {r.config.dataset for r in queue.runs if r.config.task == "language"}:
        Dataset.open(name)


def _tell(notes: list[str]) -> None:
    for note in notes:
        print(note)


def _detach(queue: "Queue") -> int:
    """Start the same command in a session of its own."""
    arguments = [a for a in sys.argv[1:] if a != "--detach"]
    log = queue.folder / "runner.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "oelm", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    name = queue.study.name
    print(f"running as process {process.pid}, which writes {log}")
    print(f"`oelm status {name} --watch` follows it, `oelm stop {name}` stops it")
    return 0


def _stop(what: str, /, *, wait: float = 120, runs: Path = Path("runs")) -> int:
    """Stop a study, or one run, gracefully: it saves, and `oelm run` continues it later.

    Args:
        what: A study's name or folder, or a run's folder (`quickstart/oelm_v2/seed-0`).
        wait: How many seconds to wait until all have saved.
        runs: Where the studies' folders are.
    """
    import signal
    import socket

    from oelm.study.folders import ask_to_stop
    from oelm.study.squeue import cancel_waiting
    from oelm.study.status import find_folder, run_folders
    from oelm.train.lock import holder

    folder = find_folder(what, runs)
    folders = run_folders(folder)
    ask_to_stop(folder)
    if cancelled := cancel_waiting(folders):
        print(f"{cancelled} waiting jobs taken out of Slurm's queue")
    # Runners and jobs see the mark; a trainer that has lost its runner must be told directly.
    for each in folders:
        if (held := holder(each)) and held["host"] == socket.gethostname():
            os.kill(held["pid"], signal.SIGTERM)
    deadline = time.monotonic() + wait
    while (active := [f for f in folders if holder(f)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for each in active:
        print(f"{each} has not ended yet; it will after its current step", file=sys.stderr)
    print(f"{what} is stopped; `oelm run` continues it" if not active else "still stopping")
    return 1 if active else 0
