"""Probes: what a language model can do, and how its heads look, beyond its loss.

Each takes a model and gives named numbers. They use fixed tokens and no gradient, touch no random
state, and are the same work for every arm, so that a run can record them at each evaluation.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oelm.model.attention import Attention
from oelm.model.gpt import GPT
from oelm.model.loss import linear_cross_entropy

SEQUENCES = 8


def induction(model: GPT) -> dict[str, float]:
    """In-context copying: random tokens, then the same again; how well is the second half predicted?

    `induction_accuracy` is the share of right guesses there, `induction_gain` by how many nats the
    loss falls from the first half to the second. A head that finds "what followed this token the
    last time" does both; no knowledge of language helps.
    """
    half = model.config.seq_len // 2
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(model.config.vocab_size, (SEQUENCES, half), generator=generator)
    tokens = torch.cat([first, first], dim=1).to(model.head_weight.device)
    h = model.hidden(tokens[:, :-1])
    targets = tokens[:, 1:]
    new, again = slice(0, half - 1), slice(half, 2 * half - 1)
    losses = [
        linear_cross_entropy(
            h[:, at].flatten(0, 1), model.head_weight, targets[:, at].flatten()
        ).item()
        for at in (new, again)
    ]
    right = sum(
        int((row @ model.head_weight.T).argmax(-1).eq(target).sum())
        for row, target in zip(h[:, again], targets[:, again], strict=True)
    )
    return {
        "induction_accuracy": right / targets[:, again].numel(),
        "induction_gain": losses[0] - losses[1],
    }


def attention(model: GPT) -> dict[str, float]:
    """Per layer: how sharp attention is, and how large its logits are.

    `attention_entropy_<i>` is the entropy of the weights over the entropy of spreading them evenly
    (1: looks everywhere, 0: at one token); `logit_std_<i>` the spread of a query's logits.
    """
    length = model.config.seq_len
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (SEQUENCES, length), generator=generator)
    found: dict[str, float] = {}

    def look(layer: int) -> Callable[..., None]:
        def hook(module: Attention, args: tuple[Tensor, ...]) -> None:
            x, rotation, mask = args[0], args[1], args[2]
            assert mask is None
            q, k = module.queries_and_keys(x, rotation)  # type: ignore[arg-type]
            logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if module.relative_bias is not None:
                distance = torch.arange(length)[:, None] - torch.arange(length)
                logits = logits + module.relative_bias[:, distance.clamp(min=0)]
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            # A query with few keys says little about sharpness.
            rows = slice(length // 4, None)
            weights = logits.masked_fill(future, float("-inf")).softmax(-1)[:, :, rows]
            entropy = torch.special.entr(weights).sum(-1)
            even = torch.arange(1, length + 1, device=x.device, dtype=x.dtype)[rows].log()
            seen = (~future)[rows].to(x.dtype)
            kept = logits[:, :, rows] * seen
            mean = kept.sum(-1) / seen.sum(-1)
            spread = ((logits[:, :, rows] - mean[..., None]) * seen).square().sum(-1) / seen.sum(-1)
            found[f"attention_entropy_{layer}"] = float((entropy / even).mean())
            found[f"logit_std_{layer}"] = float(spread.sqrt().mean())

        return hook

    modules = [m for m in model.modules() if isinstance(m, Attention)]
    handles = [m.register_forward_pre_hook(look(i)) for i, m in enumerate(modules)]
    try:
        model.hidden(tokens.to(model.head_weight.device))
    finally:
        for handle in handles:
            handle.remove()
    return found


PROBES: dict[str, Callable[[GPT], dict[str, float]]] = {
    "induction": induction,
    "attention": attention,
}


@torch.no_grad()
def run(model: GPT, names: tuple[str, ...]) -> dict[str, float]:
    """The numbers of the named probes; the model is left as it was."""
    training = model.training
    model.eval()
    try:
        results: dict[str, float] = {}
        for name in names:
            results |= PROBES[name](model)
        return results
    finally:
        model.train(training)
