"""Options of a command from a function's signature or a dataclass, by tyro, with plain errors."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from oelm.errors import UserError, unknown

T = TypeVar("T")
PLAIN = {  # what int() and float() say, and what a user would
    r"invalid literal for int\(\) with base 10: (.+)": r"\1 is not a whole number",
    r"could not convert string to float: (.+)": r"\1 is not a number",
}
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

    @functools.wraps(target)
    def bind(*values: Any, **named: Any) -> Callable[[], T]:
        return functools.partial(target, *values, **named)

    call: Any = bind
    bound: Callable[[], T]
    errors = io.StringIO()
    try:
        # Only tyro's own words are caught: the command itself runs after this, with its stderr.
        with contextlib.redirect_stderr(errors), _registry:
            if default is not None:
                chosen: T = tyro.cli(target, args=args, prog=prog, default=default)  # type: ignore[call-overload]
                return chosen
            bound = tyro.cli(call, args=args, prog=prog)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(f"{_plain(errors.getvalue())}; see `{prog} --help`") from None
    return bound()


_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _optional(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """`FLOAT` in the help where the code says `float | None`; `none` gives None back."""
    kinds = set(typing.get_args(info.type)) - {type(None)}
    if type(None) not in typing.get_args(info.type) or len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind not in (int, float, str, Path, bool):
        return None
    truth = {"true": True, "false": False}

    def read(args: list[str]) -> Any:
        if args[0].lower() == "none":
            return None
        if kind is not bool:
            return kind(args[0])
        if args[0].lower() not in truth:
            raise ValueError(f"must be true or false, not '{args[0]}'")
        return truth[args[0].lower()]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="true|false" if kind is bool else kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


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
    """The first paragraph of tyro's message, as one line; in ASCII its box is made of rulers alone."""
    rows = [re.sub(r"^[│╭╰─\s]+|[│╮╯─\s]+$", "", line) for line in box.splitlines()[1:]]
    paragraph: list[str] = []
    for row in rows:
        ruler = not row.strip("-")
        if ruler and paragraph:
            break
        if not ruler:
            paragraph.append(row)
    text = " ".join(paragraph).rstrip(".").removeprefix("Error parsing ")
    for python, plain in PLAIN.items():
        text = re.sub(python, plain, text)
    return text
