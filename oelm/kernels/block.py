"""Transformer blocks as one torch function: one call of `block.c` forward, one backward."""

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.autograd.function import once_differentiable

from oelm.kernels.functions import CHANNELS, kernels, ours_multiply, packed

SMALL = 2**21
"""Bytes up to which holding a tensor for backward is better than computing it again."""
FEW = 2**27
"""Bytes of hidden layers and gradients that all blocks may hold until backward is through them."""

# The structure `block` of block.c, field by field; each takes eight bytes, so that it is a list of numbers.
# `add` and `in_panels` are for block.c itself.
_SIZES = ("B", "T", "H", "E", "F", "rms", "causal", "by_tanh", "threads", "add")
_PROJECTION = (
    "w",
    "bias",
    "order",
    "a",
    "b",
    "y",
    "dw",
    "dbias",
    "da",
    "db",
    "rank",
    "ahead",
    "in_panels",
)
_FIELDS = (
    *_SIZES,
    "eps",
    "cos",
    "sin",
    *(
        f"{norm}.{field}"
        for norm in ("attention_norm", "mlp_norm", "final_norm")
        for field in ("w", "bias", "dw", "dbias")
    ),
    *(f"{part}.{field}" for part in ("q", "k", "v", "o", "up", "down") for field in _PROJECTION),
    *(f"{shift}.{field}" for shift in ("q_shift", "k_shift") for field in ("value", "dvalue")),
    *("x", "dy", "log_sum", "heads", "middle", "active", "few", "stream", "y", "dx"),
)
_PLACE = {name: i for i, name in enumerate(_FIELDS)}
_GRADIENT = {name: ".d".join(name.split(".")) for name in _FIELDS if "." in name}


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
        bits: int = struct.unpack("q", struct.pack("d", self.eps))[0]
        return bits


def applies(x_BTD: Tensor, weight: Tensor | None, shape: Shape) -> bool:
    """Whether the kernel can take a block with such an input and such weights, of which it sees one."""
    if weight is None or (x_BTD.shape[-1] // shape.n_heads) % CHANNELS:
        return False
    return ours_multiply(x_BTD, weight)


class Part(NamedTuple):
    """One of several blocks: what it is, and its weights by their names in the C structure, such as `q.w`.

    Those of a norm after the last block, if that is wanted, are among its own.
    """

    shape: Shape
    weights: dict[str, Tensor]


def blocks(
    x_BTD: Tensor,
    parts: Sequence[Part],
    rotation: tuple[Tensor, Tensor] | None,
    lanes: int = 1,
) -> Tensor:
    """The last block's output [B, T, D], with gradients; in lanes, each of which takes its share of B."""
    names = [(part.shape, tuple(part.weights)) for part in parts]
    weights = (w for part in parts for w in part.weights.values())
    y: Tensor = _Function.apply(x_BTD, names, rotation, lanes, *weights)  # type: ignore[no-untyped-call]
    return y


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parts: Sequence[tuple[Shape, tuple[str, ...]]],
        rotation: tuple[Tensor, Tensor] | None,
        lanes: int,
        *weights: Tensor,
    ) -> Tensor:
        x, coming = x.contiguous(), iter(weights)
        layers, structures = [], []
        for shape, names in parts:
            tensors = {name: next(coming).contiguous() for name in names}
            tensors |= _kept(x, shape, tensors, rotation, lanes)
            x = torch.empty_like(x)
            structures.append(_described(x, shape, {**tensors, "y": x}))
            layers.append(tensors)
        kernels().blocks_forward(b"".join(structures), len(structures), lanes)
        ctx.parts, ctx.lanes, ctx.places = parts, lanes, [tuple(layer) for layer in layers]
        ctx.save_for_backward(*(tensor for layer in layers for tensor in layer.values()))
        return x

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = iter(ctx.saved_tensors), iter(ctx.needs_input_grad[4:])
        layers = [{place: next(saved) for place in places} for places in ctx.places]
        named = zip(layers, (names for _, names in ctx.parts), strict=True)
        wanted = [(layer, name, next(needed)) for layer, names in named for name in names]
        size = sum(layer[name].numel() for layer, name, need in wanted if need)
        # All in one, and once more for every other lane.
        gradients = dy.new_empty(ctx.lanes, size)
        needy = [(layer, name) for layer, name, need in wanted if need]
        pieces = unflatten(  # type: ignore[no-untyped-call]
            gradients[0], [layer[name] for layer, name in needy]
        )
        for (layer, name), piece in zip(needy, pieces, strict=True):
            layer[_GRADIENT[name]] = piece
        coming = iter(pieces)
        found = [next(coming) if need else None for _, _, need in wanted]
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        ends = [{"dy": dx, "dx": dx} for _ in layers]
        ends[-1]["dy"] = dy
        structures = [
            _described(dy, shape, layer | own)
            for (shape, _), layer, own in zip(ctx.parts, layers, ends, strict=True)
        ]
        kernels().blocks_backward(
            b"".join(structures), len(structures), ctx.lanes, gradients.data_ptr(), size
        )
        return dx, None, None, None, *found


def _kept(
    x: Tensor,
    shape: Shape,
    weights: Mapping[str, Tensor],
    rotation: tuple[Tensor, Tensor] | None,
    lanes: int,
) -> dict[str, Tensor]:
    """What a block needs in backward, besides its weights, to be filled in forward."""
    B, T = x.shape[:2]
    kept = {"x": x, "heads": torch.empty_like(x), "middle": torch.empty_like(x)}
    kept["log_sum"] = x.new_empty(B, shape.n_heads, T)
    kept["up.y"] = wide = x.new_empty(B, T, shape.d_ff)
    if "final_norm.w" in weights:
        kept["stream"] = torch.empty_like(x)
    if wide.nbytes <= lanes * SMALL:
        kept["active"] = torch.empty_like(wide)
    if ranks := sum(len(weights[name]) for name in ("q.a", "k.a", "v.a") if name in weights):
        kept["few"] = x.new_empty(B * T, ranks)
    for part, ahead in zip("qkv", shape.ahead, strict=True):
        made = any(f"{part}.{name}" in weights for name in ("w", "order", "a"))
        moved = part != "v" and (rotation is not None or f"{part}_shift.value" in weights)
        if made or moved or (ahead and part != "k"):  # else it is read where it lies
            kept[f"{part}.y"] = torch.empty_like(x)
    if rotation is not None:
        kept["cos"], kept["sin"] = (table.contiguous() for table in rotation)
    return kept


def _described(x: Tensor, shape: Shape, tensors: Mapping[str, Tensor]) -> bytes:
    """The C structure, with a null pointer for every tensor that is not there."""
    (B, T, D), H = x.shape, shape.n_heads
    first = (
        B, T, H, D // H, shape.d_ff, shape.rms, shape.causal, shape.by_tanh,
        torch.get_num_threads(), False, shape.eps_bits,
    )  # fmt: skip
    found = [*first, *[0] * (len(_FIELDS) - len(first))]
    for part, ahead in zip("qkv", shape.ahead, strict=True):
        found[_PLACE[f"{part}.ahead"]] = ahead
        if f"{part}.a" in tensors:
            found[_PLACE[f"{part}.rank"]] = len(tensors[f"{part}.a"])
    for name, tensor in tensors.items():
        found[_PLACE[name]] = tensor.data_ptr()
    return packed(found)
