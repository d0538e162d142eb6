"""The statistics behind a verdict: paired differences, t-intervals, one-sided tests, Holm.

Perplexities and times are compared as ratios, so they are compared on the log scale; accuracies as
differences. Runs that share a seed share their data order and every tensor their methods do not
treat, so arms are compared seed by seed: the noise they have in common cancels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

ALPHA = 0.05
"""Each one-sided decision is wrong at most this often, whatever the truth."""
POWER = 0.9
"""How sure a study of `seeds_needed` seeds is to reach a verdict."""
MOST_SEEDS = 1000
"""Beyond this, the difference from the margin is too small to be worth deciding."""


@dataclass(frozen=True)
class Estimate:
    """A mean with what is needed for its interval; with one value there is no interval."""

    mean: float
    se: float
    df: float
    n: int
    paired: bool = True

    @property
    def decidable(self) -> bool:
        """Whether there is a variance to judge by."""
        return self.df > 0

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """The two-sided t-interval."""
        if not self.decidable:
            return None
        half = float(stats.t.isf((1 - level) / 2, self.df)) * self.se
        return self.mean - half, self.mean + half

    def p_below(self, bound: float) -> float:
        """p of the one-sided test that the truth lies below `bound`."""
        if not self.decidable:
            return math.nan
        if self.se == 0:  # equal in every seed: a comparison, not a test
            return 0.0 if self.mean < bound else 1.0
        return float(stats.t.cdf((self.mean - bound) / self.se, self.df))

    def p_above(self, bound: float) -> float:
        """p of the one-sided test that the truth lies above `bound`."""
        if not self.decidable:
            return math.nan
        if self.se == 0:
            return 0.0 if self.mean > bound else 1.0
        return float(stats.t.sf((self.mean - bound) / self.se, self.df))

    def p_differs(self, bound: float = 0.0) -> float:
        """p of the two-sided t-test."""
        return min(1.0, 2 * min(self.p_below(bound), self.p_above(bound)))

    def p_within(self, low: float, high: float) -> float:
        """p of the two one-sided tests (TOST) that the truth lies between the bounds."""
        return max(self.p_above(low), self.p_below(high))

    def p_outside(self, low: float, high: float) -> float:
        """p of the test that the truth lies beyond one of the bounds."""
        if not self.decidable:
            return math.nan
        beyond = max(low - self.mean, self.mean - high)
        if self.se == 0:
            return 0.0 if beyond > 0 else 1.0
        # Seen from the nearer bound: as far out as this on its side, or equally far on the other.
        reach = np.array([beyond, beyond + high - low]) / self.se
        return min(1.0, float(stats.t.sf(reach, self.df).sum()))


def estimate(values: Iterable[float]) -> Estimate:
    """The mean of independent values."""
    x = np.asarray(list(values), dtype=float)
    if len(x) == 0:
        return Estimate(math.nan, math.nan, 0, 0)
    sd = float(x.std(ddof=1)) if len(x) > 1 else math.nan
    return Estimate(float(x.mean()), sd / math.sqrt(len(x)), len(x) - 1, len(x))


def compare(arm: Mapping[int, float], other: Mapping[int, float], *, log: bool) -> Estimate:
    """`arm` − `other`, seed by seed (Welch if they share none); with `log`, the log of the ratio."""
    scale = math.log if log else float
    shared = sorted(set(arm) & set(other))
    if shared:
        return estimate(scale(arm[s]) - scale(other[s]) for s in shared)
    a, b = (estimate(scale(v) for v in side.values()) for side in (arm, other))
    n = min(a.n, b.n)
    if not (a.decidable and b.decidable):
        return Estimate(a.mean - b.mean, math.nan, 0, n, paired=False)
    se = math.hypot(a.se, b.se)
    spread = a.se**4 / a.df + b.se**4 / b.df
    df = se**4 / spread if spread else a.df + b.df
    return Estimate(a.mean - b.mean, se, df, n, paired=False)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values; those that are nan belong to no test and stay nan."""
    adjusted, running = [math.nan] * len(p_values), 0.0
    tested = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, i) in enumerate(tested):
        running = max(running, min(1.0, p * (len(tested) - rank)))
        adjusted[i] = running
    return adjusted


def seeds_needed(sd: float, distance: float, alpha: float = ALPHA, power: float = POWER) -> int:
    """The fewest pairs of seeds that decide a margin this far away; `MOST_SEEDS` + 1 if too many."""
    if sd == 0:
        return 2
    if distance == 0 or not math.isfinite(distance / sd):
        return MOST_SEEDS + 1
    n = np.arange(2, MOST_SEEDS + 1)
    reached = stats.nct.sf(stats.t.isf(alpha, n - 1), n - 1, abs(distance) / sd * np.sqrt(n))
    enough = np.flatnonzero(reached >= power)
    return int(n[enough[0]]) if len(enough) else MOST_SEEDS + 1


def intervals_by_column(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and 95 % t-interval of each column of seeds × steps; nan marks a seed that is missing."""
    n = np.sum(~np.isnan(values), axis=0)
    some = np.maximum(n, 1)
    mean = np.where(n > 0, np.nansum(values, axis=0) / some, np.nan)
    squares = np.nansum((values - mean) ** 2, axis=0)
    several = n > 1
    sd = np.sqrt(np.where(several, squares / np.maximum(n - 1, 1), np.nan))
    half = np.where(several, stats.t.isf(0.025, np.maximum(n - 1, 1)) * sd / np.sqrt(some), np.nan)
    return mean, mean - half, mean + half
