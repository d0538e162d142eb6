"""Small models of every supported architecture with random weights, and what they are tried on."""

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers import logging as hf_logging

hf_logging.set_verbosity_error()
hf_logging.disable_progress_bar()

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
MLP = {**SMALL, "intermediate_size": 48, "pad_token_id": 0}
GROUPED = {**MLP, "num_key_value_heads": 2}
ORDINARY = {"bos_token_id": 1, "eos_token_id": 1}
# name: (config, model, its Q/K modules in layer 0, elements of Q and K with biases in one layer)
ARCHITECTURES = {
    "bert": ("Bert", "ForSequenceClassification", MLP, 2 * (32 * 32 + 32)),
    "roberta": ("Roberta", "ForSequenceClassification", {**MLP, "pad_token_id": 1}, 2 * (32 * 32 + 32)),
    "distilbert": (
        "DistilBert", "ForSequenceClassification",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60}, 2 * (32 * 32 + 32),
    ),
    "gpt2": (
        "GPT2", "LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, **ORDINARY}, 2 * (32 * 32 + 32),
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", {**MLP, **ORDINARY}, 2 * (32 * 32 + 32)),
    "opt": (
        "OPT", "ForCausalLM",
        {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, **ORDINARY}, 2 * (32 * 32 + 32),
    ),
    "llama": ("Llama", "ForCausalLM", GROUPED, 32 * 32 + 16 * 32),
    "mistral": ("Mistral", "ForCausalLM", GROUPED, 32 * 32 + 16 * 32),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED, 32 * 32 + 32 + 16 * 32 + 16),
    "vit": (
        "ViT", "ForImageClassification",
        {**{k: v for k, v in MLP.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 8},
        2 * (32 * 32 + 32),
    ),
    "t5": (
        "T5", "ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 60,
         "decoder_start_token_id": 0},
        6 * 32 * 32,  # self-attention of encoder and decoder, and cross-attention
    ),
}  # fmt: skip
NAMES = sorted(ARCHITECTURES)


def build(name: str, **changes: object) -> PreTrainedModel:
    prefix, suffix, fields, _ = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**fields, **changes})
    return getattr(transformers, prefix + suffix)(config).eval()


def batch(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {
            "pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
            "labels": torch.tensor([0, 1, 0, 1]),
        }
    tokens = torch.randint(2, 60, (4, 10), generator=generator)
    if "Classification" in ARCHITECTURES[name][1]:
        return {"input_ids": tokens, "labels": torch.tensor([0, 1, 0, 1])}
    return {"input_ids": tokens, "labels": tokens}


def logits(model: nn.Module, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(name)).logits


def train(model: nn.Module, name: str, steps: int = 20) -> torch.optim.Optimizer:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        model(**batch(name)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return optimizer
