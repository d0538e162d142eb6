"""Runs on this machine: one per GPU, per group of GPUs, or per CPU slot with the threads divided.

Trainers are forked from one process that has imported torch already (Python's own fork server), so
a run starts in milliseconds instead of seconds, and every run of a study runs the code as it was
when the runner started. A trainer that crashes takes nothing along: the server only forks, and
each trainer has its own session, so that Ctrl-C reaches the runner alone.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from oelm.errors import UserError
from oelm.study.gpus import Waiting
from oelm.study.plan import Run
from oelm.study.queue import Queue, write_config

POLL_SECONDS = 0.05
LOOK_FOR_INTRUDERS_SECONDS = 5.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PRELOAD = ["oelm.study.engines.sheltered", "oelm.cli.train", "oelm.train.loop"]
LONGEST_TEMPORARY = 70  # characters: a socket's name has 107, and the fork server adds its own
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one run computes."""

    name: str
    threads: int
    slot: int = 0
    gpus: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        """What the trainer must know of it."""
        if not self.gpus:
            return {"OELM_WHERE": self.name, "CUDA_VISIBLE_DEVICES": ""}
        visible = ",".join(map(str, self.gpus))
        order = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {"OELM_WHERE": self.name, **order}


class Places(Protocol):
    """The places of a machine."""

    def take(self, busy: list[Place]) -> Place | None:
        """One that is free now."""


class CpuSlots:
    """So many runs side by side on the CPU."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UserError(f"--slots must be at least 1, not {count}")
        self.count = count
        self.threads = threads_each(count)

    def take(self, busy: list[Place]) -> Place | None:
        """The lowest slot that is free."""
        taken = {p.slot for p in busy}
        free = next((i for i in range(self.count) if i not in taken), None)
        if free is None:
            return None
        return Place(name=f"local slot {free}", slot=free, threads=self.threads)


class GpuGroups:
    """One run per GPU or per group of GPUs; with `waiting`, on such as nobody else uses."""

    def __init__(self, indices: list[int], per_run: int, waiting: Waiting | None = None) -> None:
        if per_run > len(indices):
            raise UserError(f"gpus_per_run is {per_run}, and there are {len(indices)} GPUs to use")
        self.indices, self.per_run, self.waiting = indices, per_run, waiting
        self.threads = threads_each(len(indices))  # each GPU has a process of its own

    def take(self, busy: list[Place]) -> Place | None:
        """The first GPUs that are free."""
        taken = [i for p in busy for i in p.gpus]
        free = [i for i in self.indices if i not in taken]
        if self.waiting and len(free) >= self.per_run:
            free = self.waiting.free(taken)
        if len(free) < self.per_run:
            return None
        group = tuple(free[: self.per_run])
        return Place(
            name=f"local gpu {','.join(map(str, group))}", gpus=group, threads=self.threads
        )


class Trainer:
    """A run being trained in a process of its own."""

    def __init__(self, run: Run, place: Place) -> None:
        self.run, self.place = run, place
        self.asked = False
        self.started = self.looked = time.monotonic()
        self.began = time.time()
        threads = run.config.threads or place.threads
        argv = ["train", "--config", str(write_config(run)), "--threads", str(threads)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.process = context.Process(
            target=_train,
            args=(argv, len(place.gpus), place.environment(), run.folder / "console.log"),
        )
        with _room_for_a_socket():
            self.process.start()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask it to save and end (or, with SIGKILL, end it and its children at once)."""
        self.asked = True
        pid = self.process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def work(queue: Queue, places: Places, say: Say = print, *, patient: bool = True) -> bool:
    """Run what is startable until everything is finished, failed or stopped; whether it was stopped.

    Runs that are told to stop may save; without `patient` they end at once.
    """
    active: list[Trainer] = []
    trouble: UserError | None = None
    with _signals() as received:
        asked = 0
        while True:
            for trainer in [t for t in active if t.process.exitcode is not None]:
                active.remove(trainer)
                _tell_end(queue, trainer, say)
            wanted = len(received) or int(queue.stop_wanted())
            if wanted > asked:
                asked = wanted
                at_once = wanted > 1 or not patient
                how = signal.SIGKILL if at_once else signal.SIGTERM
                say("ending all runs at once" if at_once else "stopping: runs save and end")
                for trainer in active:
                    trainer.stop(how)
            for trainer in active:
                if not trainer.asked and queue.stop_wanted(trainer.run):
                    trainer.stop()
                _give_way(trainer, places, say)
            if not (asked or trouble):
                try:
                    started = _start_next(queue, places, active, say)
                except UserError as error:  # the study was changed under us
                    trouble = error
                    continue
                if started:
                    continue
            if not active and (asked or trouble or not (queue.startable() or queue.wait_for())):
                break
            time.sleep(POLL_SECONDS if active else 1.0)
    if trouble:
        raise trouble
    return bool(asked)


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(processes: int) -> int:
    """The threads of each of several processes: its share of the cores, or less if the user says so."""
    share = max(1, cores() // processes)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(wanted)) if wanted.isdigit() and int(wanted) else share


def _start_next(queue: Queue, places: Places, active: list[Trainer], say: Say) -> bool:
    place = places.take([t.place for t in active])
    run = queue.next(besides=[t.run.name for t in active]) if place else None
    if place is None or run is None:
        return False
    active.append(Trainer(run, place))
    say(f"{run.name}: started on {place.name}")
    return True


def _tell_end(queue: Queue, trainer: Trainer, say: Say) -> None:
    code = trainer.process.exitcode
    assert code is not None
    trainer.process.join()
    code = queue.meant(trainer.run, code, trainer.began)
    outcome = queue.ended(trainer.run, code, trainer.place.name, asked=trainer.asked)
    seconds = time.monotonic() - trainer.started
    finished = len(queue.runs) - len(queue.unfinished())
    say(
        f"{trainer.run.name}: {outcome} after {seconds:.0f} s ({finished} of {len(queue.runs)} done)"
    )


def _give_way(trainer: Trainer, places: Places, say: Say) -> None:
    """Leave GPUs that somebody else took in the same moment as we did."""
    waiting = places.waiting if isinstance(places, GpuGroups) else None
    now = time.monotonic()
    if waiting is None or trainer.asked or now - trainer.started > waiting.settle:
        return
    if now - trainer.looked < min(LOOK_FOR_INTRUDERS_SECONDS, waiting.settle / 4):
        return
    trainer.looked = now
    assert trainer.process.pid is not None
    if others := waiting.intruders(trainer.place.gpus, [trainer.process.pid]):
        say(f"{trainer.run.name}: gives {trainer.place.name} back to {others[0].user}")
        waiting.give_back(trainer.place.gpus)
        trainer.stop()


@contextlib.contextmanager
def _room_for_a_socket() -> Iterator[None]:
    """Let the fork server put its socket under /tmp where TMPDIR is too long for a socket's name."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect what Ctrl-C, `kill` and a closed terminal send, instead of dying of it."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {n: signal.signal(n, note) for n in STOPPING}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train(argv: list[str], gpus: int, environment: dict[str, str], log: Path) -> None:
    """The trainer's process: what `python -m oelm train …` would do, or torchrun with several."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = ["oelm", *argv]
    if gpus > 1:
        from torch.distributed.run import main as torchrun

        # `--standalone` finds itself a free port.
        torchrun(["--standalone", f"--nproc-per-node={gpus}", "-m", "oelm", *argv])
    else:
        from oelm.cli import main

        main(argv)
