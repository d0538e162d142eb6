"""Curves of arms from curves of runs: aligned by step, thinned to what a screen can show."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oelm.analysis.runs import Run
from oelm.analysis.statistics import intervals_by_column
from oelm.analysis.study import Arm

MOST_POINTS = 160
"""Points per curve: more cannot be told apart at the width of a page."""


@dataclass(frozen=True)
class Series:
    """A mean over seeds with a band, by step."""

    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray
    """How many seeds each step has."""


def arm_series(
    arm: Arm, seeds: Sequence[int], kind: str, column: str, *, log: bool
) -> Series | None:
    """An arm's curve: mean over seeds (geometric with `log`), and the range that they span."""
    curves = [run.curve(kind) for run in arm.runs if run.seed in seeds]
    step, values = _aligned([(c["step"], c[column]) for c in curves if column in c], log=log)
    # A training loss is noise around a curve: average it; an evaluation is not: pick some.
    step, values = (_averaged if kind == "train" else _thinned)(step, values)
    n = np.sum(~np.isnan(values), axis=0)
    step, values, n = step[n > 0], values[:, n > 0], n[n > 0]
    if not len(step):
        return None
    back = np.exp if log else np.asarray
    mean = back(np.nansum(values, axis=0) / n)
    return Series(step, mean, back(np.nanmin(values, axis=0)), back(np.nanmax(values, axis=0)), n)


def gap_series(
    arm: Arm, other: Arm, seeds: Sequence[int], column: str, *, log: bool
) -> Series | None:
    """The gap between two arms by step, seed by seed, with its 95 % t-interval; log ratios with `log`."""
    ours, theirs = _by_seed(arm, seeds, column), _by_seed(other, seeds, column)
    rows = []
    for seed in sorted(ours.keys() & theirs.keys()):
        a, b = ours[seed].val, theirs[seed].val
        common, i, j = np.intersect1d(a["step"], b["step"], return_indices=True)
        x, y = a[column][i], b[column][j]
        with np.errstate(divide="ignore", invalid="ignore"):
            rows.append((common, np.log(x / y) if log else x - y))
    step, values = _thinned(*_aligned(rows, log=False))
    if not len(step):
        return None
    mean, low, high = intervals_by_column(values)
    return Series(step, mean, low, high, np.sum(~np.isnan(values), axis=0))


def _by_seed(arm: Arm, seeds: Sequence[int], column: str) -> dict[int, Run]:
    return {run.seed: run for run in arm.runs if run.seed in seeds and column in run.val}


def _aligned(
    curves: list[tuple[np.ndarray, np.ndarray]], *, log: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Curves as rows of one matrix over all their steps; nan where a curve has no such step."""
    step = np.unique(np.concatenate([s for s, _ in curves])) if curves else np.array([])
    values = np.full((len(curves), len(step)), np.nan)
    for row, (at, curve) in zip(values, curves, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            row[np.searchsorted(step, at)] = np.log(curve) if log else curve
    values[~np.isfinite(values)] = np.nan
    return step, values


def _thinned(step: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `MOST_POINTS` columns, first and last among them."""
    if len(step) <= MOST_POINTS:
        return step, values
    chosen = np.unique(np.linspace(0, len(step) - 1, MOST_POINTS).round().astype(int))
    return step[chosen], values[:, chosen]


def _averaged(step: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over at most `MOST_POINTS` stretches of columns, each at its last step."""
    if len(step) <= MOST_POINTS:
        return step, values
    starts = np.linspace(0, len(step), MOST_POINTS, endpoint=False).astype(int)
    known = ~np.isnan(values)
    n = np.add.reduceat(known, starts, axis=1)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=1)
    means = np.where(n > 0, sums / np.maximum(n, 1), np.nan)
    return step[np.append(starts[1:], len(step)) - 1], means
