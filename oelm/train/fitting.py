"""Into how many pieces a batch must be split to train within a given memory."""

import ctypes
import logging
import sys
from collections.abc import Mapping

import psutil
import torch
from torch import nn

from oelm.errors import UserError
from oelm.freezing import count
from oelm.kernels.library import products_pay
from oelm.model.loss import CHUNK_ELEMENTS, is_small
from oelm.model.transformer import Transformer
from oelm.roofline import step_memory
from oelm.train.config import TrainConfig, memory_bytes

log = logging.getLogger(__name__)
PROGRAM = 300 * 2**20  # Python, torch and the buffers of its kernels, where they share the memory
MISJUDGED = 1.25  # by so much an estimate may be too high
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # options of C's allocator


def pieces(config: TrainConfig, model: nn.Module, world: int, device: torch.device) -> int:
    """`grad_accumulation`, or as many more as `max_memory` needs."""
    if device.type == "cpu":
        keep_freed_memory() if config.max_memory is None else return_freed_memory()
    own, counts = config.batch_size // world, count(model)
    if config.max_memory is None:
        if device.type == "cpu" and isinstance(model, Transformer):
            at_once = own // config.grad_accumulation
            _require_room(estimate(config, model, counts, at_once, world, device), at_once)
        return config.grad_accumulation
    limit, needed = memory_bytes(config.max_memory), 0
    for n in range(config.grad_accumulation, own + 1):
        if own % n:
            continue
        needed = estimate(config, model, counts, own // n, world, device)
        if needed <= limit:
            if n > config.grad_accumulation:
                log.info("each batch in %d pieces: about %.0f MB", n, needed / 1e6)
            return n
    remedy = "" if config.activation_checkpointing else ", or set --activation_checkpointing"
    raise UserError(
        f"even one sequence at a time needs about {needed / 1e6:,.0f} MB; raise max_memory "
        f"({config.max_memory}), or take a smaller model{remedy}"
    )


def _require_room(needed: int, sequences: int) -> None:
    """Refuse at once what this machine could only fail at, after a while and without a word."""
    present = psutil.virtual_memory().total
    if needed > MISJUDGED * present:
        raise UserError(
            f"{sequences:,} sequences at a time need about {needed / 1e9:,.0f} GB, and this machine has "
            f"{present / 1e9:,.0f}; lower batch_size, or raise grad_accumulation"
        )


def keep_freed_memory() -> None:
    """Hold on to freed tensors for the next step, which has the same, instead of asking for new memory.

    A step at medium-512 touched 100,000 pages, which the system has to clear; with hardly any it takes
    0.96 of the time, and has as much at its peak.
    """
    _set_allocator({MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1})


def return_freed_memory() -> None:
    """Let the system have freed tensors at once, as Linux's allocator does not if it may choose.

    At medium-512 the peak was 1,850 instead of 2,076 MiB, and a step took 5 % longer.
    """
    _set_allocator({MMAP_MAX: 2**16, TRIM_THRESHOLD: 2**17, MMAP_THRESHOLD: 2**22})


def _set_allocator(options: Mapping[int, int]) -> None:
    """On Linux, but for musl's, which has no options and returns memory."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option, value in options.items():
            mallopt(option, value)


def estimate(
    config: TrainConfig,
    model: nn.Module,
    counts: Mapping[str, int],
    sequences: int,
    world: int,
    device: torch.device,
) -> int:
    """Bytes at the peak of a step, or of a save, with so many sequences at a time."""
    assert isinstance(model, Transformer)
    shape, cpu = model.config, device.type == "cpu"
    shards = world if config.parallel == "fsdp" else 1
    rows, trainable = sequences * shape.seq_len, counts["trainable"] // shards
    ours = cpu and products_pay()
    in_cache = ours and is_small(shape.vocab_size, shape.d_model)
    parts = step_memory(
        shape,
        trainable=trainable,
        frozen=counts["frozen"],  # buffers are on every GPU
        sequences=sequences,
        logits=0 if in_cache else min(rows * shape.vocab_size, CHUNK_ELEMENTS),
        activation_checkpointing=config.activation_checkpointing,
        # On a CPU, attention with dropout or a trained bias is computed in the plain way.
        weights_kept=shape.positions == "relative" or (cpu and shape.dropout > 0),
        norms_kept=not (ours and shape.dropout == 0 and model.simple),
    )
    step = sum(parts.values())
    if not cpu:
        return step
    saving = (
        step - parts["activations"] - parts["backward"] + 12 * trainable
    )  # a copy, on its way to disk
    return max(step, saving) + PROGRAM
