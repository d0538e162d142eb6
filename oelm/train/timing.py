"""How fast a run was, against what the machine can do at best."""

import resource
import statistics
import sys
import time
from typing import Any

import torch

from oelm.train.config import TrainConfig
from oelm.train.state import Progress

WARMUP_STEPS = 5  # first steps allocate memory and tune kernels


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read next is honest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Clock:
    """Times steps; what happens between `pause` and `start` is not counted."""

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


def matmul_peak(device: torch.device, precision: str) -> float:
    """Floating-point operations per second of a large matrix product, here and now."""
    n = 1024 if device.type == "cpu" else 4096
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    a = torch.ones(n, n, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        synchronise(device)
        began = time.perf_counter()
        _ = a @ a
        synchronise(device)
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def peak_memory(device: torch.device) -> int:
    """The most memory this process held: on the GPU if it has one, else resident in RAM."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def summary(
    config: TrainConfig, progress: Progress, flops: float, peak: float, device: torch.device
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
        "peak_memory_bytes": peak_memory(device),
        "max_steps": config.max_steps,
        "timed_steps": len(steps),
    }
