"""Which number format the device is fast at: asked of the device, never taken from a flag alone."""

import contextlib
from dataclasses import dataclass

import torch

from oelm.errors import UserError


@dataclass(frozen=True)
class Precision:
    """A format of the matrix products; weights, moments and sums stay float32."""

    name: str
    reason: str

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """The context in which the forward pass runs."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(device.type, dtype)


def choose(wanted: str, device: torch.device, parallel: str = "single") -> Precision:
    """`auto` → bf16 where it is the fastest, fp16 on older GPUs, fp32 otherwise."""
    sharded = parallel == "fsdp"
    if wanted == "fp16" and device.type != "cuda":
        raise UserError(f"fp16 needs a CUDA device, not {device.type}; use bf16 or fp32")
    if wanted == "fp16" and sharded:
        raise UserError(
            "fp16 and its loss scaling do not go with --parallel fsdp; use bf16 or fp32"
        )
    if wanted == "fp32":
        return Precision("fp32", "as asked")
    fast, what = _fast_bf16(device)
    if wanted == "bf16":
        return Precision("bf16", "as asked" if fast else f"as asked, though {what} is slow at it")
    if wanted == "fp16":
        return Precision("fp16", "as asked")
    if not fast:
        half = device.type == "cuda" and not sharded
        return Precision("fp16" if half else "fp32", f"{what} has no fast bf16")
    if device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
        # Its products are twice as fast as our kernels' on two cores of a Zen 5, but all else is not ours
        # any more: a step took 0.83 of the time at 45 million parameters, and 1.7 times as long at one.
        return Precision("fp32", f"{what} is faster in bf16 with large models only")
    return Precision("bf16", f"{what} is fast at it")


def _fast_bf16(device: torch.device) -> tuple[bool, str]:
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return fast, torch.cuda.get_device_name(device)
    if device.type == "cpu":
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return fast, f"this CPU ({torch.backends.cpu.get_cpu_capability()})"
    return False, device.type
