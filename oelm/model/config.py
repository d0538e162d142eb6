"""The shape of a model. Pure data; imports no torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oelm.config import from_mapping, split_spec
from oelm.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer's shape and options; every preset is one of these, every field can be set."""

    n_layers: int = 6
    d_model: int = 512
    n_heads: int = 8
    d_ff: int = 2048
    """Width of the MLP."""
    seq_len: int = 512
    """The longest sequence: rows of the position table, or of the relative bias."""
    vocab_size: int = 50257
    positions: Literal["learned", "rope", "relative"] = "learned"
    """learned table · rotary · a learned bias per head and distance."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    qk_norm: bool = False
    """Normalise each head's q and k (RMS, with a learned gain)."""
    tie_embeddings: bool = True
    """Whether the head shares the token embedding's matrix."""
    attention_bias: bool = False
    """Biases in Q, K, V and O, as GPT-2 has them."""
    mlp_bias: bool = True
    dropout: float = 0.0
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("n_layers", "d_model", "n_heads", "d_ff", "seq_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.d_model % self.n_heads:
            raise UserError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")
        if self.positions == "rope" and self.d_head % 2:
            raise UserError(f"RoPE needs an even head width, not {self.d_head}; change n_heads")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, not {self.dropout}")

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    @staticmethod
    def preset(name: str, **overrides: Any) -> "ModelConfig":
        """One of `PRESETS` with some fields changed."""
        if name not in PRESETS:
            raise unknown("model preset", name, PRESETS)
        data = {**dataclasses.asdict(PRESETS[name]), **overrides}
        return from_mapping(ModelConfig, data, what="model")

    @staticmethod
    def from_spec(spec: "str | Mapping[str, Any] | ModelConfig", **overrides: Any) -> "ModelConfig":
        """From `nano`, `nano,positions=rope`, or `{preset: nano, positions: rope}`."""
        if isinstance(spec, ModelConfig):
            return dataclasses.replace(spec, **overrides)
        if isinstance(spec, str):
            name, given = split_spec(spec)
        else:
            given = dict(spec)
            name = given.pop("preset", "medium-512")
        return ModelConfig.preset(name, **{**given, **overrides})


PRESETS: dict[str, ModelConfig] = {
    "nano": ModelConfig(n_layers=4, d_model=128, n_heads=4, d_ff=512, seq_len=128, vocab_size=2048),
    "mini": ModelConfig(
        n_layers=6, d_model=256, n_heads=8, d_ff=1024, seq_len=256, vocab_size=8192
    ),
    "medium-512": ModelConfig(),
    "gpt2-124m": ModelConfig(
        n_layers=12,
        d_model=768,
        n_heads=12,
        d_ff=3072,
        seq_len=1024,
        activation="gelu_tanh",
        attention_bias=True,
    ),
}
