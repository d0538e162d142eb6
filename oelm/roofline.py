"""The arithmetic of a training step, part by part: what a method must cost, and what freezing can save.

Counts are of useful floating-point operations: a causal query compares itself with the keys before it
only, and a frozen matrix has no weight gradient. Bytes are those of every operand read once and every
result written once, as if no cache kept anything from one product to the next; a step whose tensors stay
in a cache moves less. Pure arithmetic; imports no torch.
"""

from dataclasses import dataclass

from oelm.methods import PARAMETER_FREE, Method, Treatment
from oelm.model.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """Operations of one part of the model in one step, over all layers, and the bytes they move."""

    name: str
    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    bytes: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward together."""
        return self.forward + self.input_grad + self.weight_grad

    def seconds(self, peak: float, bandwidth: float) -> float:
        """The least time it can take: that of its operations or of its bytes, whichever is longer."""
        return max(self.total / peak, self.bytes / bandwidth)

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.name,
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
            self.bytes + other.bytes,
        )


def step_parts(
    config: ModelConfig,
    method: Method,
    batch_size: int,
    *,
    causal: bool = True,
    number_bytes: int = 4,
) -> list[Part]:
    """Every product of a step on `batch_size` full sequences; what thaws late counts as trained."""
    rows = batch_size * config.seq_len
    d, d_ff = config.d_model, config.d_ff
    parts = []
    for name in ("q", "k", "v", "o"):
        parts.append(_projection(name, config, method.treatment(name), rows, d, d, number_bytes))
    keys = (config.seq_len + 1) / 2 if causal else config.seq_len
    compared = 2 * rows * keys * d * config.n_layers
    # Scores and mixing forward; backward, two products for each of them. Forward reads q, k and v, backward
    # these, the result and its gradient, and writes three gradients; no scores are ever in memory.
    streams = (4 + 8) * rows * d * config.n_layers
    parts.append(
        Part(
            "attention",
            forward=2 * compared,
            input_grad=4 * compared,
            bytes=number_bytes * streams,
        )
    )
    gates = 2 if config.activation == "swiglu" else 1
    up = _projection("up", config, method.up, rows, d, d_ff, number_bytes)
    parts.append(sum([up] * (gates - 1), up))
    parts.append(_projection("down", config, method.down, rows, d_ff, d, number_bytes))
    head = 2 * rows * d * config.vocab_size
    # The stream and the matrix are read, their gradients written; the logits need never be.
    ends = 2 * (rows + config.vocab_size) * d
    parts.append(
        Part("head", forward=head, input_grad=head, weight_grad=head, bytes=number_bytes * ends)
    )
    return parts


def rest_of_step(
    config: ModelConfig, batch_size: int, trainable: int, *, number_bytes: int = 4
) -> Part:
    """All that is no product: it costs bytes, and hardly any operations.

    Forward and backward together, a norm reads three streams and writes two, as an activation does at the
    MLP's width (SwiGLU five and three), and a residual sum reads four and writes two. The optimizer reads
    weight, gradient and two moments and writes all but the gradient, which clipping has read before.
    """
    rows, norms, sums = batch_size * config.seq_len, 2 * config.n_layers + 1, 2 * config.n_layers
    active = 8 if config.activation == "swiglu" else 5
    streams = (5 * norms + 6 * sums) * config.d_model + active * config.n_layers * config.d_ff
    return Part("the rest", bytes=number_bytes * rows * streams + 4 * 8 * trainable)


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
    name: str,
    config: ModelConfig,
    treatment: Treatment,
    rows: int,
    inner: int,
    outer: int,
    number_bytes: int,
) -> Part:
    whole, rank = Part(name), treatment.rank
    has_matrix = treatment.init not in PARAMETER_FREE
    product = 2 * rows * inner * outer if has_matrix else 0
    low_rank = 2 * rows * rank * (inner + outer)
    # Each pass reads two of input, matrix and output, or their gradients, and writes the third.
    matrix_moves = rows * inner + inner * outer + rows * outer if has_matrix else 0
    update_moves = (rows + rank) * (inner + outer) + 2 * rows * rank if rank else 0
    heads = config.n_heads
    for layer in range(config.n_layers):
        frozen = treatment.frozen_in(layer, config.n_layers)
        share = 0.0 if frozen else 1 - treatment.frozen_heads(heads) / heads
        whole += Part(
            name,
            forward=product + low_rank,
            input_grad=product + low_rank,
            weight_grad=product * share + low_rank,
            bytes=number_bytes * ((2 + (share > 0)) * matrix_moves + 3 * update_moves),
        )
    return whole
