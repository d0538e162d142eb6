"""Head and cross-entropy together, in row chunks that never hold all the logits.

Three forms were measured at 4,096 rows × 50,257 classes on two CPU cores (`benchmarks/loss.py`):
the plain `F.cross_entropy(h @ W.T)`, torch's chunked `F.linear_cross_entropy`, and this one. This
one won in time (they took 1.25× and 1.18× as long) and in memory (a training step peaks at 0.48× the
plain form's): the gradient is formed in the forward pass while a chunk's probabilities are at hand,
in one buffer that every chunk uses again, so that no logit is computed twice and none is stored.
Chunks of 300 to 1,000 rows were about the same, but with AVX-512, where those of 660 took 0.95 to 0.97
of the time of 330; smaller ones lose in the products. Those of 512 took 0.98 of the time of 586, which
write the gradient of the whole matrix to memory twice as often.

A small head's products take so little that walking over the logits is a third of the time. There, a
kernel takes them from product to gradient by a few rows that stay in the cache.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from oelm.kernels.functions import applies, cross_entropy_, head_loss, ours_multiply, product

IGNORED = -100
CHUNK_ELEMENTS = 2**25  # logits at a time
ROWS = 512  # one of several chunks has a multiple: so many a product adds up before it writes
ROW_ALIGNMENT = 64  # numbers
# Where the kernel took 0.55 to 0.95 of the time; with larger heads it reads too much again.
SMALL_CLASSES, SMALL_WIDTH, SMALL_WEIGHT = 2**13, 2**8, 2**20


def is_small(classes: int, width: int) -> bool:
    """Whether a head of this size is the kernel's, where there is one."""
    return classes <= SMALL_CLASSES and width <= SMALL_WIDTH and classes * width <= SMALL_WEIGHT


def linear_cross_entropy(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Mean cross-entropy of the logits h Wᵀ, over the targets that are not −100."""
    if not torch.is_grad_enabled():  # which the function below cannot see
        h_ND, weight_VD = h_ND.detach(), weight_VD.detach()
    loss: Tensor = _LinearCrossEntropy.apply(h_ND, weight_VD, targets_N)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        need_h, need_w, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        if is_small(*weight.shape) and ours_multiply(h, weight):
            loss, *ctx.grads = head_loss(  # type: ignore[attr-defined]
                h, weight, targets, ignored=IGNORED, need=(need_h, need_w)
            )
            return loss

        device = h.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
        exact = torch.promote_types(h.dtype, torch.float32)
        kept_N1 = (targets != IGNORED)[:, None]
        row_weight_N1 = kept_N1 / kept_N1.sum().clamp(min=1).to(exact)
        target_N = targets.masked_fill(~kept_N1[:, 0], 0)

        # Cast once: under autocast every chunk's product would cast the whole matrix again.
        hidden, matrix = h.to(low), weight.to(low)
        grad_h = torch.empty_like(h) if need_h else None
        blank = torch.empty_like if len(h) else torch.zeros_like
        grad_w = blank(weight) if need_w else None
        total = torch.zeros((), dtype=exact, device=h.device)
        rows = max(1, min(len(h), CHUNK_ELEMENTS // len(weight)))
        if ROWS < rows < len(h):
            rows -= rows % ROWS
        # Rows that begin on a cache line: writing to rows of 50,257 numbers took 1.3× as long.
        width = math.ceil(len(weight) / ROW_ALIGNMENT) * ROW_ALIGNMENT
        buffer = torch.empty(rows, width, dtype=low, device=h.device)[:, : len(weight)]
        with torch.autocast(device, enabled=False):
            for first in range(0, len(h), rows):
                at = slice(first, min(first + rows, len(h)))
                target, share = target_N[at], row_weight_N1[at]
                found = product(hidden[at], matrix.T, out=buffer[: len(target)])
                logits = found.to(exact)  # the buffer itself in float32
                loss = cross_entropy_(logits, target, gradient=need_h or need_w)
                total += (loss * share[:, 0]).sum()
                # The mean's weights go into the narrow factors, sparing a pass over the wide one.
                p = logits.to(low)
                if grad_h is not None:
                    grad_h[at] = product(p, matrix) * share
                if grad_w is not None:
                    narrow = (hidden[at] * share).to(grad_w.dtype)
                    product(p.T.to(grad_w.dtype), narrow, grad_w if first else None, out=grad_w)
        ctx.grads = grad_h, grad_w  # type: ignore[attr-defined]
        return total

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_loss: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        if ctx.grads is None:  # type: ignore[attr-defined]
            raise RuntimeError("this loss keeps its gradient for one backward pass only")
        grad_h, grad_w = ctx.grads  # type: ignore[attr-defined]
        ctx.grads = None  # type: ignore[attr-defined]
        # It mostly is 1; asking a GPU would take longer.
        if applies(grad_loss) and grad_loss.item() == 1:
            return grad_h, grad_w, None
        for grad in (grad_h, grad_w):
            if grad is not None:
                grad.mul_(grad_loss)
        return grad_h, grad_w, None
