"""The charts of rows: a point, its intervals, and the numbers beside them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from oelm.analysis import numbers
from oelm.analysis.charts import (
    GREY,
    HALF,
    LETTER,
    MARGIN,
    WIDE_ONLY,
    WIDTH,
    Axis,
    Canvas,
    Row,
    gap_axis,
    plain_axis,
)
from oelm.analysis.figures import Spec, margins_of
from oelm.analysis.metrics import metric
from oelm.analysis.statistics import Estimate, estimate
from oelm.analysis.study import Arm, Study
from oelm.analysis.verdicts import Twice, gap

LABEL = 230
"""Pixels that a row's label may take."""
ROWS = alt.Axis(grid=False, labelLimit=LABEL, ticks=False, labelExpr="split(datum.label, '\\n')")


def forest(canvas: Canvas, study: Study) -> Spec:
    """Each arm's gap to the reference with its interval, and the margins of the claims."""
    log = metric(study.primary).ratio
    rows = []
    for arm in study.arms.values():
        seen = gap(study, arm) if arm is not study.reference else None
        if seen is not None:
            point = f"({arm.chosen})" if arm.chosen else ""
            rows.append(_row(arm.name, _label(arm.name, point), seen, log=log))
    key = "axis_gap_share" if log else "axis_gap_points"
    title = canvas.words(key, reference=study.reference.name)
    rows.sort(key=lambda row: float(row["mean"]))
    return _chart(canvas, rows, title, margins_of(study), points=not log) if rows else None


def decomposition(canvas: Canvas, study: Study, chain: Sequence[Arm]) -> Spec:
    """What each single change of the chain costs, with its interval; the total last."""
    log, rows = metric(study.primary).ratio, []
    for before, after in itertools.pairwise(chain):
        seen = gap(study, after, before)
        if seen is not None:
            label = _label(before.name, f"→ {after.name}")
            rows.append(_row(after.name, label, seen, log=log))
    total = gap(study, chain[-1], chain[0]) if len(rows) > 1 else None
    if total is not None:
        rows.append(_row("", canvas.words("total"), total, log=log))
    title = canvas.words("axis_effect_share" if log else "axis_effect_points")
    return _chart(canvas, rows, title, [], points=not log) if rows else None


def overview(canvas: Canvas, studies: Sequence[Study]) -> Spec:
    """Gaps of several studies of one kind, one row an arm."""
    rows, log = [], metric(studies[0].primary).ratio
    for study in studies:
        for arm in study.arms.values():
            seen = gap(study, arm) if arm is not study.reference else None
            if seen is not None:
                label = _label(f"{study.name} ·", arm.label)
                rows.append(_row(arm.name, label, seen, log=log))
    title = canvas.words("axis_gap_own" if log else "axis_gap_own_points")
    return _chart(canvas, rows, title, [], points=not log) if rows else None


def _label(first: str, second: str) -> str:
    """A row's label, on two lines where one would be cut."""
    whole = f"{first} {second}".strip()
    return whole if len(whole) <= LABEL / LETTER else f"{first}\n{second}"


def _row(arm: str, label: str, seen: Estimate, *, log: bool) -> Row:
    back, say = (math.expm1, numbers.percent) if log else (float, numbers.points)
    row: Row = {"arm": arm, "label": label, "mean": back(seen.mean), "said": say(back(seen.mean))}
    for name, level in (("95", 0.95), ("90", 0.90)):
        if interval := seen.interval(level):
            row["low" + name], row["high" + name] = (back(v) for v in interval)
    if seen.decidable:
        row["said"] += f"  [{say(row['low95'])}, {say(row['high95'])}]"
    return row


def _chart(
    canvas: Canvas, rows: list[Row], title: str, margins: list[float], *, points: bool
) -> Spec:
    """Rows of point, 90 % interval (thick) and 95 % interval (thin), in the order given."""
    every = [float(r[k]) for r in rows for k in ("mean", "low95", "high95") if k in r]
    x = gap_axis(title, [*every, *margins], points=points)
    y = alt.Y("label:N", sort=[str(r["label"]) for r in rows], title=None, axis=ROWS)
    arms = list(dict.fromkeys(str(r["arm"]) for r in rows))
    colour = canvas.colour(arms, legend=False)
    layers = [canvas.rows([{"at": 0}]).mark_rule(color=GREY).encode(x=x.x("at"))]
    if margins:
        dashed = canvas.rows({"at": m} for m in margins)
        mark = dashed.mark_rule(color=MARGIN, strokeDash=[5, 4], strokeWidth=1.5)
        layers.append(mark.encode(x=x.x("at")))
    layers += _bars(canvas, rows, x, y=y, color=colour)
    tips = [
        alt.Tooltip("label:N", title=canvas.words("col_arm")),
        alt.Tooltip("said:N", title=title),
    ]
    point = canvas.data(rows).mark_point(size=120, filled=True, opacity=1)
    shape = canvas.shape(arms)
    layers.append(point.encode(x=x.x("mean"), y=y, color=colour, shape=shape, tooltip=tips))
    # The numbers stand in a column right of the plot, where nothing can run over them.
    said = canvas.data(rows).mark_text(align="left", dx=12, fontSize=11)
    beside = said.encode(x=alt.value(alt.expr("width")), y=y, text="said:N")
    layers.append(beside.properties(name=WIDE_ONLY))
    high = 36 if any("\n" in str(r["label"]) for r in rows) else 26
    return canvas.finish(alt.layer(*layers), height=high * len(rows) + 16, width=WIDTH - 260)


def _bars(canvas: Canvas, rows: list[Row], x: Axis, **encoding: Any) -> list[alt.Chart]:
    """The 95 % interval (thin) and the 90 % interval (thick) of the rows that have them."""
    known, bars = [r for r in rows if "low95" in r], []
    for name, width in (("95", 1.5), ("90", 4.5)) if known else ():
        bar = canvas.data(known).mark_rule(strokeWidth=width, aria=False)
        bars.append(bar.encode(x=x.x("low" + name), x2=f"high{name}:Q", **encoding))
    return bars


def confirmation(canvas: Canvas, study: Study, twice: Sequence[Twice]) -> Spec:
    """Each comparison on val and, below it, on test."""
    log, splits = metric(study.primary).ratio, ["val", "test"]
    rows = []
    for one in twice:
        label = f"{one.arm.name}\n{canvas.words('versus', vs=one.other.name)}"
        for split, seen in zip(splits, (one.val, one.test), strict=True):
            rows.append(_row(one.arm.name, label, seen, log=log) | {"split": split})
    if not rows:
        return None
    title = canvas.words("axis_effect_share" if log else "axis_effect_points")
    every = [float(r[k]) for r in rows for k in ("mean", "low95", "high95") if k in r]
    x = gap_axis(title, every, points=not log)
    y = alt.Y("label:N", sort=list(dict.fromkeys(r["label"] for r in rows)), title=None, axis=ROWS)
    offset = alt.YOffset("split:N", sort=splits, scale=alt.Scale(paddingOuter=0.5))
    colour = canvas.colour(list(dict.fromkeys(r["arm"] for r in rows)), legend=False)
    place = {"y": y, "yOffset": offset, "color": colour}
    tips = [
        alt.Tooltip("arm:N", title=canvas.words("col_arm")),
        alt.Tooltip("split:N", title=canvas.words("col_split")),
        alt.Tooltip("said:N", title=title),
    ]
    shape = alt.Shape(
        "split:N",
        scale=alt.Scale(domain=splits, range=["circle", "diamond"]),
        legend=alt.Legend(title=None, orient="top", symbolFillColor=GREY, symbolStrokeColor=GREY),
    )
    point = canvas.data(rows).mark_point(size=95, filled=True, opacity=1)
    layers = [
        canvas.rows([{"at": 0}]).mark_rule(color=GREY).encode(x=x.x("at")),
        *_bars(canvas, rows, x, **place),
        point.encode(x=x.x("mean"), shape=shape, tooltip=tips, **place),
    ]
    return canvas.finish(alt.layer(*layers), height=44 * len(twice) + 16, width=WIDTH - 200)


def dots(canvas: Canvas, study: Study, name: str, title: str) -> Spec:
    """A metric of every run, with each arm's mean and 95 % interval; `title` is the axis's key."""
    every = [v for arm in study.arms.values() for v in arm.values(name, study.seeds).values()]
    if not every:
        return None
    scale, unit = numbers.axis_unit(metric(name).unit, max(every))
    runs: list[Row] = []
    means: list[Row] = []
    for arm in study.arms.values():
        values = [v / scale for v in arm.values(name, study.seeds).values()]
        if not values:
            continue
        row: Row = {"arm": arm.name, "label": arm.name}
        runs += [row | {"mean": v} for v in values]
        log = metric(name).ratio and min(values) > 0
        back = math.exp if log else float
        seen = estimate(math.log(v) if log else v for v in values)
        row |= {"mean": back(seen.mean)}
        if interval := seen.interval():
            row |= {"low": back(interval[0]), "high": back(interval[1])}
        means.append(row)
    # With two or three seeds the interval can dwarf the points: it may run out of the frame.
    seen_values = [float(r["mean"]) for r in runs]
    wide = (max(seen_values) - min(seen_values)) or max(seen_values) * 0.05
    ends = [float(r[k]) for r in means for k in ("low", "high") if k in r]
    near = [v for v in ends if min(seen_values) - wide < v < max(seen_values) + wide]
    said = canvas.words(title, unit=unit)
    x = plain_axis(said, [*seen_values, *near], ticks=4)
    return _dots(canvas, runs, means, x, said)


def _dots(canvas: Canvas, runs: list[Row], means: list[Row], x: Axis, title: str) -> Spec:
    look = alt.Axis(grid=False, labelLimit=175, ticks=False)
    y = alt.Y("label:N", sort=[str(r["label"]) for r in means], title=None, axis=look)
    arms = [str(r["arm"]) for r in means]
    colour, layers = canvas.colour(arms, legend=False), []
    tips = [
        alt.Tooltip("arm:N", title=canvas.words("col_arm")),
        alt.Tooltip("mean:Q", title=title, format=",.4~r"),
    ]
    if known := [r for r in means if "low" in r]:
        bar = canvas.data(known).mark_rule(strokeWidth=1.5, clip=True, aria=False)
        layers.append(bar.encode(x=x.x("low"), x2="high:Q", y=y, color=colour))
    small = canvas.data(runs).mark_point(size=28, filled=True, opacity=0.4)
    layers.append(small.encode(x=x.x("mean"), y=y, color=colour, tooltip=tips))
    big = canvas.data(means).mark_point(size=90, filled=True, opacity=1)
    shape = canvas.shape(arms)
    layers.append(big.encode(x=x.x("mean"), y=y, color=colour, shape=shape, tooltip=tips))
    return canvas.finish(alt.layer(*layers), height=26 * len(means) + 10, width=HALF - 70)
