"""A GPT laid out for one token at a time on a CPU.

With one row, a step is mostly reading weights and, where those are small, the calls around its products.
So q, k and v become one product, gains and low-rank updates are merged into their matrices, and each
product is a kernel whose threads read the matrix once between them.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.kernels.functions import applies, attend, few_rows
from oelm.model.attention import Cache
from oelm.model.projection import Projection
from oelm.model.transformer import Block

if TYPE_CHECKING:
    from oelm.model.gpt import GPT

CHANNELS = 8  # the kernels take a row's numbers by so many


class Linear:
    """Some projections of the same input as one, with the norm before it and the activation after it."""

    def __init__(
        self,
        *projections: Projection,
        norm: nn.Module | None = None,
        activation: str | None = None,
    ) -> None:
        self.norm, self.activation = norm, activation
        matrices, biases = zip(*(p.merged() for p in projections), strict=True)
        self.weight = torch.cat(matrices) if len(matrices) > 1 else matrices[0].contiguous()
        self.bias = None
        if any(bias is not None for bias in biases):
            pairs = zip(matrices, biases, strict=True)
            self.bias = torch.cat([m.new_zeros(len(m)) if b is None else b for m, b in pairs])

    def __call__(self, x: Tensor, rest: Tensor | None = None) -> Tensor:
        """[B, in] → [B, out], added to the rest."""
        return few_rows(
            x, self.weight, self.bias, norm=self.norm, activation=self.activation, rest=rest
        )


class Decoder:
    """Computes `GPT.hidden` and the logits for one new token of each row, with the weights of now."""

    @staticmethod
    def serves(model: "GPT") -> bool:
        """Whether it can: for float32 on a CPU with kernels, and widths that they can take."""
        c = model.config
        widths = (c.d_model, c.d_ff, c.d_head)
        return applies(model.head_weight) and all(width % CHANNELS == 0 for width in widths)

    @torch.no_grad()
    def __init__(self, model: "GPT") -> None:
        self.model = model
        self.layers = [_Layer(block) for block in model.blocks]  # type: ignore[arg-type]

    def logits(self, tokens_B: Tensor, caches: list[Cache], start: int) -> Tensor:
        """Logits [B, V] after the token at position `start`; the caches hold all before it."""
        model = self.model
        x_BD = model.token_embedding.weight[tokens_B]
        if model.position_embedding is not None:
            x_BD = x_BD + model.position_embedding.weight[start]
        rotation = (
            (model.cos[start : start + 1], model.sin[start : start + 1]) if model.turns else None
        )
        for layer, cache in zip(self.layers, caches, strict=True):
            x_BD = layer(x_BD, rotation, cache, start)
        return few_rows(x_BD, model.head_weight, norm=model.final_norm)


class _Layer:
    def __init__(self, block: Block) -> None:
        attention, mlp = block.attention, block.mlp
        self.attention = attention
        self.qkv = Linear(attention.q, attention.k, attention.v, norm=block.attention_norm)
        self.o, self.down = Linear(attention.o), Linear(mlp.down)
        self.gate = Linear(mlp.gate, norm=block.mlp_norm) if mlp.gate is not None else None
        activation = mlp.activation if mlp.gate is None else None
        self.up = Linear(mlp.up, norm=block.mlp_norm, activation=activation)
        # A call that would do nothing costs as much as one of the small products.
        self.plain = all(a is None for a in (attention.q_norm, attention.temperature))
        self.has_bias = attention.relative_bias is not None

    def __call__(
        self, x_BD: Tensor, rotation: tuple[Tensor, Tensor] | None, cache: Cache, start: int
    ) -> Tensor:
        B, D = x_BD.shape
        qkv = self.qkv(x_BD).view(B, 3, self.attention.n_heads, 1, -1)
        q_BHTE, k_BHTE, v_BHTE = qkv.unbind(1)
        if rotation is not None or not self.plain:
            q_BHTE, k_BHTE = self.attention.placed(q_BHTE, k_BHTE, rotation)
        bias = self.attention.logit_bias(1, start, None, q_BHTE) if self.has_bias else None
        y_BHTE = attend(q_BHTE, k_BHTE, v_BHTE, cache["k"], cache["v"], start, bias)
        x_BD = self.o(y_BHTE.view(B, D), x_BD)
        wide = self.up(x_BD)
        if self.gate is not None:
            wide = F.silu(self.gate(x_BD)) * wide
        return self.down(wide, x_BD)
