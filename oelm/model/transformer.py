"""The trunk that the decoder and the encoder share: embeddings, blocks, final norm."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from oelm.errors import UserError
from oelm.kernels import block as in_one
from oelm.kernels.block import SMALL
from oelm.kernels.functions import embed, gelu
from oelm.methods import Method
from oelm.model.attention import Attention, Cache, rotation_table
from oelm.model.config import ModelConfig
from oelm.model.projection import Projection
from oelm.projections import normal, stream


class MLP(nn.Module):
    """Two projections with GELU between them, or SwiGLU, whose gate is treated as `up` is."""

    def __init__(self, config: ModelConfig, method: Method, layer: int) -> None:
        super().__init__()
        place = {"layer": layer, "n_layers": config.n_layers}
        d, d_ff, bias = config.d_model, config.d_ff, config.mlp_bias
        self.activation = config.activation
        self.recompute = True
        self.up = Projection(d, d_ff, method.up, bias=bias, **place)
        gated = config.activation == "swiglu"
        self.gate = Projection(d, d_ff, method.up, bias=bias, **place) if gated else None
        self.down = Projection(d_ff, d, method.down, bias=bias, **place)

    def forward(self, x: Tensor) -> Tensor:
        """[…, d_model] → […, d_model]."""
        wide = self.up(x)
        if self.gate is not None:
            y: Tensor = self.down(F.silu(self.gate(x)) * wide)
            return y
        active = self.activate(wide)
        # Backward needs `wide` anyhow: the widest tensor of a block is held once, not twice.
        with holding(active, again=lambda: self.activate(wide), hold=not self.recompute):
            y = self.down(active)
        return y

    def activate(self, x: Tensor) -> Tensor:
        """GELU, exact or by tanh."""
        return gelu(x, by_tanh=self.activation == "gelu_tanh")


def holding(
    value: Tensor, *, again: Callable[[], Tensor], hold: bool
) -> AbstractContextManager[Any]:
    """A context whose operations hold `value` for backward or, if it is large, call `again` there."""
    if torch.compiler.is_compiling():  # which decides by itself
        return nullcontext()
    if hold or value.nbytes <= SMALL or not torch.is_grad_enabled():
        return nullcontext()
    place, size = value.data_ptr(), value.numel()  # the hook outlives this call, `value` must not

    def pack(saved: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
        ours = saved.data_ptr() == place and saved.numel() == size
        return (saved.shape, saved.stride()) if ours else saved  # a view of it, perhaps transposed

    def unpack(kept: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
        return kept if isinstance(kept, Tensor) else again().as_strided(*kept)

    return saved_tensors_hooks(pack, unpack)


class Block(nn.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config: ModelConfig, method: Method, layer: int, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, method, layer, causal=causal)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config, method, layer)
        self.dropout = config.dropout
        self.shape = in_one.Shape(
            n_heads=config.n_heads,
            d_ff=config.d_ff,
            eps=NORM_EPS[config.norm],
            rms=config.norm == "rmsnorm",
            causal=causal,
            by_tanh=config.activation == "gelu_tanh",
            ahead=tuple(p.ahead for p in (self.attention.q, self.attention.k, self.attention.v)),
        )
        self.simple = self._is_simple()

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        start: int = 0,
        at_B: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D] → [B, T, D]; or, with `at_B`, the result at one position of each row [B, 1, D]."""
        if mask is None and cache is None and at_B is None and self.in_one_call(x):
            return in_one.blocks(
                x, [self.part(x.shape[1], rotation)], rotation if self.attention.rope else None
            )
        x = x + self._drop(self.attention(self.attention_norm(x), rotation, mask, cache, start))
        if at_B is not None:
            x = x[torch.arange(len(x), device=x.device), at_B][:, None]
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _is_simple(self) -> bool:
        """Whether it has only what the kernel of a whole block computes."""
        a, mlp = self.attention, self.mlp
        plain = (a.o, mlp.up, mlp.down)
        return (
            mlp.gate is None
            and all(p.simple for p in (a.q, a.k, a.v, *plain))
            and all(p.weight is not None and p.low_rank_in is None for p in plain)
            and all(part is None for part in (a.q_norm, a.temperature, a.relative_bias))
        )

    def in_one_call(self, x: Tensor) -> bool:
        """Whether x can go through by the kernel of whole blocks."""
        return (
            self.simple
            and not (self.training and self.dropout)
            and in_one.applies(x, self.mlp.up.weight, self.shape)
            and unobserved(self)
        )

    def part(self, T: int, rotation: tuple[Tensor, Tensor] | None) -> in_one.Part:
        """What that kernel takes."""
        a, weights = self.attention, dict(self._tensors())
        if rotation is not None:
            for name, of_heads in zip(("q_shift", "k_shift"), a.kernels(rotation), strict=True):
                if of_heads is not None:  # [H, T or 1, E] → [T, D]
                    turned = of_heads.expand(-1, T, -1).transpose(0, 1)
                    weights[f"{name}.value"] = turned.flatten(1)
        return in_one.Part(self.shape, weights)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a simple block is computed with, by the kernel's names. Called often: hence no `getattr`."""
        a, mlp = self.attention, self.mlp
        parts = {"attention_norm": self.attention_norm, "mlp_norm": self.mlp_norm}
        parts |= {"q": a.q, "k": a.k, "v": a.v, "o": a.o, "up": mlp.up, "down": mlp.down}
        for part, module in parts.items():
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is not None and name in KERNEL_NAMES:
                        yield f"{part}.{KERNEL_NAMES[name]}", tensor

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


KERNEL_NAMES = {
    "weight": "w",
    "bias": "bias",
    "order": "order",
    "low_rank_in": "a",
    "low_rank_out": "b",
}

KNOWN_PARTS = {Block, Attention, MLP, Projection, nn.LayerNorm, nn.RMSNorm, nn.Embedding}


def unobserved(part: nn.Module) -> bool:
    """Whether nobody changed it or anything in it, or listens to that."""
    if type(part) not in KNOWN_PARTS or part._forward_hooks or part._forward_pre_hooks:
        return False
    if part._backward_hooks or part._backward_pre_hooks:
        return False
    return all(unobserved(m) for m in part._modules.values() if m is not None)


NORM_EPS = {"layernorm": 1e-5, "rmsnorm": 1e-6}


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm that the config names."""
    make = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return make(config.d_model, eps=NORM_EPS[config.norm])


def norm_tensors(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Its weight and, if it has one, its bias."""
    return norm.weight, getattr(norm, "bias", None)  # type: ignore[return-value]


class Transformer(nn.Module):
    """Tokens → hidden states, with every projection treated as the method says."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, method: Method, *, causal: bool) -> None:
        super().__init__()
        method.check(config.n_layers, config.n_heads)
        self.config, self.method = config, method
        self.activation_checkpointing = False
        # How to take the blocks by halves of a batch side by side, where a trainer wants that.
        self.lanes: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None
        self.token_embedding = _embedding(config.vocab_size, config.d_model)
        learned = config.positions == "learned"
        self.position_embedding = _embedding(config.seq_len, config.d_model) if learned else None
        self.blocks = nn.ModuleList(
            Block(config, method, layer, causal=causal) for layer in range(config.n_layers)
        )
        self.final_norm = make_norm(config)
        self.turns = config.positions == "rope" or method.kernel
        if self.turns:
            if config.d_head % 2:
                raise UserError(
                    f"a kernel needs an even head width, not {config.d_head}; change n_heads"
                )
            cos, sin = rotation_table(config.seq_len, config.d_head, config.rope_theta)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    @property
    def simple(self) -> bool:
        """Whether every block has only what the kernel of a whole block computes."""
        return all(block.simple for block in self.blocks)  # type: ignore[union-attr]

    def checkpoint_activations(self, on: bool) -> None:
        """Whether training holds the blocks' inputs alone and computes the rest again in backward."""
        self.activation_checkpointing = on
        for module in self.modules():
            if isinstance(module, MLP):
                module.recompute = not on  # once is enough

    def init_weights(self, seed: int, frozen_seed: int) -> None:
        """Give every tensor its first value, from a stream keyed by (seed, name).

        | tensor | value |
        |---|---|
        | token and position embedding, untied head | normal, std 0.02 |
        | Q, K, V, MLP up (and gate) | as treated; `normal` has std 0.02 |
        | O, MLP down | as treated; `normal` has std 0.02 / √(2 · n_layers): depth adds no variance |
        | low-rank A, B | normal with std 1/√d, 0 |
        | norm weights, gains, temperatures | 1 |
        | biases, kernels, relative-position bias | 0 |
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layers)
        for name, module in self.named_modules():
            if isinstance(module, Projection):
                std = residual_std if name.endswith((".o", ".down")) else 0.02
                module.init_weights(f"{name}.weight", seed, frozen_seed, std)
            elif isinstance(module, nn.Embedding | nn.Linear):
                fill_normal(module.weight, seed, f"{name}.weight")
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def hidden(
        self,
        tokens_BT: Tensor,
        mask: Tensor | None = None,
        cache: Sequence[Cache] | None = None,
        start: int = 0,
        at_B: Tensor | None = None,
    ) -> Tensor:
        """The normalised hidden states [B, T, D] that a head reads.

        With `at_B`, those of one position of each row [B, 1, D]: the last MLP then computes no others.
        """
        T = tokens_BT.shape[1]
        if start + T > self.config.seq_len:
            raise UserError(
                f"a sequence of {start + T} tokens is longer than the model's seq_len {self.config.seq_len}"
            )
        x = F.dropout(self._embedded(tokens_BT, start), self.config.dropout, self.training)
        rotation = None
        if self.turns:
            rotation = self.cos[start : start + T], self.sin[start : start + T]

        alone = mask is None and cache is None and at_B is None  # else these had to be halved too
        together = alone and self._together(x)

        def trunk(x: Tensor, lanes: int = 1) -> Tensor:
            if together:
                parts = [block.part(T, rotation) for block in self.blocks]  # type: ignore[operator]
                rope = self.config.positions == "rope"
                for name, tensor in zip(("w", "bias"), norm_tensors(self.final_norm), strict=True):
                    if tensor is not None:
                        parts[-1].weights[f"final_norm.{name}"] = tensor
                return in_one.blocks(x, parts, rotation if rope else None, lanes)
            for i, block in enumerate(self.blocks):
                at = at_B if i == len(self.blocks) - 1 else None
                if self.activation_checkpointing and self.training:
                    x = checkpoint(block, x, rotation, mask, None, 0, at, use_reentrant=False)
                else:
                    x = block(x, rotation, mask, cache[i] if cache else None, start, at)
            h: Tensor = self.final_norm(x)
            return h

        if self.lanes is None or not alone:
            return trunk(x)
        if together and torch.get_num_threads() == 2 and len(x) % 2 == 0:
            return trunk(x, lanes=2)  # each lane needs one thread only, so the kernel can have both
        return self.lanes(trunk, x)

    def _embedded(self, tokens_BT: Tensor, start: int) -> Tensor:
        positions = None if self.position_embedding is None else self.position_embedding.weight
        if unobserved(self.token_embedding):
            return embed(tokens_BT, self.token_embedding.weight, positions, start)
        x: Tensor = self.token_embedding(tokens_BT)
        return x if positions is None else x + positions[start : start + x.shape[1]]

    def _together(self, x: Tensor) -> bool:
        """Whether x can go through all blocks and the norm in one call, and they are small enough.

        Without gradients they go one by one, since then each lets go of its memory at once.
        """
        c, rows = self.config, x.numel() // x.shape[-1]
        weights = 4 * c.d_model**2 + 2 * c.d_model * c.d_ff
        held = 4 * c.n_layers * (rows * c.d_ff + 2 * weights)
        if held > in_one.FEW or not torch.is_grad_enabled() or self.activation_checkpointing:
            return False
        return unobserved(self.final_norm) and all(
            isinstance(block, Block) and block.in_one_call(x) for block in self.blocks
        )


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding left empty: `init_weights` fills it, and filling it twice would be waste."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def fill_normal(weight: Tensor, seed: int, name: str, std: float = 0.02) -> None:
    """Fill with the normal draw that belongs to `name`."""
    value = normal((weight.shape[0], weight.shape[1]), 1, stream(seed, name), std)
    with torch.no_grad():
        weight.copy_(torch.from_numpy(value))
