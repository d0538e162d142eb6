"""A GPT laid out for one token at a time.

With one row, a step is mostly reading weights and, where those are small, the calls around its products.
So q, k and v become one product; gains and low-rank updates are merged into their matrices; and all cores
read a large matrix at once. The weights are copied once for that, to huge pages where the system has them.
"""

import math
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
WORTH_SPLITTING = 2**19  # numbers in a matrix


class Linear:
    """Some projections of the same input as one product, in as many pieces as there are threads.

    A product with one row keeps one core busy, whatever BLAS is told; a batch of products keeps them all.
    """

    def __init__(self, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        inner, self.outer = matrices[0].shape[0], sum(m.shape[1] for m in matrices)
        pieces = torch.get_num_threads() if inner * self.outer >= WORTH_SPLITTING else 1
        rows = math.ceil(self.outer / pieces)
        whole = room(pieces * rows, inner, matrices[0])
        torch.cat([m.T for m in matrices], out=whole[: self.outer])
        whole[self.outer :] = 0
        self.split = pieces > 1
        if self.split:
            self.matrix = whole.view(pieces, rows, inner).transpose(1, 2)
        else:  # which is quicker with its longer side in order
            self.matrix = whole.T if inner > self.outer else whole.T.contiguous()
        self.bias = None
        if any(bias is not None for bias in biases):
            pairs = zip(matrices, biases, strict=True)
            self.bias = torch.cat([m.new_zeros(m.shape[1]) if b is None else b for m, b in pairs])

    @classmethod
    def of(cls, like: Tensor, *projections: Projection) -> "Linear":
        """Their merged matrices, where and as `like` is."""
        matrices, biases = zip(*(p.merged(like) for p in projections), strict=True)
        return cls(matrices, biases)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, in] → [B, out]."""
        if not self.split:
            return x @ self.matrix if self.bias is None else torch.addmm(self.bias, x, self.matrix)
        y_PBR = torch.bmm(x.expand(len(self.matrix), -1, -1), self.matrix)
        y = y_PBR.transpose(0, 1).reshape(len(x), -1)[:, : self.outer]
        return y if self.bias is None else y + self.bias

    def added_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """The stream [B, out] with the projection of x added."""
        if self.split:
            return stream + self(x)
        y = torch.addmm(stream, x, self.matrix)
        return y if self.bias is None else y.add_(self.bias)


def room(rows: int, columns: int, like: Tensor) -> Tensor:
    """An empty matrix, on huge pages where it fills some and the system has them."""
    size = rows * columns * like.element_size()
    if like.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or size < HUGE_PAGE:
        return like.new_empty(rows, columns)
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(rows, columns)


class Decoder:
    """Computes `GPT.hidden` and the logits for one new token of each row, with the weights of now."""

    @torch.no_grad()
    def __init__(self, model: "GPT") -> None:
        self.model = model
        self.layers = [_Layer(block, model.head_weight) for block in model.blocks]  # type: ignore[arg-type]
        self.head = Linear([model.head_weight.T], [None])

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
        return self.head(h)


class _Layer:
    def __init__(self, block: Block, like: Tensor) -> None:
        attention, mlp = block.attention, block.mlp
        self.attention, self.activate = attention, mlp.activate
        self.attention_norm, self.mlp_norm = block.attention_norm.forward, block.mlp_norm.forward
        self.qkv, self.o = (
            Linear.of(like, attention.q, attention.k, attention.v),
            Linear.of(like, attention.o),
        )
        self.up, self.down = Linear.of(like, mlp.up), Linear.of(like, mlp.down)
        self.gate = Linear.of(like, mlp.gate) if mlp.gate is not None else None
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
