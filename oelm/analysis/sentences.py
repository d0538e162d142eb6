"""Numbers, claims and verdicts in words."""

import math
from typing import Any

from oelm.analysis import numbers
from oelm.analysis.claims import Claim
from oelm.analysis.metrics import Metric
from oelm.analysis.statistics import MOST_SEEDS, Estimate
from oelm.analysis.verdicts import Verdict
from oelm.analysis.words import Words


def metric_name(words: Words, name: str) -> str:
    """A metric in words."""
    kind, colon, argument = name.partition(":")
    if not colon:
        return words(f"metric_{name}")
    return words(f"metric_{kind}", **{"probe": {"name": argument}}.get(kind, {"target": argument}))


def statement(words: Words, claim: Claim) -> str:
    """The claim spelled out from its fields."""
    said: dict[str, Any] = {
        "metric": metric_name(words, claim.metric),
        "arm": claim.arm,
        "vs": claim.vs,
    }
    if claim.vs is None:
        said["bound"] = numbers.shown(claim.measured, claim.bound)
    elif claim.kind not in ("less", "greater"):
        size = claim.margin.value
        unit = f"{abs(size) * 100:g}\u202f%" if claim.margin.relative else f"{abs(size):g}\u202fpt"
        sign = numbers.MINUS if size < 0 else "+" if claim.kind == "at_least" else ""
        said["margin"] = sign + unit
    text = words(f"claim_{claim.kind}", **{k: v for k, v in said.items() if v is not None})
    return text[:1].upper() + text[1:] if words.language == "en" else text


def spread(words: Words, seen: Estimate, measure: Metric, *, log: bool) -> str:
    """An estimate's interval in words."""
    interval = seen.interval()
    if interval is None:
        return words("interval_none")
    low, high = (numbers.difference(measure, v, log=log) for v in interval)
    return words("interval_95", low=low, high=high, n=seen.n)


def estimate_of(verdict: Verdict) -> tuple[str, str]:
    """A verdict's estimate and 95 % interval as text."""
    seen, measure = verdict.result, verdict.claim.measured
    if seen is None:
        return "–", "–"
    if verdict.claim.vs is not None:
        said = [numbers.difference(measure, v, log=verdict.log) for v in _three(seen)]
    else:
        back = math.exp if verdict.log else float
        said = [numbers.shown(measure, None if v is None else back(v)) for v in _three(seen)]
    exact = measure.exact and said[1] == said[2]
    return said[0], "–" if exact or said[1] == "–" else f"{said[1]} … {said[2]}"


def _three(seen: Estimate) -> tuple[float | None, float | None, float | None]:
    low, high = seen.interval() or (None, None)
    return seen.mean, low, high


def why(words: Words, verdict: Verdict) -> str:
    """What decided a claim, or keeps it undecided, with the numbers."""
    seen, claim = verdict.result, verdict.claim
    if verdict.reason.key != "why_decided" or seen is None:
        said = words(verdict.reason)
        if verdict.seeds and not verdict.missing:
            many = verdict.seeds > MOST_SEEDS
            said += words("semicolon")
            said += words("needs_many" if many else "needs_seeds", n=min(verdict.seeds, MOST_SEEDS))
        return said

    def show(value: float) -> str:
        if claim.vs is not None:
            return numbers.difference(claim.measured, value, log=verdict.log)
        return numbers.shown(claim.measured, math.exp(value) if verdict.log else value)

    low, high = seen.interval(0.90) or (seen.mean, seen.mean)
    supported = verdict.state == "supported"
    if supported and math.isfinite(verdict.low) and math.isfinite(verdict.high):
        return words("why_within", low=show(low), high=show(high))
    # Below the upper bound supports a claim, below the lower one refutes it; and so above.
    ceiling, floor = (verdict.high, verdict.low) if supported else (verdict.low, verdict.high)
    if math.isfinite(ceiling) and high <= ceiling:
        return words("why_below", bound=show(high), margin=show(ceiling))
    return words("why_above", bound=show(low), margin=show(floor))


def line(words: Words, verdict: Verdict) -> str:
    """A verdict in one line, for the terminal."""
    value, interval = estimate_of(verdict)
    seen = value if interval == "–" else f"{value} [{interval}]"
    return f"{statement(words, verdict.claim)}: {seen} ({why(words, verdict)})"
