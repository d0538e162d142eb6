"""Decide a study's claims: supported, refuted or undecided, with the numbers that decided it.

Each claim is a statement about where the truth lies, and is tested from both sides at 5 %: it is
supported when its opposite is refused, refuted when it is refused itself. So at any truth a wrong
verdict comes up at most once in twenty; Holm keeps that true over all claims of a study together.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from oelm.analysis.claims import Claim
from oelm.analysis.metrics import metric, other_split
from oelm.analysis.statistics import ALPHA, Estimate, compare, estimate, holm, seeds_needed
from oelm.analysis.study import Arm, Study
from oelm.analysis.words import Text, text

State = Literal["supported", "refuted", "undecided"]


@dataclass
class Verdict:
    """What became of a claim. Estimates and bounds are logs of ratios where `log` is set."""

    claim: Claim
    state: State = "undecided"
    reason: Text = field(default_factory=lambda: text("why_none"))
    result: Estimate | None = None
    log: bool = False
    low: float = -math.inf
    high: float = math.inf
    """The claim says that the truth lies between `low` and `high`."""
    p: float = math.nan
    """Of the likelier side: that the claim is true, or that it is false."""
    p_holm: float = math.nan
    leans: State = "undecided"
    """What the claim would be, were the estimate exact."""
    missing: int = 0
    """Planned seeds that have not come in."""
    family: int = 1
    """How many claims are tested together."""
    twin: "Verdict | None" = None
    """The estimate on the other split, if the runs recorded it: shown beside, but not tested."""

    @property
    def seeds(self) -> int | None:
        """Seeds that would decide it, given the spread seen; None where nothing is tested."""
        if self.result is None or math.isnan(self.p):
            return None
        distance = min(abs(self.result.mean - bound) for bound in (self.low, self.high))
        sd = self.result.se * math.sqrt(self.result.n)
        return seeds_needed(sd, distance, ALPHA / self.family)


def judge(study: Study) -> list[Verdict]:
    """A verdict for each claim, in the study's order."""
    verdicts = [_estimate(study, claim) for claim in study.claims]
    for verdict in verdicts:
        if name := other_split(verdict.claim.metric):
            twin = _estimate(study, replace(verdict.claim, metric=name))
            verdict.twin = twin if twin.result else None
    # The family is every claim that is tested, now or when its runs have come in, so that a verdict
    # does not change with the order in which they do.
    tested = [v for v in verdicts if not (v.claim.measured.exact and v.state != "undecided")]
    whole = [1.0 if math.isnan(v.p) or v.missing else v.p for v in tested]
    for verdict, adjusted in zip(tested, holm(whole), strict=True):
        if math.isnan(verdict.p):
            continue
        verdict.p_holm, verdict.family = adjusted, len(tested)
        if verdict.missing:
            verdict.reason = text("why_waiting", missing=verdict.missing, planned=len(study.seeds))
        elif adjusted <= ALPHA:
            verdict.state = verdict.leans
            verdict.reason = text("why_decided")
        elif verdict.p <= ALPHA:
            verdict.reason = text("why_holm", claims=len(tested))
        else:
            verdict.reason = text("why_spread")
    return verdicts


def _estimate(study: Study, claim: Claim) -> Verdict:
    """The claim's estimate, bounds and p; a verdict only where nothing is left to chance."""
    verdict, measure = Verdict(claim), claim.measured
    sides = [study.arms[arm].values(claim.metric, study.seeds) for arm in claim.arms]
    for arm, values in zip(claim.arms, sides, strict=True):
        if not values:
            finished = any(run.finished for run in study.arms[arm].runs)
            key = "why_unrecorded" if finished else "why_unfinished"
            verdict.reason = text(key, metric=claim.metric, arm=arm)
            return verdict
    # A margin says itself whether it is one of a ratio; without one, the metric does.
    relative = claim.has_margin and claim.margin.relative
    verdict.log = relative if claim.has_margin else measure.ratio
    if verdict.log and min(min(side.values()) for side in sides) <= 0:
        if relative:
            verdict.reason = text("why_not_positive", metric=claim.metric)
            return verdict
        verdict.log = False
    _set_bounds(verdict)
    if claim.vs is None:
        verdict.result = estimate(math.log(v) if verdict.log else v for v in sides[0].values())
    else:
        verdict.result = compare(*sides, log=verdict.log)
    inside = verdict.low <= verdict.result.mean <= verdict.high
    if claim.kind in ("less", "greater"):
        inside = verdict.low < verdict.result.mean < verdict.high
    verdict.leans = "supported" if inside else "refuted"
    if measure.exact and all(len(set(side.values())) == 1 for side in sides):
        verdict.state, verdict.reason = verdict.leans, text("why_exact")
        return verdict
    used = set.intersection(*(set(side) for side in sides))
    verdict.missing = len(set(study.seeds) - used)
    if not verdict.result.decidable:
        verdict.reason = text("why_one_seed")
        return verdict
    verdict.p = _p(verdict, verdict.result)
    return verdict


def _set_bounds(verdict: Verdict) -> None:
    """Where the claim says the truth lies, on the scale of the estimate."""
    claim = verdict.claim
    if claim.vs is None:
        bound = math.log(claim.bound) if verdict.log and claim.bound > 0 else claim.bound
        verdict.low, verdict.high = (bound, math.inf) if claim.kind == "min" else (-math.inf, bound)
        return
    size = claim.margin.value
    if not claim.margin.relative and claim.measured.share:
        size /= 100  # a point of a share is one per cent

    def scaled(value: float) -> float:
        return math.log1p(value) if claim.margin.relative and verdict.log else value

    if claim.kind == "equivalent_within":
        verdict.low, verdict.high = scaled(-size), scaled(size)
    elif claim.kind in ("at_most", "less"):
        verdict.high = scaled(size)
    else:
        verdict.low = scaled(size)


def _p(verdict: Verdict, seen: Estimate) -> float:
    """p of the side that the estimate leans to."""
    low, high = verdict.low, verdict.high
    if math.isinf(low):
        return seen.p_below(high) if verdict.leans == "supported" else seen.p_above(high)
    if math.isinf(high):
        return seen.p_above(low) if verdict.leans == "supported" else seen.p_below(low)
    return seen.p_within(low, high) if verdict.leans == "supported" else seen.p_outside(low, high)


def gap(
    study: Study, arm: Arm, other: Arm | None = None, name: str | None = None
) -> Estimate | None:
    """An arm's gap to the reference arm, or to `other`, in the study's primary metric or another."""
    name = name or study.primary
    sides = [a.values(name, study.seeds) for a in (arm, other or study.reference)]
    return compare(*sides, log=metric(name).ratio) if all(sides) else None


@dataclass(frozen=True)
class Twice:
    """A comparison of two arms on the split where choices are made, and on the one kept for the end."""

    arm: Arm
    other: Arm
    val: Estimate
    test: Estimate


def confirmations(study: Study) -> list[Twice]:
    """What claims compare, then the gaps to the reference arm, as far as runs recorded both splits."""
    twin = other_split(study.primary)
    if twin is None:
        return []
    found = []
    for arm, other in compared(study):
        sides = study.arms[arm], study.arms[other]
        val, test = gap(study, *sides), gap(study, *sides, name=twin)
        if val and test:
            found.append(Twice(*sides, val, test))
    return found


def compared(study: Study) -> list[tuple[str, str]]:
    """The arms that claims on quality compare, then every arm and the reference."""
    about = (study.primary, other_split(study.primary))
    pairs = [(c.arm, c.vs) for c in study.claims if c.vs is not None and c.metric in about]
    pairs += [(arm, study.reference.name) for arm in study.arms]
    return [(arm, other) for arm, other in dict.fromkeys(pairs) if arm != other]
