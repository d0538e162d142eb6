"""`oelm generate`: stream text from a trained run."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from oelm.cli.options import parse
from oelm.errors import UserError

if TYPE_CHECKING:
    from oelm.data.tokenizers import Tokenizer


def generate(argv: Sequence[str]) -> int:
    """Entry point of `oelm generate`."""
    return parse(_generate, argv, prog="oelm generate")


def _generate(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    *,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int = 0,
) -> int:
    """Stream text from a run's best checkpoint, with a key/value cache.

    Args:
        run: The run's folder.
        prompt: The text to continue; without one, a new text is begun.
        max_new_tokens: How long to go on, unless the text ends earlier.
        temperature: 0 always takes the likeliest token; 1 follows the model's probabilities.
        top_k: Choose among this many of the likeliest tokens only; None for all.
        top_p: Choose among the likeliest tokens that together have this probability.
        seed: Of the choices.
    """
    for name, value, right in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1),
        ("temperature", temperature, temperature >= 0),
        ("top_k", top_k, top_k is None or top_k >= 1),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1),
    ):
        if not right:
            raise UserError(f"{name} cannot be {value}; see `oelm generate --help`")

    import torch

    from oelm.train.saved import SavedRun

    saved = SavedRun(run)
    if saved.config.get("task", "language") != "language":
        raise UserError(f"{run} was trained to classify; it writes no text")
    model = saved.language_model()
    model.load_state_dict(saved.weights())
    tokenizer = saved.dataset().tokenizer()
    ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eot]])
    steps = model.eval().generate(
        ids,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator().manual_seed(seed),
    )
    print(prompt, end="", flush=True)
    for text in pieces((int(step) for step in steps), tokenizer):
        print(text, end="", flush=True)
    print()
    return 0


def pieces(ids: Iterable[int], tokenizer: "Tokenizer") -> Iterator[str]:
    """The text of a stream of ids up to its end, in pieces that never cut a character in two."""
    seen: list[int] = []
    shown = 0
    for token in ids:
        if token == tokenizer.eot:
            break
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    if rest := tokenizer.decode(seen)[shown:]:
        yield rest
