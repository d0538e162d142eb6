"""Head and cross-entropy together, in row chunks that never hold all the logits."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

IGNORED = -100
CHUNK_ELEMENTS = 2**25  # of logits at a time: 667 rows of the GPT-2 vocabulary


def linear_cross_entropy(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Mean cross-entropy of the logits h Wᵀ, over the targets that are not −100."""
    loss: Tensor = _LinearCrossEntropy.apply(h_ND, weight_VD, targets_N)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is formed in the forward pass, while a chunk's probabilities are at hand."""

    @staticmethod
    def forward(ctx: FunctionCtx, h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        grad_h = torch.empty_like(h) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        grad_w = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # type: ignore[attr-defined]
        # Cast once rather than once per chunk: autocast would do the latter here.
        kind = h.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
        hidden, matrix = h.to(low), weight.to(low)
        kept = targets != IGNORED
        scale = 1.0 / kept.sum().clamp(min=1).to(torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=h.device)
        rows = max(1, CHUNK_ELEMENTS // len(weight))
        with torch.autocast(kind, enabled=False):
            for first in range(0, len(h), rows):
                at = slice(first, first + rows)
                target = targets[at].clamp(min=0)[:, None]
                log_p = F.log_softmax((hidden[at] @ matrix.T).float(), dim=-1)
                row_weight = kept[at, None] * scale
                total -= (log_p.gather(1, target) * row_weight).sum()
                if grad_h is None and grad_w is None:
                    continue
                grad = log_p.exp_()
                grad.scatter_add_(1, target, torch.full_like(target, -1.0, dtype=grad.dtype))
                grad = (grad * row_weight).to(low)
                if grad_h is not None:
                    grad_h[at] = grad @ matrix
                if grad_w is not None:
                    grad_w += grad.T @ hidden[at]
        ctx.grads = grad_h, grad_w  # type: ignore[attr-defined]
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        grad_h, grad_w = ctx.grads  # type: ignore[attr-defined]
        for grad in (grad_h, grad_w):
            if grad is not None:
                grad.mul_(grad_loss)
        return grad_h, grad_w, None
