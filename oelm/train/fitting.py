"""Into how many pieces a batch must be split to train within a given memory."""

import logging

import torch
from torch import nn

from oelm.errors import UserError
from oelm.freezing import count
from oelm.model.config import ModelConfig
from oelm.model.loss import CHUNK_ELEMENTS
from oelm.roofline import step_memory
from oelm.train.config import TrainConfig, memory_bytes

log = logging.getLogger(__name__)
PROGRAM = 410 * 2**20  # a CPU's memory also holds Python, torch and the buffers of its kernels


def pieces(config: TrainConfig, model: nn.Module, world: int, device: torch.device) -> int:
    """`grad_accumulation`, or as many more as `max_memory` needs."""
    if config.max_memory is None:
        return config.grad_accumulation
    limit, own = memory_bytes(config.max_memory), config.batch_size // world
    needed = 0
    for n in range(config.grad_accumulation, own + 1):
        if own % n:
            continue
        needed = estimate(config, model, own // n, device)
        if needed <= limit:
            if n > config.grad_accumulation:
                log.info("each batch in %d pieces: about %.1f GB", n, needed / 1e9)
            return n
    raise UserError(
        f"even one sequence at a time needs about {needed / 1e9:.1f} GB; raise max_memory "
        f"({config.max_memory}), take a smaller model, or set --activation_checkpointing"
    )


def estimate(config: TrainConfig, model: nn.Module, sequences: int, device: torch.device) -> int:
    """Bytes at the peak of a step with so many sequences at a time."""
    shape, counts = model.config, count(model)
    assert isinstance(shape, ModelConfig)
    rows = sequences * shape.seq_len
    parts = step_memory(
        shape,
        trainable=counts["trainable"],
        frozen=counts["frozen"],
        sequences=sequences,
        logits=min(rows * shape.vocab_size, 2 * CHUNK_ELEMENTS),  # two lanes at most
        activation_checkpointing=config.activation_checkpointing,
    )
    return sum(parts.values()) + (PROGRAM if device.type == "cpu" else 0)
