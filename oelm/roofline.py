"""The arithmetic of a training step, part by part: what a method must cost, and what freezing can save.

Counts are of useful floating-point operations: a causal query compares itself with the keys before it
only, and a frozen matrix has no weight gradient. Pure arithmetic; imports no torch.
"""

from dataclasses import dataclass

from oelm.methods import PARAMETER_FREE, Method, Treatment
from oelm.model.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """Operations of one part of the model in one step, over all layers."""

    name: str
    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward together."""
        return self.forward + self.input_grad + self.weight_grad

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.name,
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
        )


def step_parts(
    config: ModelConfig, method: Method, batch_size: int, *, causal: bool = True
) -> list[Part]:
    """Every part of a step on `batch_size` full sequences; what thaws late counts as trained."""
    rows = batch_size * config.seq_len
    d, d_ff = config.d_model, config.d_ff
    parts = []
    for name in ("q", "k", "v", "o"):
        parts.append(_projection(name, config, method.treatment(name), rows, d, d))
    keys = (config.seq_len + 1) / 2 if causal else config.seq_len
    compared = 2 * rows * keys * d * config.n_layers
    # Scores and mixing forward; backward, two products for each of them.
    parts.append(Part("attention", forward=2 * compared, input_grad=4 * compared))
    gates = 2 if config.activation == "swiglu" else 1
    up = _projection("up", config, method.up, rows, d, d_ff)
    parts.append(sum([up] * (gates - 1), up))
    parts.append(_projection("down", config, method.down, rows, d_ff, d))
    head = 2 * rows * d * config.vocab_size
    parts.append(Part("head", forward=head, input_grad=head, weight_grad=head))
    return parts


def step_flops(
    config: ModelConfig, method: Method, batch_size: int, *, causal: bool = True
) -> float:
    """All operations of a step."""
    return sum(part.total for part in step_parts(config, method, batch_size, causal=causal))


def step_memory(
    config: ModelConfig,
    *,
    trainable: int,
    frozen: int,
    sequences: int,
    logits: int,
    activation_checkpointing: bool = False,
    weights_kept: bool = False,
    norms_kept: bool = True,
) -> dict[str, int]:
    """Bytes that a float32 step on `sequences` at a time holds at its peak, part by part.

    `logits` are those held at once. What backward needs of a block, per token: two residual streams, two
    normed ones (`norms_kept`, else they are computed again), q, k, v and what the heads read, each as
    wide as the model, and the MLP's hidden layer before its activation, or all that is multiplied in
    SwiGLU; with dropout, its two masks too (as numbers: a GPU needs less). `weights_kept`: attention holds
    all its weights, and two tensors like them, instead of forming them anew, and backward makes as many
    again, a layer at a time.
    """
    wide = 4 if config.activation == "swiglu" else 1
    block = (8 if norms_kept else 6) * config.d_model + wide * config.d_ff
    rows = sequences * config.seq_len
    layers = config.n_layers
    attention = 3 * config.n_heads * config.seq_len if weights_kept else 0
    block += attention + (2 * config.d_model if config.dropout else 0)
    kept = layers * config.d_model + block if activation_checkpointing else layers * block
    return {
        "weights": 4 * (trainable + frozen),
        "gradients": 4 * trainable,
        "optimizer": 8 * trainable,
        "activations": 4 * rows * (kept + 3 * config.d_model),
        "backward": 4 * rows * (max(2 * config.d_ff, attention) + 4 * config.d_model),
        "logits": 4 * logits,
    }


def _projection(
    name: str, config: ModelConfig, treatment: Treatment, rows: int, inner: int, outer: int
) -> Part:
    whole = Part(name)
    product = 2 * rows * inner * outer if treatment.init not in PARAMETER_FREE else 0
    low_rank = 2 * rows * treatment.rank * (inner + outer)
    heads = config.n_heads
    for layer in range(config.n_layers):
        frozen = treatment.frozen_in(layer, config.n_layers)
        share = 0.0 if frozen else 1 - treatment.frozen_heads(heads) / heads
        whole += Part(
            name,
            forward=product + low_rank,
            input_grad=product + low_rank,
            weight_grad=product * share + low_rank,
        )
    return whole
