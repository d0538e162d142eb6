"""Causal attention for processors: row blocks that skip the future, by plain matrix products.

torch's fused kernel wins on GPUs, where it is used. On CPUs it reached a quarter to a third of the
speed of a matrix product; working through blocks of 64 queries against the keys they may see was
1.3 to 1.7× faster forward and backward at sequences of 512 and 1,024, and equal at 128
(`benchmarks/attention.py`). The weights are kept for the backward pass, as long as they are few.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

BLOCK = 64
KEPT_BYTES = 2**27  # of attention weights per layer; beyond, torch's kernel keeps none


def worthwhile(q_BHTE: Tensor) -> bool:
    """Whether the blocks beat torch's kernel here: a CPU in float32, and not too long a sequence."""
    B, H, T, _ = q_BHTE.shape
    small = B * H * T * (T + BLOCK) * 2 <= KEPT_BYTES
    return q_BHTE.device.type == "cpu" and q_BHTE.dtype == torch.float32 and small and T > BLOCK


def causal_attention(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor) -> Tensor:
    """softmax(q kᵀ / √E + causal mask) v, [B, H, T, E]."""
    flat = (t.flatten(0, 1) for t in (q_BHTE, k_BHTE, v_BHTE))
    y: Tensor = _BlockedAttention.apply(*flat)  # type: ignore[no-untyped-call]
    return y.view(q_BHTE.shape)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, T, E = q.shape
        scale = 1 / math.sqrt(E)
        future = torch.full((BLOCK, BLOCK), float("-inf")).triu_(1)
        out = torch.empty_like(q)
        zero, weights = q.new_empty(1), []
        for first in range(0, T, BLOCK):
            last = min(first + BLOCK, T)
            rows = last - first
            logits = torch.baddbmm(
                zero, q[:, first:last], k[:, :last].transpose(1, 2), beta=0, alpha=scale
            )
            logits[:, :, first:] += future[:rows, :rows]
            p = logits.softmax(-1)
            out[:, first:last] = torch.bmm(p, v[:, :last])
            weights.append(p)
        ctx.save_for_backward(q, k, v, out, *weights)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, out, *weights = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = 1 / math.sqrt(q.shape[-1])
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad = grad.contiguous()
        row = (grad * out).sum(-1, keepdim=True)
        zero = q.new_empty(1)
        for i, p in enumerate(weights):
            first, last = i * BLOCK, i * BLOCK + p.shape[1]
            g = grad[:, first:last]
            # The softmax's gradient, p · (dp − Σ dp p), where the sum is the row of grad · out.
            d = torch.bmm(g, v[:, :last].transpose(1, 2)).sub_(row[:, first:last]).mul_(p)
            grad_v[:, :last].baddbmm_(p.transpose(1, 2), g)
            grad_q[:, first:last] = torch.baddbmm(zero, d, k[:, :last], beta=0, alpha=scale)
            grad_k[:, :last].baddbmm_(d.transpose(1, 2), q[:, first:last], alpha=scale)
        return grad_q, grad_k, grad_v
