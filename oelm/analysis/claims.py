"""Claims: what a study says will come out, written before its runs. No torch."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oelm.analysis.metrics import Metric, metric
from oelm.config import from_mapping
from oelm.errors import UserError, unknown

Kind = Literal["at_most", "at_least", "equivalent_within", "less", "greater", "min", "max"]
AGAINST_AN_ARM: tuple[Kind, ...] = ("at_most", "at_least", "equivalent_within", "less", "greater")
ABSOLUTE: tuple[Kind, ...] = ("min", "max")


@dataclass(frozen=True)
class Margin:
    """A difference from another arm: a share of it (`+5%`), or points (`+1pt`)."""

    value: float
    """0.05 for 5 %; 1.0 for one point."""
    relative: bool

    @staticmethod
    def parse(text: Any, where: str) -> "Margin":
        """From `+5%`, `-2 %` or `1pt`."""
        found = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*(%|pt)\s*", str(text))
        if not found:
            raise UserError(f"{where}: cannot read the margin {text!r}; write '+5%' or '+1pt'")
        number, relative = float(found[1]), found[2] == "%"
        if relative and number <= -100:
            raise UserError(f"{where}: a margin of {text} leaves nothing; write one above -100%")
        return Margin(number / 100 if relative else number, relative)

    def __str__(self) -> str:
        return f"{self.value * 100:+g}%" if self.relative else f"{self.value:+g}pt"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A metric of one arm, held against another arm or a number; exactly one kind is given."""

    metric: str
    arm: str
    vs: str | None = None
    text: str = ""
    """The claim in words, for the reader; made from the fields if not given."""
    at_most: str | float | None = None
    """Not more than this above `vs`: `+5%`, or `+1pt` for points."""
    at_least: str | float | None = None
    """Not less than this relative to `vs`: `-1pt` for accuracy."""
    equivalent_within: str | float | None = None
    """Within this of `vs`, on both sides."""
    less: bool = False
    """Below `vs`."""
    greater: bool = False
    """Above `vs`."""
    min: float | None = None
    """At least this number; no `vs`."""
    max: float | None = None
    """At most this number; no `vs`."""
    name: str = ""

    def __post_init__(self) -> None:
        metric(self.metric)
        kinds = [k for k in (*AGAINST_AN_ARM, *ABSOLUTE) if getattr(self, k) not in (None, False)]
        if len(kinds) != 1:
            given = f"gives {' and '.join(kinds)}" if kinds else "gives none"
            every = ", ".join((*AGAINST_AN_ARM, *ABSOLUTE))
            raise UserError(f"{self._where}: {given}; write exactly one of {every}")
        if self.kind in ABSOLUTE:
            if self.vs is not None:
                raise UserError(f"{self._where}: `{self.kind}` is a number by itself; drop `vs`")
            if not math.isfinite(self.bound):
                raise UserError(f"{self._where}: `{self.kind}` must be a finite number")
            return
        if self.vs is None:
            raise UserError(f"{self._where}: `{self.kind}` needs `vs`, the arm to compare with")
        if self.vs == self.arm:
            raise UserError(f"{self._where}: compares arm '{self.arm}' with itself")
        margin = self.margin  # reading it refuses what is not a margin
        if self.kind == "equivalent_within":
            if not margin.value > 0:
                raise UserError(f"{self._where}: equivalent_within needs a margin above 0")
            if margin.relative and margin.value >= 1:
                raise UserError(f"{self._where}: equivalent_within must stay below 100%")

    @property
    def _where(self) -> str:
        return f"claim '{self.name}'" if self.name else "claim"

    @property
    def kind(self) -> Kind:
        """Which of the kinds is given."""
        options = (*AGAINST_AN_ARM, *ABSOLUTE)
        return next(k for k in options if getattr(self, k) not in (None, False))

    @property
    def margin(self) -> Margin:
        """The difference that is allowed; none at all for `less` and `greater`."""
        if self.kind in ("less", "greater"):
            return Margin(0.0, relative=True)
        return Margin.parse(getattr(self, self.kind), self._where)

    @property
    def has_margin(self) -> bool:
        """Whether a difference from `vs` is allowed or asked for."""
        return self.kind in ("at_most", "at_least", "equivalent_within")

    @property
    def bound(self) -> float:
        """The number of a `min` or `max` claim."""
        return float(getattr(self, self.kind))

    @property
    def measured(self) -> Metric:
        """The metric it is about."""
        return metric(self.metric)

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms it names."""
        return (self.arm,) if self.vs is None else (self.arm, self.vs)


def parse_claims(data: Mapping[str, Any] | None, arms: Iterable[str]) -> tuple[Claim, ...]:
    """A study's `claims:` mapping, each checked; one that names no arm of the study is refused."""
    known, claims = list(arms), []
    if data is not None and not isinstance(data, Mapping):
        raise UserError("claims must be a mapping of names to claims")
    for name, fields in (data or {}).items():
        if not isinstance(fields, Mapping):
            raise UserError(f"claim '{name}' must be a mapping with metric, arm and a margin")
        if "name" in fields:
            raise UserError(f"claim '{name}': its name is the key; drop `name`")
        claim = from_mapping(Claim, {**fields, "name": str(name)}, what=f"claim '{name}'")
        for arm in claim.arms:
            if arm not in known:
                raise unknown(f"arm in claim '{name}'", arm, known)
        claims.append(claim)
    return tuple(claims)
