"""Where a Hugging Face model keeps its projections: found by name and shape, never guessed."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from oelm.errors import UserError

# The names of Q, K, V and, where it is their sibling, O; in the order in which they are tried.
SEPARATE = (
    ("query", "key", "value", ""),  # BERT, RoBERTa and kin
    ("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # Llama, Mistral, Qwen, ViT
    ("q_proj", "k_proj", "v_proj", "out_proj"),  # OPT
    ("q", "k", "v", "o"),  # T5
)
Fusion = Literal["blocks", "interleaved"]
# Which rows are Q differs from model to model under the same name, so the class decides:
# `blocks` has all of Q, then all of K, then all of V; `interleaved` has q, k, v head by head.
FUSED: dict[tuple[str, str], tuple[Fusion, str]] = {
    ("GPT2Attention", "c_attn"): ("blocks", "c_proj"),
    ("GPTNeoXAttention", "query_key_value"): ("interleaved", "dense"),
}
LOOKS_FUSED = re.compile(
    r"^(c_attn|query_key_value|qkv(_proj|_projection)?|w?qkv|w_pack|att_proj|kv_proj)$",
    re.I,
)
BERT_OUTPUT = re.compile(r"(^|\.)self$")
UP = re.compile(
    r"\.\d+\.(intermediate\.dense|ffn\.lin1|mlp\.c_fc|mlp\.dense_h_to_4h|(mlp\.)?fc1"
    r"|mlp\.(gate|up)_proj|layer\.\d+\.DenseReluDense\.wi(_[01])?)$"
)
DOWN = re.compile(
    r"\.\d+\.(output\.dense|ffn\.lin2|mlp\.c_proj|mlp\.dense_4h_to_h|(mlp\.)?fc2"
    r"|mlp\.down_proj|layer\.\d+\.DenseReluDense\.wo)$"
)


@dataclass(frozen=True)
class Site:
    """One projection, or three in one matrix, and where it stands."""

    name: str
    """The module's full name."""
    projections: tuple[str, ...]
    """`("q",)`, or `("q", "k", "v")` for a fused one."""
    stack: str
    """What precedes the layer's number: `encoder.block` and `decoder.block` count on their own."""
    layer: int
    head_width: int
    """Rows per head; 0 where rows do not belong to heads."""
    fusion: Fusion | None = None


def find(model: nn.Module) -> list[Site]:
    """Every projection of the model's attention and MLPs; raises if there is no attention we know."""
    sites: list[Site] = []
    for name, module in model.named_modules():
        sites += _attention(model, name, module)
    if not sites:
        raise UserError(
            f"{type(model).__name__} has no attention that is recognised: no module holds query and key "
            f"projections named as one of {', '.join('/'.join(names[:2]) for names in SEPARATE)}"
        )
    for name, module in model.named_modules():
        for pattern, projection in ((UP, "up"), (DOWN, "down")):
            if pattern.search(name) and isinstance(module, nn.Linear | Conv1D):
                sites.append(Site(name, (projection,), *_place(name), head_width=0))
    return sites


def depth(sites: list[Site]) -> dict[str, int]:
    """The number of layers of each stack."""
    layers: defaultdict[str, set[int]] = defaultdict(set)
    for site in sites:
        layers[site.stack].add(site.layer)
    return {stack: max(found) + 1 for stack, found in layers.items()}


def _attention(model: nn.Module, name: str, module: nn.Module) -> Iterator[Site]:
    children = {key: child for key, child in module.named_children() if _is_linear(child)}
    if isinstance(module, nn.MultiheadAttention):
        raise _unsupported(model, name, module, "in_proj_weight")
    for key, child in children.items():
        if LOOKS_FUSED.match(key):
            yield from _fused(model, name, module, key, child)
            return
    for *attention, out in SEPARATE:
        if not all(key in children for key in attention) or (out and out not in children):
            continue
        width = _head_width(name, module)
        for projection, key in zip("qkv", attention, strict=True):
            yield Site(f"{name}.{key}", (projection,), *_place(name), head_width=width)
        outer = f"{name}.{out}" if out else BERT_OUTPUT.sub(r"\1output.dense", name)
        if _is_linear(_get(model, outer)):
            yield Site(outer, ("o",), *_place(name), head_width=0)
        return


def _fused(
    model: nn.Module, name: str, module: nn.Module, key: str, child: nn.Module
) -> Iterator[Site]:
    known = FUSED.get((type(module).__name__, key))
    rows, inner = shape(child)
    if known is None or rows != 3 * inner or getattr(module, "is_cross_attention", False):
        raise _unsupported(model, name, module, key)
    fusion, out = known
    place, width = _place(name), _head_width(name, module)
    yield Site(f"{name}.{key}", ("q", "k", "v"), *place, head_width=width, fusion=fusion)
    yield Site(f"{name}.{out}", ("o",), *place, head_width=0)


def _unsupported(model: nn.Module, name: str, module: nn.Module, key: str) -> UserError:
    known = ", ".join(f"{owner}.{attribute}" for owner, attribute in FUSED)
    return UserError(
        f"{type(model).__name__}: {name}.{key} of {type(module).__name__} holds several projections in one "
        f"matrix, and which rows are which is not known, so nothing was converted; known are: {known}"
    )


def _head_width(name: str, module: nn.Module) -> int:
    for attribute in ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim"):
        if isinstance(width := getattr(module, attribute, None), int):
            return width
    raise UserError(f"cannot tell how wide the heads of {name} ({type(module).__name__}) are")


def _place(name: str) -> tuple[str, int]:
    found = re.match(r"(.*?)\.(\d+)(\.|$)", f".{name}")
    return (found[1].lstrip("."), int(found[2])) if found else (name, 0)


def _get(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def shape(linear: nn.Module) -> tuple[int, int]:
    """(out, in) of a Linear, or of GPT-2's Conv1D, which stores its matrix transposed."""
    assert isinstance(linear, nn.Linear | Conv1D)
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, Conv1D) else (rows, columns)
