# ruff: noqa: N801, N802, N818
"""A stand-in for NVIDIA's pynvml: the functions that OELM calls, over GPUs described in a file.

The file named by NVML_STAND_IN holds, per GPU, its memory in use (bytes), utilisation (per cent)
and processes; a test rewrites it while the scheduler, which cannot tell, looks on.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


def _gpus() -> list[dict[str, Any]]:
    return json.loads(Path(os.environ["NVML_STAND_IN"]).read_text())


def nvmlInit() -> None:
    if "NVML_STAND_IN" not in os.environ:
        raise NVMLError_LibraryNotFound


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA RTX A5000"


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(total=24 * 2**30, used=_gpus()[handle].get("used", 0))


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    gpu = _gpus()[handle]
    if gpu.get("old"):
        raise NVMLError_NotSupported
    return SimpleNamespace(gpu=gpu.get("utilisation", 0), memory=0)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    pids = _gpus()[handle].get("pids", [])
    return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]
