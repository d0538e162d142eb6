"""The machine's GPUs and who holds them, through NVML. No torch."""

import contextlib
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil
import pynvml

from oelm.errors import UserError

# A display server or a driver daemon takes a few hundred MiB and nobody is computing.
IDLE_MEMORY = 600 * 2**20
IDLE_UTILISATION = 5


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that computes on a GPU."""

    pid: int
    user: str
    memory: int

    @property
    def here(self) -> bool:
        """Whether the process is one of this machine's view (in a container, NVML may show others')."""
        return self.user != "?"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU at one moment."""

    index: int
    name: str
    memory_used: int
    memory_total: int
    utilisation: int
    """Per cent of the last moments in which something ran."""
    holders: tuple[Holder, ...]

    @property
    def idle(self) -> bool:
        """Whether nobody computes on it."""
        free = self.memory_used <= IDLE_MEMORY and self.utilisation <= IDLE_UTILISATION
        return free and not self.holders


def gpus() -> list[Gpu]:
    """Every GPU of the machine; none where there is no NVIDIA driver."""
    with _nvml() as found:
        return [_gpu(i) for i in range(pynvml.nvmlDeviceGetCount())] if found else []


def chosen(text: str | None) -> list[int]:
    """The GPUs that `--gpus 0,2` names, or all there are (of CUDA_VISIBLE_DEVICES)."""
    there = [g.index for g in gpus()]
    if text is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None or not all(v.strip().isdigit() for v in visible.split(",")):
            return [] if visible == "" else there
        return [i for i in there if i in {int(v) for v in visible.split(",")}]
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--gpus {text}: write numbers with commas between, such as 0,2") from None
    if missing := [i for i in wanted if i not in there]:
        known = (
            f"this machine has {', '.join(map(str, there))}" if there else "this machine has none"
        )
        raise UserError(f"--gpus {text}: there is no GPU {missing[0]}; {known}")
    if len(set(wanted)) < len(wanted):
        raise UserError(f"--gpus {text}: names a GPU twice")
    return wanted


class Waiting:
    """Hands out GPUs once nobody has used them for a while, and gives way to others.

    While nothing is free it looks less and less often; a GPU on which somebody else turns up just
    when we start is given back, and left alone for a random time, so that two who wait do not
    collide for ever.
    """

    def __init__(self, indices: Iterable[int], *, idle_for: float, settle: float = 60.0) -> None:
        self.indices, self.idle_for, self.settle = list(indices), idle_for, settle
        self._idle_since: dict[int, float] = {}
        self._leave_until: dict[int, float] = {}
        self._next_look = 0.0
        self._pause = 1.0

    def free(self, busy: Iterable[int]) -> list[int]:
        """The GPUs that can be taken now, `busy` being those that we use ourselves."""
        now, taken = time.monotonic(), set(busy)
        if now < self._next_look:
            return []
        state = {g.index: g for g in gpus()}
        for index in self.indices:
            if index in taken or not state[index].idle or now < self._leave_until.get(index, 0):
                self._idle_since.pop(index, None)
            else:
                self._idle_since.setdefault(index, now)
        ready = [i for i, since in self._idle_since.items() if now - since >= self.idle_for]
        self._pause = 1.0 if self._idle_since else min(self._pause * 1.5, 60.0)
        self._next_look = now + min(self._pause, max(self.idle_for / 4, 0.1))
        return ready

    def intruders(self, indices: Iterable[int], ours: Iterable[int]) -> list[Holder]:
        """Other people's processes on GPUs that we have just taken (`ours`: our trainers' pids)."""
        family = set()
        for pid in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                family |= {pid, *(c.pid for c in process.children(recursive=True))}
        state = {g.index: g for g in gpus()}
        held = [h for i in indices for h in state[i].holders]
        return [h for h in held if h.here and h.pid not in family]

    def give_back(self, indices: Iterable[int]) -> None:
        """Leave these GPUs to the others for a while."""
        until = time.monotonic() + self.idle_for * random.uniform(1, 3)
        for index in indices:
            self._leave_until[index] = until
            self._idle_since.pop(index, None)


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, no GPU
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    utilisation = 0
    with contextlib.suppress(pynvml.NVMLError):  # not every card tells
        utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    processes = []
    with contextlib.suppress(pynvml.NVMLError):
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return Gpu(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        memory_used=memory.used,
        memory_total=memory.total,
        utilisation=utilisation,
        holders=tuple(
            Holder(pid=p.pid, user=_user(p.pid), memory=p.usedGpuMemory or 0) for p in processes
        ),
    )


def _user(pid: int) -> str:
    try:
        return str(psutil.Process(pid).username())
    except psutil.Error:
        return "?"
