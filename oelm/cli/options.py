"""Options of a command from a function's signature or a dataclass, by tyro, with plain errors."""

import contextlib
import dataclasses
import inspect
import io
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

from oelm.errors import UserError, unknown

T = TypeVar("T")
SYNONYMS = {"--model-type": "--method"}


def parse(
    target: Callable[..., T], argv: Sequence[str], *, prog: str, default: T | None = None
) -> T:
    """Call `target` with the options in `argv`; whatever tyro would put in a box becomes one line."""
    args = [_normal(a) for a in argv]
    known = _options(target)
    for arg in args:
        option = arg.partition("=")[0]
        if option.startswith("--") and option not in known:
            raise unknown(f"option of {prog}", option, known)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            if default is not None:
                return tyro.cli(target, args=args, prog=prog, default=default)  # type: ignore[call-overload, no-any-return]
            return tyro.cli(target, args=args, prog=prog)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
    raise UserError(f"{_plain(errors.getvalue())}; see `{prog} --help`")


def _normal(arg: str) -> str:
    """`--max_lr` and `--max-lr` are one option, and so are its synonyms."""
    if not arg.startswith("--"):
        return arg
    option, equals, value = arg.partition("=")
    option = option.replace("_", "-")
    return SYNONYMS.get(option, option) + equals + value


def _options(target: Callable[..., object]) -> list[str]:
    """The long options that `target` takes."""
    if dataclasses.is_dataclass(target):
        names = {f.name: f.type is bool or f.type == "bool" for f in dataclasses.fields(target)}
    else:
        parameters = inspect.signature(target).parameters.values()
        names = {p.name: isinstance(p.default, bool) for p in parameters}
    options = ["--help"]
    for name, flag in names.items():
        option = name.replace("_", "-")
        options += [f"--{option}", f"--no-{option}"] if flag else [f"--{option}"]
    return options


def _plain(box: str) -> str:
    """The first paragraph of tyro's boxed message, as one line."""
    rows = [re.sub(r"^[│╭╰─\s]+|[│╮╯─\s]+$", "", line) for line in box.splitlines()[1:]]
    paragraph: list[str] = []
    for row in rows:
        if not row:
            break
        paragraph.append(row)
    return " ".join(paragraph).rstrip(".").removeprefix("Error parsing ")
