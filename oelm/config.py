"""Strict configuration: dataclasses from mappings and from short text, with no key left unread.

A *spec* is a name and the fields that differ from it, as text (`nano,positions=rope,n_layers=2`)
or, in YAML, as a mapping (`{preset: nano, positions: rope, n_layers: 2}`).
"""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from oelm.errors import UserError, unknown

T = TypeVar("T")


def split_spec(text: str) -> tuple[str, dict[str, Any]]:
    """`name,a=1,b.c=x` → `("name", {"a": 1, "b": {"c": "x"}})`; values are read as YAML."""
    # A comma inside [brackets] separates items of a list.
    name, *pairs = re.split(r",(?![^\[]*\])", text)
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"cannot read '{pair}' in '{text}'; write name,field=value,field=value")
        *path, last = key.strip().split(".")
        inner = overrides
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UserError(f"'{text}' gives {part} a value and fields; drop one of them")
        try:
            inner[last] = parse_value(value.strip())
        except yaml.YAMLError:
            raise UserError(f"cannot read '{value.strip()}' in '{text}'") from None
    return name.strip(), overrides


def parse_value(text: str) -> Any:
    """A scalar as YAML reads it, except that `1e-3` is a number, as everybody means it."""
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def from_mapping(cls: type[T], data: Mapping[str, Any], *, what: str) -> T:
    """Build the dataclass `cls`; an unknown key or a value of the wrong type is refused."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    values = {}
    for key, value in data.items():
        if key not in known:
            raise unknown(f"field of {what}", key, known)
        values[key] = coerce(value, hints[key], f"{what}: {key}")
    try:
        return cls(**values)
    except TypeError as error:  # a required field is missing
        raise UserError(f"{what}: {error}".replace("__init__() ", "")) from None


def coerce(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint` says, converting only what loses nothing (int → float, list → tuple)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return coerce(value, args[0], where)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        problems = []
        for option in args:
            try:
                return coerce(value, option, where)
            except UserError as error:
                problems.append(str(error))
        raise UserError(problems[0])
    if origin is typing.Literal:
        if value in args:
            return value
        raise unknown(f"value for {where}", str(value), [str(a) for a in args])
    if hint is type(None):
        if value is None:
            return None
    elif origin is tuple:
        if isinstance(value, list | tuple):
            inner = args if len(args) == len(value) and ... not in args else [args[0]] * len(value)
            return tuple(coerce(v, h, where) for v, h in zip(value, inner, strict=True))
    elif origin is list:
        if isinstance(value, list | tuple):
            return [coerce(v, args[0], where) for v in value]
    elif origin is dict or hint is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return from_mapping(hint, value, what=where)
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is Path:
        if isinstance(value, str | Path):
            return Path(value)
    elif isinstance(value, hint):
        return value
    expected = getattr(hint, "__name__", str(hint))
    raise UserError(f"{where} must be {expected}, not {value!r}")


def to_mapping(config: Any) -> dict[str, Any]:
    """The dataclass as plain values that YAML and JSON can hold."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return str(value) if isinstance(value, Path) else value


class _Strict(yaml.SafeLoader):
    """YAML in which a key given twice is an error, where `safe_load` would drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"'{key.value}' is given twice, again in line {line}")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Strict)
    except FileNotFoundError:
        raise UserError(f"no file at {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = str(error).replace("\n", " ")
        raise UserError(f"{path} is not readable as YAML: {place}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a mapping of names to values at its top level")
    return data
