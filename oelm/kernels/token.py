"""The structures of `token.c`, filled from tensors: one call for the next token of a few sequences."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oelm.kernels.functions import kernels, pointers

_pointer, _long, _double = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
ACTIVATIONS = {"swiglu": 0, "gelu": 1, "gelu_tanh": 2}

Affine = tuple[Tensor | None, Tensor | None]
"""A norm's, or a matrix's, weight and bias."""


class _Affine(ctypes.Structure):
    _fields_ = [("w", _pointer), ("b", _pointer)]


AFFINE = ("attention_norm", "qkv", "o", "mlp_norm", "up", "gate", "down")


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, _Affine) for name in AFFINE],
        *[(name, _pointer) for name in ("q_norm", "k_norm", "q_shift", "k_shift", "relative")],
        *[(name, _pointer) for name in ("keys", "values")],
    ]  # fmt: skip


class _Token(ctypes.Structure):
    _fields_ = [
        *[(name, _long) for name in ("layers", "B", "H", "E", "F", "V", "S", "at", "distances", "rms",
                                     "activation", "threads")],
        *[(name, _double) for name in ("eps", "qk_eps")],
        *[(name, _pointer) for name in ("cos", "sin")],
        *[(name, _Affine) for name in ("final_norm", "head")],
        *[(name, _pointer) for name in ("of", "x", "logits")],
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The tensors of one layer, by the names of the C structure."""

    attention_norm: Affine
    qkv: Affine
    o: Affine
    mlp_norm: Affine
    up: Affine
    gate: Affine = (None, None)
    down: Affine
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_shift: Tensor | None = None
    """[positions, D]; or [1, D], the same at every position."""
    k_shift: Tensor | None = None
    relative: Tensor | None = None

    def described(self) -> _Layer:
        """The structure, but for what changes with the position."""
        found = _Layer()
        for name in AFFINE:
            setattr(found, name, _Affine(*pointers(*getattr(self, name))))
        for name in ("q_norm", "k_norm", "relative"):
            setattr(found, name, *pointers(getattr(self, name)))
        return found


@dataclass(kw_only=True)
class Stack:
    """All layers and the head, with what holds for all of them."""

    layers: Sequence[Layer]
    final_norm: Affine
    head: Tensor
    n_heads: int
    d_ff: int
    activation: str
    rms: bool
    eps: float
    qk_eps: float
    turn: tuple[Tensor, Tensor] | None
    """Cosines and sines [positions, E] by which q and k are turned."""
    described: Any = field(init=False)

    def __post_init__(self) -> None:
        self.described = (_Layer * len(self.layers))(*(layer.described() for layer in self.layers))

    def logits(self, x_BD: Tensor, caches: Sequence[dict[str, Tensor]], at: int) -> Tensor:
        """Logits [B, V] after the embedded tokens at a position; the caches hold all before it."""
        (B, D), S = x_BD.shape, caches[0]["k"].shape[2]
        logits = x_BD.new_empty(B, len(self.head))
        for found, layer, cache in zip(self.described, self.layers, caches, strict=True):
            found.keys, found.values = pointers(cache["k"], cache["v"])
            for name in ("q_shift", "k_shift"):
                shift = getattr(layer, name)
                if shift is not None:
                    setattr(found, name, shift[at if len(shift) > 1 else 0].data_ptr())
        relative = self.layers[0].relative
        token = _Token(
            layers=len(self.layers), B=B, H=self.n_heads, E=D // self.n_heads, F=self.d_ff,
            V=len(self.head), S=S, at=at, distances=0 if relative is None else relative.shape[1],
            rms=self.rms, activation=ACTIVATIONS[self.activation], threads=torch.get_num_threads(),
            eps=self.eps, qk_eps=self.qk_eps, final_norm=_Affine(*pointers(*self.final_norm)),
            head=_Affine(self.head.data_ptr(), None), of=ctypes.addressof(self.described),
            x=x_BD.data_ptr(), logits=logits.data_ptr(),
        )  # fmt: skip
        if self.turn is not None:
            token.cos, token.sin = (table[at].data_ptr() for table in self.turn)
        kernels().next_logits(ctypes.byref(token))
        return logits
