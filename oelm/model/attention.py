"""Attention with treated projections: the idea of the method, on one screen."""

from typing import Any

import torch
from torch import Tensor, nn

from oelm.kernels.functions import attention
from oelm.methods import Method
from oelm.model.config import ModelConfig
from oelm.model.projection import Projection

Cache = dict[str, Tensor]


class Attention(nn.Module):
    """Multi-head attention whose Q, K, V and O are made and trained as the method says.

    In `oelm_v2`, q and k are fixed frames: head h compares tokens in a random d_head-dimensional
    view of the stream. All that can be learned about *where to look* must come through the
    residual stream that the view is taken of.
    """

    def __init__(self, config: ModelConfig, method: Method, layer: int, *, causal: bool) -> None:
        super().__init__()
        self.n_heads, self.causal, self.dropout = config.n_heads, causal, config.dropout
        self.q, self.k, self.v, self.o = (
            Projection(
                config.d_model,
                config.d_model,
                method.treatment(name),
                heads=config.n_heads if name != "o" else 1,
                layer=layer,
                n_layers=config.n_layers,
                bias=config.attention_bias,
            )
            for name in ("q", "k", "v", "o")
        )
        self.q_norm = nn.RMSNorm(config.d_head, eps=1e-6) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.d_head, eps=1e-6) if config.qk_norm else None
        self.temperature = nn.Parameter(torch.ones(config.n_heads)) if method.temperature else None
        # RoPE turns all of q and k; a kernel is turned in any model.
        self.rope = config.positions == "rope"
        self.kernel_q = nn.Parameter(torch.zeros(config.d_model)) if method.kernel else None
        self.kernel_k = nn.Parameter(torch.zeros(config.d_model)) if method.kernel else None
        distances = config.seq_len if causal else 2 * config.seq_len - 1
        relative = config.positions == "relative"
        self.relative_bias = (
            nn.Parameter(torch.zeros(config.n_heads, distances)) if relative else None
        )

    def forward(
        self,
        x_BTD: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        start: int = 0,
    ) -> Tensor:
        """Attend; `start` is the position of the first token, `cache` holds k and v of all before it."""
        B, T, D = x_BTD.shape
        q_BHTE, k_BHTE = self.queries_and_keys(x_BTD, rotation)
        v_BHTE = self.heads(self.v(x_BTD))
        if cache is not None:
            cache["k"][:, :, start : start + T] = k_BHTE
            cache["v"][:, :, start : start + T] = v_BHTE
            k_BHTE, v_BHTE = cache["k"][:, :, : start + T], cache["v"][:, :, : start + T]

        bias = self.logit_bias(T, start, mask, q_BHTE)
        y_BHTE = attention(
            q_BHTE,
            k_BHTE,
            v_BHTE,
            bias,
            # A single query sees all keys; several queries behind a cache bring their own mask.
            causal=self.causal and bias is None and T > 1,
            dropout=self.dropout if self.training else 0.0,
        )
        y: Tensor = self.o(y_BHTE.transpose(1, 2).reshape(B, T, D))
        return y

    def queries_and_keys(
        self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """What the heads compare."""
        return self.placed(self.heads(self.q(x_BTD)), self.heads(self.k(x_BTD)), rotation)

    def placed(
        self, q_BHTE: Tensor, k_BHTE: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys normalised, turned by position, and scaled."""
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTE, k_BHTE = self.q_norm(q_BHTE), self.k_norm(k_BHTE)
        if rotation is not None:
            of_q, of_k = self.kernels(rotation)
            if of_q is not None and of_k is not None:
                q_BHTE, k_BHTE = q_BHTE + of_q.to(q_BHTE.dtype), k_BHTE + of_k.to(k_BHTE.dtype)
            if self.rope:
                q_BHTE, k_BHTE = rotate(q_BHTE, rotation), rotate(k_BHTE, rotation)
        if self.temperature is not None:
            q_BHTE = q_BHTE * self.temperature[:, None, None]
        return q_BHTE, k_BHTE

    def kernels(self, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What is added to queries and keys, each [H, T, E], or [H, 1, E] where RoPE will turn it.

        The product of these two, turned, depends on the distance alone.
        """
        if self.kernel_q is None or self.kernel_k is None:
            return None, None
        of_q, of_k = (v.view(self.n_heads, 1, -1) for v in (self.kernel_q, self.kernel_k))
        return (of_q, of_k) if self.rope else (rotate(of_q, rotation), rotate(of_k, rotation))

    def heads(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] → [B, H, T, E]."""
        B, T, _ = x_BTD.shape
        return x_BTD.view(B, T, self.n_heads, -1).transpose(1, 2)

    def logit_bias(self, T: int, start: int, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """What is added to the logits: nothing where `is_causal` says it all."""
        plain = self.relative_bias is None
        if plain and mask is None and (start == 0 or T == 1 or not self.causal):
            return None
        keys = torch.arange(start + T, device=like.device)
        distance = keys[start:, None] - keys
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        if self.relative_bias is None:
            return allowed
        offset = 0 if self.causal else self.relative_bias.shape[1] // 2
        bias = self.relative_bias[:, (distance + offset).clamp(min=0)].to(like.dtype)
        return bias.masked_fill(~allowed, float("-inf"))


def rotation_table(seq_len: int, d_head: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, each [seq_len, d_head]; the two halves of a head form the pairs."""
    frequency = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x_BHTE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels by an angle that grows with the position."""
    y: Tensor = _Rotation.apply(x_BHTE, *rotation)  # type: ignore[no-untyped-call]
    return y


class _Rotation(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing of x need be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    y = x * cos
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y.to(x.dtype)
