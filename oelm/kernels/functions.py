"""The operations as torch functions with gradients: our kernels where they apply, else torch's."""

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from oelm.kernels.library import library, products_pay

CHANNELS = 16  # the kernels take a head's channels by so many
PLAIN = (Tensor, nn.Parameter)  # and none that only looks like a tensor


def applies(*tensors: Tensor) -> bool:
    """Whether these can go to a kernel: float32 on a CPU, and nothing around that must see the call."""
    for x in tensors:
        if x.dtype is not torch.float32 or not x.is_cpu or type(x) not in PLAIN:
            return False
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]  # one that counts
        or library() is None
    )


def ours_multiply(*tensors: Tensor) -> bool:
    """Whether a product of these is ours to compute."""
    # In this order: torch's compiler, if it is looking on, must not look into what reads files.
    return applies(*tensors) and products_pay() and all(x.numel() for x in tensors)


def embed(
    tokens_BT: Tensor, weight_VD: Tensor, positions_SD: Tensor | None, start: int = 0
) -> Tensor:
    """The tokens' rows of `weight` [B, T, D], plus those of their positions, from `start` on."""
    if applies(*(x for x in (weight_VD, positions_SD) if x is not None)):
        y: Tensor = _Embed.apply(tokens_BT, weight_VD, positions_SD, start)  # type: ignore[no-untyped-call]
        return y
    x = F.embedding(tokens_BT, weight_VD)
    return x if positions_SD is None else x + positions_SD[start : start + x.shape[1]]


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, positions: Tensor | None, start: int
    ) -> Tensor:
        tokens, weight = tokens.to(torch.int64).contiguous(), weight.contiguous()
        here = slice(start, start + tokens.shape[1])
        places = None if positions is None else positions[here].contiguous()
        y = weight.new_empty(*tokens.shape, weight.shape[1])
        out_of_range = kernels().embed(
            *pointers(tokens, weight, places, y), tokens.numel(), tokens.shape[1], *weight.shape,
            torch.get_num_threads(),
        )  # fmt: skip
        if out_of_range:
            raise IndexError(f"a token is not one of the {len(weight)}")
        ctx.tokens, ctx.start, ctx.shape = tokens, start, weight.shape
        ctx.positions = 0 if positions is None else len(positions)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (V, D), T, dy = ctx.shape, dy.shape[1], dy.contiguous()
        dweight = dy.new_empty(V, D) if ctx.needs_input_grad[1] else None
        dpositions, dplaces = None, None
        if ctx.needs_input_grad[2]:
            make = dy.new_empty if ctx.positions == T else dy.new_zeros
            dpositions = make(ctx.positions, D)
            dplaces = dpositions[ctx.start :]
        kernels().embed_backward(
            *pointers(ctx.tokens, dy, dweight, dplaces), ctx.tokens.numel(), T, V, D, torch.get_num_threads()
        )  # fmt: skip
        return None, dweight, dpositions, None


def product(
    a: Tensor, b: Tensor, start: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """a b of matrices, added to `start`, a vector or a matrix, `out` itself perhaps; no gradient."""
    if ours_multiply(a, b):
        a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
        if out is None:
            out = a.new_empty(len(a), b.shape[1])
        start_row = start.stride(0) if start is not None and start.ndim == 2 else 0
        kernels().product(
            a.data_ptr(), strides(a, of=2), b.data_ptr(), strides(b, of=2), out.data_ptr(), out.stride(0),
            *pointers(start), start_row, *out.shape, len(b), torch.get_num_threads(),
        )  # fmt: skip
        return out
    return torch.mm(a, b, out=out) if start is None else torch.addmm(start, a, b, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    if ours_multiply(x, weight):
        y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        outputs, inputs = weight.shape
        y = x.new_empty(*x.shape[:-1], outputs)
        kernels().linear(
            *pointers(x, weight, bias, y), x.numel() // inputs, outputs, inputs, torch.get_num_threads()
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        outputs, inputs = weight.shape
        dy = dy.contiguous()
        dx, dweight, dbias = (
            dy.new_empty(shape) if needed else None
            for shape, needed in zip(
                (x.shape, weight.shape, (outputs,)), ctx.needs_input_grad, strict=True
            )
        )
        kernels().linear_backward(
            *pointers(dy, x, weight, dx), False, *pointers(dweight, dbias), False, x.numel() // inputs,
            outputs, inputs, torch.get_num_threads(),
        )  # fmt: skip
        return dx, dweight, dbias


def low_rank(x: Tensor, a: Tensor, b: Tensor, base: Tensor) -> Tensor:
    """base + (x aᵀ) bᵀ"""
    if ours_multiply(x, a, b, base):
        y: Tensor = _LowRank.apply(x, a, b, base)  # type: ignore[no-untyped-call]
        return y
    # Written so that the few channels come first, in backward too: a product with few columns takes
    # torch up to six times as long as its transpose.
    few = a @ x.flatten(0, -2).T
    return torch.addmm(base.flatten(0, -2), few.T, b.T.contiguous()).view_as(base)


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, base: Tensor) -> Tensor:
        rows, base_rows = x.flatten(0, -2), base.flatten(0, -2).contiguous()
        few = product(rows, a.T)
        ctx.save_for_backward(x, a, b, few)
        return product(few, b.T, base_rows).view_as(base)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, a, b, few = ctx.saved_tensors
        rows, dy_rows = x.flatten(0, -2), dy.flatten(0, -2)
        dfew = product(dy_rows, b)
        return product(dfew, a).view_as(x), product(dfew.T, rows), product(dy_rows.T, few), dy


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, dropout: float
) -> Tensor:
    """`F.scaled_dot_product_attention` of [B, H, T, E]."""
    alike = q.shape == k.shape == v.shape and q.shape[-1] % CHANNELS == 0
    if bias is None and not dropout and alike and applies(q, k, v):
        y: Tensor = _Attention.apply(q, k, v, causal)  # type: ignore[no-untyped-call]
        return y
    return F.scaled_dot_product_attention(q, k, v, bias, dropout, is_causal=causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = (in_rows(x) for x in (q, k, v))
        y, log_sum = empty_in_rows(q), q.new_empty(q.shape[:3])
        kernels().attention(
            *pointers(q, k, v, y, log_sum), *q.shape, strides(q, k, v, y), 0,
            q.shape[-1] ** -0.5, causal, torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, y, log_sum)
        ctx.causal = causal
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, log_sum = ctx.saved_tensors
        dy = in_rows(dy)
        dq, dk, dv = (empty_in_rows(q) for _ in range(3))
        kernels().attention_backward(
            *pointers(q, k, v, y, log_sum, dy, dq, dk, dv), *q.shape, strides(q, k, v, y, dy, dq, dk, dv), 0,
            q.shape[-1] ** -0.5, ctx.causal, torch.get_num_threads(),
        )  # fmt: skip
        return dq, dk, dv, None


def gelu(x: Tensor, *, by_tanh: bool) -> Tensor:
    """`F.gelu`, exact or by tanh."""
    if applies(x):
        y: Tensor = _Gelu.apply(x, by_tanh)  # type: ignore[no-untyped-call]
        return y
    return F.gelu(x, approximate="tanh" if by_tanh else "none")


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by_tanh: bool) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        kernels().gelu(*pointers(x, y), None, x.numel(), by_tanh, torch.get_num_threads())
        ctx.save_for_backward(x)
        ctx.by_tanh = by_tanh
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        kernels().gelu_backward(
            *pointers(x, dy, dx), None, x.numel(), ctx.by_tanh, torch.get_num_threads()
        )  # fmt: skip
        return dx, None


def cross_entropy_(logits_NV: Tensor, target_N: Tensor, *, gradient: bool) -> Tensor:
    """Each row's loss [N]; the logits, in float32 or more, become its gradient by them, or are lost."""
    if applies(logits_NV) and logits_NV.stride(1) == 1:
        loss_N = torch.empty_like(logits_NV[:, 0])
        target_N = target_N.to(torch.int64).contiguous()
        out_of_range = kernels().cross_entropy(
            logits_NV.data_ptr(), logits_NV.stride(0), *pointers(target_N, loss_N), *logits_NV.shape,
            gradient, torch.get_num_threads(),
        )  # fmt: skip
        if out_of_range:
            raise no_class(logits_NV.shape[1])
        return loss_N
    target_N1 = target_N[:, None]
    chosen = logits_NV.gather(1, target_N1)
    largest = logits_NV.amax(1, keepdim=True)
    p = logits_NV.sub_(largest).exp_()
    mass = p.sum(1, keepdim=True)
    if gradient:
        p.div_(mass).scatter_add_(1, target_N1, torch.full_like(chosen, -1.0))
    return (mass.log() + largest - chosen)[:, 0]


def head_loss(
    h_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, ignored: int, need: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The mean loss of the logits h Wᵀ over the targets that are not `ignored`, where products are ours.

    Also its gradients by h and W, if they are needed.
    """
    h, weight = h_ND.contiguous(), weight_VD.contiguous()
    loss = h.new_empty(())
    grad_h, grad_w = (
        torch.empty_like(x) if needed else None for x, needed in zip((h, weight), need, strict=True)
    )
    target_N = target_N.to(torch.int64).contiguous()
    out_of_range = kernels().head_loss(
        *pointers(h, weight, target_N), ignored, *pointers(loss, grad_h, grad_w), len(h), *weight.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    if out_of_range:
        raise no_class(len(weight))
    return loss, grad_h, grad_w


def no_class(classes: int) -> IndexError:
    """For a target that is none of them."""
    return IndexError(f"a target is not one of the {classes} classes")


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all numbers together."""
    if tensors and plain(tensors):
        squares = kernels().sum_of_squares(
            *_lists(tensors), _sizes(tensors), len(tensors), torch.get_num_threads()
        )
        return tensors[0].new_tensor(squares**0.5)
    return nn.utils.get_total_norm(tensors)


def adamw_(
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    shrink: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """A step of AdamW with `shrink` times the gradients, of what is `plain`; it counts the steps."""
    kernels().adamw(
        *_lists(tensors, grads, means, squares, steps), _sizes(tensors), len(tensors), shrink, lr, *betas,
        eps, weight_decay, torch.get_num_threads(),
    )  # fmt: skip
    torch.autograd.graph.increment_version(tensors)  # else a graph would not know that they changed


def plain(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel can take all of these as rows of numbers."""
    return applies(*tensors) and all(x.is_contiguous() for x in tensors)


def packed(numbers: Iterable[int]) -> bytes:
    """Addresses or sizes as C takes them: quicker than an array of ctypes."""
    found = tuple(numbers)
    return struct.pack(f"{len(found)}q", *found)


def _lists(*lists: Sequence[Tensor]) -> list[bytes]:
    return [packed(x.data_ptr() for x in tensors) for tensors in lists]


def _sizes(tensors: Sequence[Tensor]) -> bytes:
    return packed(x.numel() for x in tensors)


def few_rows(x_BD: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ of a few rows, where the kernels apply; no gradient."""
    y = x_BD.new_empty(len(x_BD), len(weight))
    kernels().few_rows(
        *pointers(x_BD, weight, y), *x_BD.shape, len(weight), torch.get_num_threads()
    )
    return y


def kernels() -> ctypes.CDLL:
    """The library, for those who asked whether it applies."""
    found = library()
    assert found is not None
    return found


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Where their numbers are; a missing tensor is a null pointer."""
    return [None if x is None else x.data_ptr() for x in tensors]


def strides(*tensors: Tensor, of: int = 3) -> "ctypes.Array[ctypes.c_long]":
    """The strides of their first dimensions, one tensor after the other."""
    return (ctypes.c_long * (of * len(tensors)))(*(s for x in tensors for s in x.stride()[:of]))


def in_rows(x: Tensor) -> Tensor:
    """With the numbers of a row next to each other, as the kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_in_rows(like_BHTE: Tensor) -> Tensor:
    """Room for [B, H, T, E] whose heads lie side by side, so that joining them is a view."""
    B, H, T, E = like_BHTE.shape
    return like_BHTE.new_empty(B, T, H, E).transpose(1, 2)
