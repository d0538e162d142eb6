"""A transformer block as one torch function: one call of `block.c` forward, one backward."""

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oelm.kernels.functions import CHANNELS, kernels, ours_multiply

SMALL = 2**21
"""Bytes up to which holding a tensor for backward is better than computing it again."""

# The structure `block` of block.c, field by field; each takes eight bytes, so that it is an array to fill.
_SIZES = ("B", "T", "H", "E", "F", "rms", "causal", "by_tanh", "threads")
_PROJECTION = ("w", "bias", "order", "a", "b", "y", "dw", "dbias", "da", "db", "rank", "ahead")
_FIELDS = (
    *_SIZES,
    "eps",
    "cos",
    "sin",
    *(
        f"{norm}.{field}"
        for norm in ("attention_norm", "mlp_norm")
        for field in ("w", "bias", "dw", "dbias")
    ),
    *(f"{part}.{field}" for part in ("q", "k", "v", "o", "up", "down") for field in _PROJECTION),
    *(f"{shift}.{field}" for shift in ("q_shift", "k_shift") for field in ("value", "dvalue")),
    *("x", "dy", "log_sum", "heads", "middle", "active", "few", "y", "dx"),
)
_PLACE = {name: i for i, name in enumerate(_FIELDS)}
_GRADIENT = {name: ".d".join(name.split(".")) for name in _FIELDS if "." in name}
_Structure = ctypes.c_int64 * len(_FIELDS)


@dataclass(frozen=True)
class Shape:
    """What a block is, besides its weights."""

    n_heads: int
    d_ff: int
    eps: float
    rms: bool
    causal: bool
    by_tanh: bool
    ahead: tuple[int, ...]
    """By how many channels q, k and v begin further on, where they have no matrix and no order."""

    @functools.cached_property
    def eps_bits(self) -> int:
        """As the structure holds it."""
        return ctypes.c_int64.from_buffer(ctypes.c_double(self.eps)).value


def applies(x_BTD: Tensor, weight: Tensor | None, shape: Shape) -> bool:
    """Whether the kernel can take a block with such an input and such weights, of which it sees one."""
    if weight is None or (x_BTD.shape[-1] // shape.n_heads) % CHANNELS:
        return False
    return ours_multiply(x_BTD, weight)


def block(
    x_BTD: Tensor,
    shape: Shape,
    weights: Mapping[str, Tensor],
    rotation: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The block's output [B, T, D], with gradients.

    The weights are named as in the C structure, such as `q.w`; biases of norms too are `bias`.
    """
    y: Tensor = _Function.apply(  # type: ignore[no-untyped-call]
        x_BTD, shape, tuple(weights), rotation, *weights.values()
    )
    return y


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: Shape,
        names: tuple[str, ...],
        rotation: tuple[Tensor, Tensor] | None,
        *weights: Tensor,
    ) -> Tensor:
        x = x.contiguous()
        B, T = x.shape[:2]
        given = {name: w.contiguous() for name, w in zip(names, weights, strict=True)}
        kept = {"x": x, "heads": torch.empty_like(x), "middle": torch.empty_like(x)}
        kept["log_sum"] = x.new_empty(B, shape.n_heads, T)
        kept["up.y"] = wide = x.new_empty(B, T, shape.d_ff)
        if wide.nbytes <= SMALL:
            kept["active"] = torch.empty_like(wide)
        if ranks := sum(len(given[name]) for name in ("q.a", "k.a", "v.a") if name in given):
            kept["few"] = x.new_empty(B * T, ranks)
        for part, ahead in zip("qkv", shape.ahead, strict=True):
            made = any(f"{part}.{name}" in given for name in ("w", "order", "a"))
            moved = part != "v" and (rotation is not None or f"{part}_shift.value" in given)
            if made or moved or (ahead and part != "k"):  # else it is read where it lies
                kept[f"{part}.y"] = torch.empty_like(x)
        if rotation is not None:
            kept["cos"], kept["sin"] = (table.contiguous() for table in rotation)
        y = torch.empty_like(x)
        kernels().block_forward(_described(x, shape, {**given, **kept, "y": y}))
        ctx.shape, ctx.names, ctx.places = shape, names, [*given, *kept]
        ctx.save_for_backward(*given.values(), *kept.values())
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        tensors = dict(zip(ctx.places, ctx.saved_tensors, strict=True))
        wanted = zip(ctx.names, ctx.needs_input_grad[4:], strict=True)
        grads = {name: torch.empty_like(tensors[name]) if need else None for name, need in wanted}
        places = {_GRADIENT[name]: g for name, g in grads.items() if g is not None}
        x = tensors["x"]
        dx = torch.empty_like(x)
        ends = {"dy": dy.contiguous(), "dx": dx}
        kernels().block_backward(_described(x, ctx.shape, {**tensors, **places, **ends}))
        return dx, None, None, None, *grads.values()


def _described(x: Tensor, shape: Shape, tensors: Mapping[str, Tensor]) -> Any:
    """The C structure, with a null pointer for every tensor that is not there."""
    (B, T, D), H = x.shape, shape.n_heads
    found = _Structure(
        B, T, H, D // H, shape.d_ff, shape.rms, shape.causal, shape.by_tanh,
        torch.get_num_threads(), shape.eps_bits,
    )  # fmt: skip
    for part, ahead in zip("qkv", shape.ahead, strict=True):
        found[_PLACE[f"{part}.ahead"]] = ahead
        if f"{part}.a" in tensors:
            found[_PLACE[f"{part}.rank"]] = len(tensors[f"{part}.a"])
    for name, tensor in tensors.items():
        found[_PLACE[name]] = tensor.data_ptr()
    return found
