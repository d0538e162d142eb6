"""Transformer blocks as one torch function: one call of `block.c` forward, one backward."""

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, islice
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
CACHE_LINE = 16  # numbers

# The structure `block` of block.c, field by field; each takes eight bytes, so that it is a list of numbers.
# `add`, `next` and `in_panels` are for block.c itself.
_SIZES = ("B", "T", "H", "E", "F", "rms", "causal", "by_tanh", "threads", "add", "next")
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
_GRADIENT = {name: _PLACE.get(".d".join(name.split("."))) for name in _FIELDS}
_RANKED = ("q.a", "k.a", "v.a")


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
        size, x = tuple(x.shape), x.contiguous()
        weights = tuple(w.contiguous() for w in weights)
        tables = [] if rotation is None else [table.contiguous() for table in rotation]
        layers, at = [], 0
        for shape, names in parts:
            own = weights[at : at + len(names)]
            at += len(names)
            ranks = tuple(len(w) for name, w in zip(names, own, strict=True) if name in _RANKED)
            plan = _plan(shape, names, size, ranks, bool(tables), lanes, torch.get_num_threads())
            room, y = x.new_empty(plan.room), torch.empty_like(x)
            structure = _filled(plan, x, own, room, tables)
            structure[_PLACE["y"]] = y.data_ptr()
            layers.append((plan, x, room, structure))
            x = y
        plans, inputs, rooms, structures = zip(*layers, strict=True)
        kernels().blocks_forward(packed(chain(*structures)), len(structures), lanes)
        ctx.plans, ctx.lanes = plans, lanes
        ctx.save_for_backward(*weights, *inputs, *rooms, *tables)
        return x

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = iter(ctx.saved_tensors), ctx.needs_input_grad[4:]
        weights, inputs, rooms = (
            list(islice(saved, n)) for n in (len(needed), *[len(ctx.plans)] * 2)
        )
        tables = list(saved)
        needy = list(compress(weights, needed))
        # All in one, and once more for every other lane.
        gradients = dy.new_empty(ctx.lanes, sum(w.numel() for w in needy))
        pieces = iter(unflatten(gradients[0], needy))  # type: ignore[no-untyped-call]
        found = [next(pieces) if need else None for need in needed]
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        structures, at = [], 0
        for plan, x, room in zip(ctx.plans, inputs, rooms, strict=True):
            own = slice(at, at + len(plan.weights))
            at = own.stop
            structure = _filled(plan, x, weights[own], room, tables)
            for place, gradient in zip(plan.gradients, found[own], strict=True):
                if place is not None and gradient is not None:
                    structure[place] = gradient.data_ptr()
            structure[_PLACE["dy"]] = structure[_PLACE["dx"]] = dx.data_ptr()
            structures.append(structure)
        structures[-1][_PLACE["dy"]] = dy.data_ptr()
        kernels().blocks_backward(
            packed(chain(*structures)), len(structures), ctx.lanes, gradients.data_ptr(), gradients.shape[1]
        )  # fmt: skip
        return dx, None, None, None, *found


class _Plan(NamedTuple):
    """A block's structure but for its addresses, and where these belong."""

    numbers: tuple[int, ...]
    weights: tuple[int, ...]
    gradients: tuple[int | None, ...]
    kept: tuple[tuple[int, int], ...]
    """What forward keeps for backward, besides the input and the weights: where in the structure, and by how
    many bytes into a room for all of it."""
    room: int
    """How many numbers that takes."""


@functools.lru_cache
def _plan(
    shape: Shape,
    names: tuple[str, ...],
    size: tuple[int, int, int],
    ranks: tuple[int, ...],
    turned: bool,
    lanes: int,
    threads: int,
) -> _Plan:
    (B, T, D), H = size, shape.n_heads
    first = (
        B, T, H, D // H, shape.d_ff, shape.rms, shape.causal, shape.by_tanh, threads, False, 0,
        shape.eps_bits,
    )  # fmt: skip
    numbers = [*first, *[0] * (len(_FIELDS) - len(first))]
    rows, wide = B * T * D, B * T * shape.d_ff
    kept = {"heads": rows, "middle": rows, "log_sum": B * H * T, "up.y": wide}
    if "final_norm.w" in names:
        kept["stream"] = rows
    if 4 * wide <= lanes * SMALL:
        kept["active"] = wide
    if ranks:
        kept["few"] = B * T * sum(ranks)
    coming = iter(ranks)
    for part, ahead in zip("qkv", shape.ahead, strict=True):
        numbers[_PLACE[f"{part}.ahead"]] = ahead
        numbers[_PLACE[f"{part}.rank"]] = next(coming) if f"{part}.a" in names else 0
        made = any(f"{part}.{name}" in names for name in ("w", "order", "a"))
        moved = part != "v" and (turned or f"{part}_shift.value" in names)
        if made or moved or (ahead and part != "k"):  # else it is read where it lies
            kept[f"{part}.y"] = rows
    begins = [0, *accumulate(-(-n // CACHE_LINE) * CACHE_LINE for n in kept.values())]
    return _Plan(
        numbers=tuple(numbers),
        weights=tuple(_PLACE[name] for name in names),
        gradients=tuple(_GRADIENT[name] for name in names),
        kept=tuple((_PLACE[name], 4 * begin) for name, begin in zip(kept, begins, strict=False)),
        room=begins[-1],
    )


def _filled(
    plan: _Plan, x: Tensor, weights: Sequence[Tensor], room: Tensor, tables: Sequence[Tensor]
) -> list[int]:
    """The C structure, with a null pointer for every tensor that is not there."""
    found, begin = list(plan.numbers), room.data_ptr()
    for place, weight in zip(plan.weights, weights, strict=True):
        found[place] = weight.data_ptr()
    for place, byte in plan.kept:
        found[place] = begin + byte
    for name, table in zip(("cos", "sin"), tables, strict=False):
        found[_PLACE[name]] = table.data_ptr()
    found[_PLACE["x"]] = x.data_ptr()
    return found
