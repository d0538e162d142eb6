"""A GPT laid out for one token at a time.

With one row, a step is mostly the calls around its products, and reading weights. So q, k and v become
one product; gains and low-rank updates are merged into their matrices, residuals into the products; and
matrices lie with their longer side in memory order, where a CPU reads them up to twice as fast. Most
weights are copied once for that, to huge pages where the system has them.
"""

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.model.attention import Cache
from oelm.model.projection import Projection
from oelm.model.transformer import Block

if TYPE_CHECKING:
    from oelm.model.gpt import GPT

HUGE_PAGE = 2**21


class Linear:
    """Some projections of the same input as one product."""

    def __init__(self, like: Tensor, *projections: Projection) -> None:
        parts = [projection.merged(like) for projection in projections]
        self.matrix = lay_out([matrix for matrix, _ in parts])
        self.bias = None
        if any(bias is not None for _, bias in parts):
            self.bias = torch.cat(
                [m.new_zeros(m.shape[1]) if bias is None else bias for m, bias in parts]
            )

    def __call__(self, x: Tensor) -> Tensor:
        """[B, in] → [B, out]."""
        return x @ self.matrix if self.bias is None else torch.addmm(self.bias, x, self.matrix)

    def added_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """The stream [B, out] with the projection of x added."""
        y = torch.addmm(stream, x, self.matrix)
        return y if self.bias is None else y.add_(self.bias)


def lay_out(parts: Sequence[Tensor]) -> Tensor:
    """Matrices [in, out] side by side, as one that is quick to multiply with a row."""
    rows, columns = parts[0].shape[0], sum(part.shape[1] for part in parts)
    if len(parts) == 1 and rows > columns and parts[0].T.is_contiguous():
        return parts[0]  # lies well as it is, as [out, in]
    like, count = parts[0], rows * columns
    huge = like.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")
    if not huge or count * like.element_size() < HUGE_PAGE:
        return torch.cat(list(parts), dim=1).contiguous()
    memory = mmap.mmap(-1, count * like.element_size())
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=like.dtype).view(rows, columns)
    return torch.cat(list(parts), dim=1, out=whole)


class Decoder:
    """Computes `GPT.hidden` and the logits for one new token of each row, with the weights of now."""

    @torch.no_grad()
    def __init__(self, model: "GPT") -> None:
        self.model = model
        self.layers = [_Layer(block, model.head_weight) for block in model.blocks]  # type: ignore[arg-type]
        self.head_DV = lay_out([model.head_weight.T])

    def logits(self, tokens_B: Tensor, caches: Sequence[Cache], start: int) -> Tensor:
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
        h: Tensor = model.final_norm(x_BD)
        return h @ self.head_DV


class _Layer:
    def __init__(self, block: Block, like: Tensor) -> None:
        attention, mlp = block.attention, block.mlp
        self.attention, self.activate = attention, mlp.activate
        self.attention_norm, self.mlp_norm = block.attention_norm.forward, block.mlp_norm.forward
        self.qkv, self.o = (
            Linear(like, attention.q, attention.k, attention.v),
            Linear(like, attention.o),
        )
        self.up, self.down = Linear(like, mlp.up), Linear(like, mlp.down)
        self.gate = Linear(like, mlp.gate) if mlp.gate is not None else None
        # A call that would do nothing costs as much as one of the small products.
        self.plain = all(a is None for a in (attention.q_norm, attention.temperature))
        self.has_bias = attention.relative_bias is not None

    def __call__(
        self, x_BD: Tensor, rotation: tuple[Tensor, Tensor] | None, cache: Cache, start: int
    ) -> Tensor:
        B, D = x_BD.shape
        qkv = self.qkv(self.attention_norm(x_BD)).view(B, 3, self.attention.n_heads, 1, -1)
        q_BHTE, k_BHTE, v_BHTE = qkv.unbind(1)
        if rotation is not None or not self.plain:
            q_BHTE, k_BHTE = self.attention.placed(q_BHTE, k_BHTE, rotation)
        keys, values = cache["k"], cache["v"]
        keys.narrow(2, start, 1).copy_(k_BHTE)
        values.narrow(2, start, 1).copy_(v_BHTE)
        bias = self.attention.logit_bias(1, start, None, q_BHTE) if self.has_bias else None
        seen = start + 1
        y = F.scaled_dot_product_attention(
            q_BHTE, keys.narrow(2, 0, seen), values.narrow(2, 0, seen), bias
        )
        x_BD = self.o.added_to(x_BD, y.view(B, D))
        h = self.mlp_norm(x_BD)
        wide = self.up(h)
        hidden = F.silu(self.gate(h)) * wide if self.gate is not None else self.activate(wide)
        return self.down.added_to(x_BD, hidden)
