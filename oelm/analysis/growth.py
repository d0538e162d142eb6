"""How gaps change from study to study: with the model's size, or with the tokens it trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import altair as alt
import numpy as np

from oelm.analysis import numbers
from oelm.analysis.blocks import Block, cell, table
from oelm.analysis.charts import GREY, Axis, Canvas, Row, gap_axis, log_ticks
from oelm.analysis.metrics import Metric, metric
from oelm.analysis.statistics import Estimate, compare, estimate
from oelm.analysis.study import Study, method_of
from oelm.analysis.verdicts import compared
from oelm.analysis.words import Words

BEYOND = 10.0
"""How far past the largest study the fitted line is drawn, as a factor."""
SIZES = ("n_layers", "d_model", "n_heads", "d_ff")
"""What may differ between the models of studies that are compared by size."""
SAME = (
    "task", "causal", "dataset", "batch_size", "schedule", "beta1", "beta2", "weight_decay", "clip",
    "dropout", "precision",
)  # fmt: skip
"""What may not differ between their runs; learning rates are each study's to tune."""


@dataclass(frozen=True)
class Line:
    """A straight line through the mean gaps of the studies, against log2 of their size.

    Its interval comes from how far the means lie from it: that holds the noise of seeds and also what is not
    straight about the truth, which all seeds of a size share and more seeds would not average away. Means
    that happen to lie closer to a line than their seeds allow get the interval of the seeds; so do two
    means, which lie on one whatever the truth, and their interval ends with them.
    """

    arm: str
    other: str
    measure: Metric
    sizes: np.ndarray
    """The size of the study that each gap is from."""
    gaps: np.ndarray
    """The gap of one seed at one size."""

    @cached_property
    def _fit(self) -> tuple[np.ndarray, float, float, float, int]:
        """log2 of the sizes, mean gap, slope, variance of a size's mean, and its degrees of freedom."""
        places = np.unique(self.sizes)
        seen = [self.seen(place) for place in places]
        x, y = np.log2(places), np.array([s.mean for s in seen])
        away = x - x.mean()
        slope = float(away @ y / (away @ away))
        rest = y - y.mean() - slope * away
        sources = [(float(np.mean([s.se**2 for s in seen])), len(self.gaps) - len(places))]
        if len(places) > 2:
            sources.insert(0, (float(rest @ rest) / (len(places) - 2), len(places) - 2))
        return x, float(y.mean()), slope, *max(sources, key=lambda source: source[0])

    @property
    def slope(self) -> Estimate:
        """The change of the gap with every doubling."""
        x, _, slope, variance, df = self._fit
        return Estimate(slope, math.sqrt(variance / (len(x) * np.var(x))), df, len(self.gaps))

    def at(self, size: float) -> Estimate:
        """The gap that the line has at a size."""
        x, level, slope, variance, df = self._fit
        away = math.log2(size) - float(x.mean())
        se = math.hypot(math.sqrt(variance / len(x)), self.slope.se * away)
        beyond = len(x) == 2 and not x[0] <= math.log2(size) <= x[1]
        return Estimate(level + slope * away, se, 0 if beyond else df, len(self.gaps))

    def seen(self, size: float) -> Estimate:
        """The gap that was measured at a size."""
        return estimate(self.gaps[self.sizes == size])


@dataclass(frozen=True)
class Growth:
    """Studies that differ in size alone, and what their common comparisons do from one to the next."""

    by: str
    """`parameters` or `tokens`."""
    sizes: tuple[float, ...]
    reference: str
    lines: tuple[Line, ...]


def growth(studies: Sequence[Study]) -> Growth | None:
    """What there is to say about growth; None where more than one thing differs between the studies."""
    by = _differs_in(studies)
    if by is None:
        return None
    size = {study.name: _size(study, by) for study in studies}
    measure, lines = metric(studies[0].primary), []
    for arm, other in compared(studies[0]):
        sizes, gaps = [], []
        for study in studies:
            sides = [study.arms[a] for a in (arm, other) if _alike(studies[0], study, a)]
            values = [a.values(study.primary, study.seeds) for a in sides]
            for seed in sorted(set.intersection(*map(set, values))) if len(values) == 2 else ():
                pair = ({seed: v[seed]} for v in values)
                gaps.append(compare(*pair, log=measure.ratio).mean)
                sizes.append(size[study.name])
        if set(sizes) == set(size.values()) and len(gaps) > 2:
            lines.append(Line(arm, other, measure, np.array(sizes), np.array(gaps)))
    places = tuple(sorted(size.values()))
    return Growth(by, places, studies[0].reference.name, tuple(lines)) if lines else None


def _differs_in(studies: Sequence[Study]) -> str | None:
    """What all these studies differ in, if it is the model's size alone or the tokens alone."""
    if len(studies) < 2 or len({s.primary for s in studies}) > 1:
        return None
    if len({s.reference.name for s in studies}) > 1:
        return None
    kinds = []
    for study in studies:
        run = next((r for r in study.reference.runs if r.finished), None)
        if run is None or not run.model:
            return None
        rest = {name: v for name, v in run.model.items() if name not in SIZES}
        kinds.append((rest, [run.config.get(name) for name in SAME]))
    if any(kind != kinds[0] for kind in kinds):
        return None
    sizes = {by: [_size(study, by) for study in studies] for by in ("parameters", "tokens")}
    for by, other in (("parameters", "tokens"), ("tokens", "parameters")):
        if len(set(sizes[by])) == len(studies) and len(set(sizes[other])) == 1 and all(sizes[by]):
            return by
    return None


def _alike(one: Study, other: Study, arm: str) -> bool:
    """Whether both studies have this arm, with the same method."""
    return arm in other.arms and method_of(one.arms[arm]) == method_of(other.arms[arm])


def _size(study: Study, by: str) -> float:
    """The reference arm's parameters, or the tokens it trained on; 0 if not recorded."""
    run = next(r for r in study.reference.runs if r.finished)
    if by == "parameters":
        return run.value("total") or 0.0
    return float(max(run.train.get("tokens", np.zeros(1))))


def trend_table(words: Words, found: Growth) -> Block | None:
    """Every comparison at every size, what a doubling changes, and where the line goes from there."""
    heads = [words("col_comparison"), *(numbers.short(size) for size in found.sizes)]
    heads += [words("col_doubling"), words("col_interval")]
    heads += [words("col_beyond", size=numbers.short(BEYOND * found.sizes[-1]))]
    heads += [words("col_interval")]
    rows = []
    for line in found.lines:
        row: list[Any] = [cell(f"{line.arm} {words('versus', vs=line.other)}", arm=line.arm)]
        row += [_said(line.measure, line.seen(size))[0] for size in found.sizes]
        for one in (line.slope, line.at(BEYOND * found.sizes[-1])):
            row += _said(line.measure, one)
        rows.append(row)
    return table(heads, rows)


def _said(measure: Metric, seen: Estimate) -> list[str]:
    """An estimate and its interval."""
    said = [
        numbers.difference(measure, v, log=measure.ratio)
        for v in (seen.mean, *(seen.interval() or ()))
    ]
    return [said[0], " … ".join(said[1:]) or "–"]


def chart(canvas: Canvas, found: Growth) -> dict[str, object] | None:
    """Gaps to the reference arm against the size, with fitted lines that go on, dashed, beyond it."""
    lines = [line for line in found.lines if line.other == found.reference]
    if not lines:
        return None
    last = found.sizes[-1]
    log = lines[0].measure.ratio
    points = [_row(line, size, line.seen(size), log=log) for line in lines for size in found.sizes]
    fit = [
        _row(line, size, line.at(size), log=log)
        for line in lines
        for size in np.geomspace(found.sizes[0], BEYOND * last, 41)
    ]
    inside = [r for r in fit if r["at"] <= last * 1.001]
    beyond = [r for r in fit if r["at"] >= inside[-1]["at"] * 0.999]
    # The band beyond may be as wide as it likes: it must not decide what the axis shows.
    ends = [v for r in [*points, *inside] for v in (r.get("low"), r.get("high"), r["mean"])]
    ends += [r["mean"] for r in beyond]
    key = "axis_gap_share" if log else "axis_gap_points"
    title = canvas.words(key, reference=found.reference)
    y = gap_axis(title, [v for v in ends if v is not None], points=not log)
    x = _size_axis(canvas.words(f"axis_{found.by}_trained"), found.sizes[0], BEYOND * last)
    arms = [line.arm for line in lines]
    colour = canvas.colour(arms)
    tips = [
        alt.Tooltip("arm:N", title=canvas.words("col_arm")),
        alt.Tooltip("at:Q", title=x.title, format=",.0f"),
        alt.Tooltip("said:N", title=title),
    ]
    layers = [canvas.rows([{"zero": 0}]).mark_rule(color=GREY).encode(y=y.y("zero"))]
    area = canvas.data(r for r in fit if "low" in r).mark_area(opacity=0.14, clip=True, aria=False)
    layers.append(area.encode(x=x.x("at"), y=y.y("low"), y2="high:Q", color=colour))
    for rows, dash in ((inside, [1, 0]), (beyond, [3, 4])):
        stroke = canvas.data(rows).mark_line(strokeWidth=2, strokeDash=dash, clip=True)
        layers.append(stroke.encode(x=x.x("at"), y=y.y("mean"), color=colour))
    bar = canvas.data(r for r in points if "low" in r).mark_rule(strokeWidth=1.5, aria=False)
    layers.append(bar.encode(x=x.x("at"), y=y.y("low"), y2="high:Q", color=colour))
    dot = canvas.data(points).mark_point(size=90, filled=True, opacity=1)
    layers.append(
        dot.encode(x=x.x("at"), y=y.y("mean"), color=colour, shape=canvas.shape(arms), tooltip=tips)
    )
    return canvas.finish(alt.layer(*layers), height=300)


def _row(line: Line, size: float, seen: Estimate, *, log: bool) -> Row:
    back = math.expm1 if log else float
    row = {"arm": line.arm, "at": float(size), "mean": back(seen.mean)}
    if interval := seen.interval():
        row |= dict(zip(("low", "high"), map(back, interval), strict=True))
    said, interval_said = _said(line.measure, seen)
    return row | {"said": f"{said}  [{interval_said}]" if "low" in row else said}


def _size_axis(title: str, low: float, high: float) -> Axis:
    scale = alt.Scale(type="log", domain=[low / 1.15, high], nice=False)
    return Axis(title, scale, alt.Axis(values=log_ticks(low, high), format="~s", grid=False))
