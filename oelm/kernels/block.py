"""A transformer block as one torch function: one call of `block.c` forward, one backward."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from oelm.kernels.functions import CHANNELS, kernels, ours_multiply

SMALL = 2**21
"""Bytes up to which holding a tensor for backward is better than computing it again."""

_pointer, _long = ctypes.c_void_p, ctypes.c_long


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _Projection(ctypes.Structure):
    _fields_ = [
        *_fields(_pointer, "w", "bias", "order", "a", "b", "y", "dw", "dbias", "da", "db"),
        *_fields(_long, "rank", "ahead"),
    ]


class _Norm(ctypes.Structure):
    _fields_ = _fields(_pointer, "w", "b", "dw", "db")


class _Shift(ctypes.Structure):
    _fields_ = _fields(_pointer, "value", "dvalue")


class _Block(ctypes.Structure):
    """`block` of block.c, field by field."""

    _fields_ = [
        *_fields(_long, "B", "T", "H", "E", "F", "rms", "causal", "by_tanh", "threads"),
        ("eps", ctypes.c_double),
        *_fields(_pointer, "cos", "sin"),
        *_fields(_Norm, "attention_norm", "mlp_norm"),
        *_fields(_Projection, "q", "k", "v", "o", "up", "down"),
        *_fields(_Shift, "q_shift", "k_shift"),
        *_fields(_pointer, "x", "dy", "log_sum", "heads", "middle", "active", "few", "y", "dx"),
    ]


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


def applies(x_BTD: Tensor, weight: Tensor | None, shape: Shape) -> bool:
    """Whether the kernel can take a block with such an input and such weights, of which it sees one."""
    if weight is None or (x_BTD.shape[-1] // shape.n_heads) % CHANNELS:
        return False
    return ours_multiply(x_BTD, weight)


def block(
    x_BTD: Tensor,
    shape: Shape,
    weights: Mapping[str, Tensor | None],
    rotation: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The block's output [B, T, D], with gradients.

    The weights are named as in the C structure, such as `q.w` or `mlp_norm.b`; absent ones are None.
    """
    y: Tensor = _Function.apply(  # type: ignore[no-untyped-call]
        x_BTD, shape, list(weights), rotation, *weights.values()
    )
    return y


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: Shape,
        names: list[str],
        rotation: tuple[Tensor, Tensor] | None,
        *weights: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        B, T = x.shape[:2]
        given = {at: w.contiguous() for at, w in zip(names, weights, strict=True) if w is not None}
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
        places = {_place_of_gradient(name): g for name, g in grads.items() if g is not None}
        x = tensors["x"]
        dx = torch.empty_like(x)
        ends = {"dy": dy.contiguous(), "dx": dx}
        kernels().block_backward(_described(x, ctx.shape, {**tensors, **places, **ends}))
        return dx, None, None, None, *grads.values()


def _place_of_gradient(name: str) -> str:
    part, field = name.split(".")
    return f"{part}.d{field}"


def _described(x: Tensor, shape: Shape, tensors: Mapping[str, Tensor]) -> Any:
    """The C structure, with a null pointer for every tensor that is not there."""
    (B, T, D), H = x.shape, shape.n_heads
    found = _Block(
        B=B, T=T, H=H, E=D // H, F=shape.d_ff, rms=shape.rms, causal=shape.causal, by_tanh=shape.by_tanh,
        threads=torch.get_num_threads(), eps=shape.eps,
    )  # fmt: skip
    for part, ahead in zip("qkv", shape.ahead, strict=True):
        getattr(found, part).ahead = ahead
    for name, tensor in tensors.items():
        part, _, field = name.rpartition(".")
        structure = getattr(found, part) if part else found
        setattr(structure, field, tensor.data_ptr())
        if field == "a":
            structure.rank = len(tensor)
    return ctypes.byref(found)
