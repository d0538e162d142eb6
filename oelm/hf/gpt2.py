"""A Hugging Face GPT-2 checkpoint as our GPT, for any method."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from oelm.errors import UserError
from oelm.methods import TRAINED, Method, method
from oelm.model.config import ModelConfig
from oelm.model.gpt import GPT
from oelm.model.projection import Projection

# Ours ← theirs, within a block; Q, K and V are one matrix there.
NAMES = {
    "attention_norm": "ln_1",
    "attention.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def import_gpt2(
    source: str | Path | GPT2LMHeadModel,
    spec: str | Mapping[str, Any] | Method = "baseline",
    *,
    seed: int = 0,
    frozen_seed: int | None = None,
) -> GPT:
    """A GPT-2 (a model, a folder or a hub name) as `GPT`.

    What the method treats is made as it says, and drawn from the seeds; the rest, and what it says to
    `keep`, are GPT-2's values.
    """
    theirs = (
        source if isinstance(source, GPT2LMHeadModel) else GPT2LMHeadModel.from_pretrained(source)
    )
    chosen = method(spec)
    ours = GPT(shape_of(theirs.config), chosen, seed, frozen_seed)
    values = _translated(theirs.state_dict(), ours.config.n_layers)
    with torch.no_grad():
        for name, module in ours.named_modules():
            if isinstance(module, Projection):
                if module.treatment == TRAINED or module.treatment.init == "keep":
                    module.adopt(values[f"{name}.weight"], values[f"{name}.bias"])
                continue
            for tensor, parameter in module.named_parameters(recurse=False):
                if f"{name}.{tensor}" in values:  # a method may have added temperatures
                    parameter.copy_(values[f"{name}.{tensor}"])
    return ours


def shape_of(config: GPT2Config) -> ModelConfig:
    """The shape of a GPT-2 in our words; refuses the variants that compute something else."""
    if config.activation_function not in ("gelu_new", "gelu_pytorch_tanh", "gelu"):
        raise UserError(f"activation {config.activation_function!r} of this GPT-2 is not supported")
    for option, usual in {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "layer_norm_epsilon": 1e-5,
    }.items():
        if getattr(config, option) != usual:
            raise UserError(f"this GPT-2 has {option} {getattr(config, option)}, ours {usual}")
    return ModelConfig(
        n_layers=config.n_layer,
        d_model=config.n_embd,
        n_heads=config.n_head,
        d_ff=config.n_inner or 4 * config.n_embd,
        seq_len=config.n_positions,
        vocab_size=config.vocab_size,
        activation="gelu" if config.activation_function == "gelu" else "gelu_tanh",
        attention_bias=True,
        tie_embeddings=config.tie_word_embeddings,
    )


def _translated(theirs: Mapping[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """Their tensors under our names and in our layout; GPT-2 stores its matrices transposed."""
    found = {
        "token_embedding.weight": theirs["transformer.wte.weight"],
        "position_embedding.weight": theirs["transformer.wpe.weight"],
        "final_norm.weight": theirs["transformer.ln_f.weight"],
        "final_norm.bias": theirs["transformer.ln_f.bias"],
        "head.weight": theirs["lm_head.weight"],
    }
    for i in range(n_layers):
        for kind in ("weight", "bias"):
            fused = theirs[f"transformer.h.{i}.attn.c_attn.{kind}"]
            parts = dict(zip(("q", "k", "v"), fused.chunk(3, dim=-1), strict=True))
            named = {f"attention.{part}": value for part, value in parts.items()}
            named |= {
                our: theirs[f"transformer.h.{i}.{their}.{kind}"] for our, their in NAMES.items()
            }
            for name, value in named.items():
                found[f"blocks.{i}.{name}.{kind}"] = value.T if value.ndim == 2 else value
    return found
