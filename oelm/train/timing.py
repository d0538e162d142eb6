"""How fast a run was, against what the machine can do at best."""

import functools
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oelm.kernels.functions import applies, few_rows, ours_multiply, product
from oelm.train.config import TrainConfig
from oelm.train.state import Progress

CPU_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 512, 2048))
GPU_SHAPES = ((4096, 4096, 4096), (8192, 2048, 8192))
PATIENCE_SECONDS = 1.0
WARMUP_STEPS = 5  # first steps allocate memory and tune kernels


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read next is honest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Clock:
    """Times steps; what happens between a lap and the next `start` is not counted."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.start()

    def start(self) -> None:
        """Begin, or go on."""
        self._since = time.perf_counter()

    def lap(self) -> None:
        """Share the time since the last lap among the steps done in it."""
        now, p = time.perf_counter(), self.progress
        if steps := p.step - len(p.step_seconds):
            p.step_seconds += [(now - self._since) / steps] * steps
            p.seconds += now - self._since
        self._since = now


def matmul_peak(device: torch.device, precision: str, seconds: float = 0.0) -> float:
    """Operations per second of the best of several large matrix products, here and now.

    Each is repeated for so many seconds, and the rate is that of all its repetitions: a machine that
    others use too is slower for seconds at a time, and steps are not timed in its best moments either.
    """
    return max(matmul_rates(device, precision, seconds).values())


def matmul_rates(device: torch.device, precision: str, seconds: float = 0.0) -> dict[str, float]:
    """The same of torch's products and, where the kernels multiply, of theirs: the limit is the higher."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    best: dict[str, float] = {}
    for m, k, n in CPU_SHAPES if device.type == "cpu" else GPU_SHAPES:
        a, b = (torch.ones(*shape, device=device, dtype=dtype) for shape in ((m, k), (k, n)))
        ways = {"torch": torch.mm} | ({"own": product} if ours_multiply(a, b) else {})
        for name, way in ways.items():
            multiply = functools.partial(way, a, b)
            first = timed(multiply, device)
            if first > PATIENCE_SECONDS:  # a precision that the processor only imitates
                return best or {name: 2 * m * k * n / first}
            taken: list[float] = []
            while len(taken) < 2 or sum(taken) < seconds:
                taken.append(timed(multiply, device))
            best[name] = max(best.get(name, 0.0), 2 * m * k * n / statistics.fmean(taken))
    return best


def reading_rate(device: torch.device, times: int = 20) -> float:
    """Bytes per second at which the device reads a tensor too large for any cache, the quickest way we know.

    Each way's mean of several readings, as a step's time is one: a noisy machine's best moment is no bound.
    """
    matrix, vector = torch.ones(16384, 4096, device=device), torch.ones(4096, device=device)
    halves, rows = matrix.view(2, 8192, 4096).transpose(1, 2), vector.expand(2, 1, -1)
    ways: list[Callable[[], Any]]
    ways = [matrix.sum, lambda: torch.mv(matrix, vector), lambda: torch.bmm(rows, halves)]
    if applies(matrix):
        ways.append(lambda: few_rows(vector[None], matrix))
    seconds = min(sum(timed(way, device) for _ in range(times)) / times for way in ways)
    return matrix.nbytes / seconds


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `work` takes, with all that it leaves to the device."""
    synchronise(device)
    began = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began


def peak_memory(device: torch.device) -> int:
    """The most memory this process held: on the GPU if it has one, else resident in RAM."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():  # `ru_maxrss` would begin with that of the process that started this one
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def summary(
    config: TrainConfig, progress: Progress, flops: float, peak: float, memory: int
) -> dict[str, Any]:
    """The timing part of `timing_stats.json`."""
    steps = progress.step_seconds[WARMUP_STEPS:] or progress.step_seconds
    ordered, mean = sorted(steps), statistics.fmean(steps)
    method = config.resolved_method()
    return {
        "schema": 1,
        "model_type": method.name,
        "init_method": method.q.init,
        "total_wall_time": progress.wall_seconds,
        "train_time": progress.seconds,
        "validation_time": progress.validation_seconds,
        "mean_step_time": mean,
        "median_step_time": statistics.median(steps),
        "p95_step_time": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "tokens_per_second": progress.tokens / progress.step / mean,
        "steps_per_hour": 3600 / mean,
        "matmul_share": flops / mean / peak,
        "matmul_peak_gflops": peak / 1e9,
        "peak_memory_bytes": memory,
        "max_steps": config.max_steps,
        "timed_steps": len(steps),
    }
