"""A GPT laid out for one token at a time on a CPU.

With one row, a step is mostly reading weights and, where those are small, the calls around its products.
So q, k and v become one matrix, gains, temperatures and low-rank updates are merged into theirs, and one call
goes through all layers.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oelm.kernels.functions import applies
from oelm.kernels.token import Affine, Layer, Stack
from oelm.model.attention import Cache
from oelm.model.projection import Projection
from oelm.model.transformer import NORM_EPS, Block, norm_tensors

if TYPE_CHECKING:
    from oelm.model.gpt import GPT

CHANNELS = 8  # the kernel takes a row's numbers by so many


class Decoder:
    """Computes the logits for one new token of each row, with the weights of now."""

    @staticmethod
    def serves(model: "GPT") -> bool:
        """Whether it can: for float32 on a CPU with kernels, and widths that they can take."""
        c = model.config
        widths = (c.d_model, c.d_ff, c.d_head)
        return applies(model.head_weight) and all(width % CHANNELS == 0 for width in widths)

    @torch.no_grad()
    def __init__(self, model: "GPT") -> None:
        self.model, c = model, model.config
        tables = (model.cos, model.sin) if model.turns else None
        self.stack = Stack(
            layers=[_layer(block, tables) for block in model.blocks],  # type: ignore[arg-type]
            final_norm=norm_tensors(model.final_norm),
            head=model.head_weight.contiguous(),
            n_heads=c.n_heads,
            d_ff=c.d_ff,
            activation=c.activation,
            rms=c.norm == "rmsnorm",
            eps=NORM_EPS[c.norm],
            qk_eps=NORM_EPS["rmsnorm"],
            turn=tables if c.positions == "rope" else None,
        )

    def logits(self, tokens_B: Tensor, caches: list[Cache], start: int) -> Tensor:
        """Logits [B, V] after the token at position `start`; the caches hold all before it."""
        model = self.model
        x_BD = model.token_embedding.weight[tokens_B]
        if model.position_embedding is not None:
            x_BD = x_BD + model.position_embedding.weight[start]
        return self.stack.logits(x_BD, caches, start)


def _layer(block: Block, tables: tuple[Tensor, Tensor] | None) -> Layer:
    a, mlp = block.attention, block.mlp
    (q, q_bias), k, v = _merged(a.q), _merged(a.k), _merged(a.v)
    shifts = a.kernels(tables) if tables is not None else (None, None)
    q_shift, k_shift = (None if s is None else s.transpose(0, 1).flatten(1) for s in shifts)
    norms = (a.q_norm, a.k_norm)
    q_norm, k_norm = (None if n is None else n.weight.repeat(a.n_heads) for n in norms)
    if a.temperature is not None:  # goes into whatever the queries are made of
        heat_D = a.temperature.repeat_interleave(len(q) // a.n_heads)
        q_shift = None if q_shift is None else q_shift * heat_D
        if q_norm is not None:
            q_norm = q_norm * heat_D
        else:
            q, q_bias = q * heat_D[:, None], None if q_bias is None else q_bias * heat_D
    return Layer(
        attention_norm=norm_tensors(block.attention_norm),
        qkv=_joined((q, q_bias), k, v),
        o=_merged(a.o),
        mlp_norm=norm_tensors(block.mlp_norm),
        up=_merged(mlp.up),
        gate=_merged(mlp.gate) if mlp.gate is not None else (None, None),
        down=_merged(mlp.down),
        q_norm=q_norm,
        k_norm=k_norm,
        q_shift=q_shift,
        k_shift=k_shift,
        relative=a.relative_bias,
    )


def _merged(projection: Projection) -> tuple[Tensor, Tensor | None]:
    matrix, bias = projection.merged()
    return matrix.contiguous(), bias


def _joined(*projections: tuple[Tensor, Tensor | None]) -> Affine:
    """Some projections of the same input as one."""
    matrices, biases = zip(*projections, strict=True)
    if all(bias is None for bias in biases):
        return torch.cat(matrices), None
    filled = [m.new_zeros(len(m)) if b is None else b for m, b in projections]
    return torch.cat(matrices), torch.cat(filled)
