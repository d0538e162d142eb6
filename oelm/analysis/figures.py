"""The charts that run against something: steps, parameters, layers, the points of a grid."""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import numpy as np

from oelm.analysis import numbers
from oelm.analysis.charts import (
    FROZEN,
    GREY,
    HALF,
    MARGIN,
    PLAIN,
    ROUGHLY,
    TRAINED,
    WIDTH,
    Axis,
    Canvas,
    Row,
    gap_axis,
    log_axis,
    plain_axis,
    plain_range,
    step_axis,
)
from oelm.analysis.metrics import metric
from oelm.analysis.series import Series, arm_series, gap_series
from oelm.analysis.study import Study

Spec = dict[str, Any] | None
SHARES = ("induction_accuracy",)
"""Probes that are shown in per cent."""
STEEP = 3
"""Perplexities over a grid that differ by more than this are drawn on a log axis."""


def curves(
    canvas: Canvas, study: Study, kind: str, column: str, *, log: bool, half: bool = False
) -> Spec:
    """A quantity against the step, one line an arm, with the range its seeds span."""
    found = {a.name: arm_series(a, study.seeds, kind, column, log=log) for a in study.arms.values()}
    series = {name: s for name, s in found.items() if s is not None}
    if not series:
        return None
    first, *others = series.values()
    if column == "lr" and others and all(np.array_equal(first.mean, s.mean) for s in others):
        series = {canvas.words("all_arms"): first}
    share = column in ("accuracy", "macro_f1")
    every = np.concatenate([np.concatenate([s.low, s.high]) for s in series.values()])
    title = canvas.words(f"axis_{column}")
    y = log_axis(title, every) if log else plain_axis(title, every, "%" if share else PLAIN)
    say = _percent if share else numbers.number
    drawn = alt.layer(*_lines(canvas, series, y, say, legend=not half))
    return canvas.finish(drawn, height=220 if half else 300, width=HALF if half else WIDTH)


def gap_curves(canvas: Canvas, study: Study) -> Spec:
    """The gap to the reference arm against the step, with its 95 % interval."""
    log = metric(study.primary).ratio
    back: Callable[[np.ndarray], np.ndarray] = np.expm1 if log else np.asarray
    series = {}
    for arm in study.arms.values():
        s = gap_series(arm, study.reference, study.seeds, study.primary, log=log)
        if arm is not study.reference and s is not None and np.isfinite(s.mean).any():
            series[arm.name] = Series(s.step, back(s.mean), back(s.low), back(s.high), s.n)
    if not series:
        return None
    # The first evaluations are wild and early intervals of few seeds wilder: they must not decide
    # what the axis shows, so the band may run out of the frame.
    later = [s.mean[len(s.mean) // 10 :] for s in series.values()]
    ends = [v for s in series.values() for v in (s.low[-1], s.high[-1])]
    key = "axis_gap_share" if log else "axis_gap_points"
    title = canvas.words(key, reference=study.reference.name)
    y = gap_axis(title, [*np.concatenate(later), *ends], points=not log)
    low, high = plain_range([*np.concatenate(later), *ends, 0.0])
    layers = [canvas.rows([{"at": 0}]).mark_rule(color=GREY).encode(y=y.y("at"))]
    if margins := [{"at": m} for m in margins_of(study) if low < m < high]:
        dashed = canvas.rows(margins).mark_rule(color=MARGIN, strokeDash=[5, 4], strokeWidth=1.5)
        layers.append(dashed.encode(y=y.y("at")))
    layers += _lines(canvas, series, y, numbers.percent if log else numbers.points)
    return canvas.finish(alt.layer(*layers), height=260)


def probe(canvas: Canvas, study: Study, name: str) -> Spec:
    """A diagnostic that runs recorded, against the step."""
    kind = f"probe:{name}"
    drawn = {
        a.name: arm_series(a, study.seeds, kind, "value", log=False) for a in study.arms.values()
    }
    found = {arm: series for arm, series in drawn.items() if series is not None}
    if not found:
        return None
    every = np.concatenate([np.concatenate([s.low, s.high]) for s in found.values()])
    share = name in SHARES
    y = plain_axis(_probe_title(canvas, name), every, "%" if share else PLAIN, ticks=5)
    lines = _lines(canvas, found, y, _percent if share else numbers.number, legend=False)
    return canvas.finish(alt.layer(*lines), height=220, width=HALF)


def by_layer(canvas: Canvas, study: Study, name: str, layers: Sequence[int]) -> Spec:
    """A diagnostic of every layer (`name_0`, `name_1`…) after the last step, one line an arm."""
    rows: list[Row] = []
    for arm in study.arms.values():
        for layer in layers:
            values = np.array(list(arm.values(f"probe:{name}_{layer}", study.seeds).values()))
            if len(values):
                row = {"arm": arm.name, "at": layer, "mean": float(values.mean()), "size": 60}
                rows.append(row | {"low": float(values.min()), "high": float(values.max())})
    if not rows:
        return None
    some = [i for i in layers if i % math.ceil(len(layers) / 12) == 0]
    look = alt.Axis(values=some, format="d", grid=False)
    scale = alt.Scale(domain=[min(layers) - 0.2, max(layers) + 0.2], nice=False)
    x = Axis(canvas.words("axis_layer"), scale, look)
    y = plain_axis(_probe_title(canvas, name), _ends(rows), ticks=5)
    drawn = _joined(canvas, rows, x, y, legend=False)
    return canvas.finish(alt.layer(*drawn), height=220, width=HALF)


def _probe_title(canvas: Canvas, name: str) -> str:
    title = canvas.words.either(f"axis_{name}", name)
    return title if len(title) < 46 else title[:44] + "…"


def _ends(rows: Sequence[Row]) -> list[float]:
    return [float(row[end]) for row in rows for end in ("low", "high")]


def _joined(
    canvas: Canvas, rows: Sequence[Row], x: Axis, y: Axis, *, legend: bool = True
) -> list[alt.Chart]:
    """Means of arms at a few places, joined by lines, with the range their seeds span."""
    arms, base = _arms(rows), canvas.data(rows)
    colour = canvas.colour(arms, legend=legend)
    share = y.look.to_dict().get("format") == "%"
    tips = [
        alt.Tooltip("arm:N", title=canvas.words("col_arm")),
        alt.Tooltip("at:Q", title=x.title, format=PLAIN),
        alt.Tooltip("mean:Q", title=y.title, format=".2%" if share else ",.4~r"),
    ]
    bar = base.mark_rule(aria=False).encode(x=x.x("at"), y=y.y("low"), y2="high:Q", color=colour)
    line = base.mark_line(strokeWidth=2).encode(
        x=x.x("at"), y=y.y("mean"), color=colour, strokeDash=canvas.dash(arms, legend=legend)
    )
    dot = base.mark_point(filled=True, opacity=1).encode(
        x=x.x("at"),
        y=y.y("mean"),
        size=alt.Size("size:Q", scale=None, legend=None),
        color=colour,
        tooltip=tips,
    )
    return [bar, line, dot]


def _lines(
    canvas: Canvas,
    series: dict[str, Series],
    y: Axis,
    say: Callable[[float], str],
    *,
    legend: bool = True,
) -> list[alt.Chart]:
    """Band, line and, on the web, hover of several arms against the step."""
    x = step_axis(canvas.words, max(float(s.step[-1]) for s in series.values()))
    arms = list(series)
    rows: list[Row] = []
    table: dict[float, Row] = {}
    for i, (name, s) in enumerate(series.items()):
        for step, mean, low, high, n in zip(s.step, s.mean, s.low, s.high, s.n, strict=True):
            if not math.isfinite(mean):
                continue
            row, said = {"arm": name, "step": float(step), "mean": _six(mean)}, say(mean)
            if n > 1 and math.isfinite(low):
                row |= {"low": _six(low), "high": _six(high)}
                said += f"  [{say(low)}, {say(high)}]"
            rows.append(row)
            table.setdefault(float(step), {"step": float(step)})[f"c{i}"] = said
    colour, layers = canvas.colour(arms, legend=legend), []
    if banded := [r for r in rows if "low" in r]:
        area = canvas.data(banded).mark_area(opacity=0.16, clip=True, aria=False)
        layers.append(area.encode(x=x.x("step"), y=y.y("low"), y2="high:Q", color=colour))
    few = max(len(s.step) for s in series.values()) <= 8
    line = canvas.data(rows).mark_line(
        strokeWidth=2, clip=True, point={"size": 30} if few else False
    )
    layers.append(
        line.encode(
            x=x.x("step"), y=y.y("mean"), color=colour, strokeDash=canvas.dash(arms, legend=legend)
        )
    )
    return [*layers, *canvas.hover(x, [table[s] for s in sorted(table)], arms)]


def scatter(canvas: Canvas, study: Study) -> Spec:
    """Quality against trainable parameters: what a parameter buys."""
    rows: list[Row] = []
    for arm in study.arms.values():
        quality, trained = (arm.values(n, study.seeds) for n in (study.primary, "trainable"))
        for seed in sorted(quality.keys() & trained.keys()):
            row = {"arm": arm.name, "seed": seed, "mean": quality[seed], "trained": trained[seed]}
            rows.append(row)
    if len({r["trained"] for r in rows}) < 2:
        return None
    arms = _arms(rows)
    title = canvas.words(f"axis_{study.primary}")
    x = plain_axis(canvas.words("axis_trainable"), (r["trained"] for r in rows), ".4~s", ticks=5)
    y = plain_axis(title, (r["mean"] for r in rows), "%" if metric(study.primary).share else PLAIN)
    tips = [
        alt.Tooltip("arm:N", title=canvas.words("col_arm")),
        alt.Tooltip("seed:Q", title=canvas.words("col_seed")),
        alt.Tooltip("mean:Q", title=title, format=".4~r"),
        alt.Tooltip("trained:Q", title=canvas.words("axis_trainable"), format=","),
    ]
    points = canvas.data(rows).mark_point(size=70, filled=True, opacity=0.75)
    drawn = points.encode(
        x=x.x("trained"),
        y=y.y("mean"),
        color=canvas.colour(arms, points=True),
        shape=canvas.shape(arms, legend=True),
        tooltip=tips,
    )
    return canvas.finish(drawn, height=280)


def layers(canvas: Canvas, study: Study) -> Spec:
    """Trainable and frozen parameters of each layer; arms that are built alike share a panel."""
    profiles: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for arm in study.arms.values():
        counts = next((r.audit["by_layer"] for r in arm.runs if r.audit.get("by_layer")), None)
        if isinstance(counts, dict):
            profiles.setdefault(repr(counts), (counts, []))[1].append(arm.name)
    names = {"trainable": canvas.words("trained"), "frozen": canvas.words("frozen")}
    rows: list[Row] = []
    for counts, arms in list(profiles.values())[:6]:
        panel = "\n".join(textwrap.wrap(", ".join(arms), 28, break_on_hyphens=False))
        for layer, by_kind in counts.items():
            for kind, said in names.items():
                n = by_kind.get(kind, 0) if isinstance(by_kind, dict) else 0
                rows.append({"panel": panel, "layer": layer, "kind": said, "n": n})
    if not rows:
        return None
    order = list(dict.fromkeys(str(r["layer"]) for r in rows))
    fill = alt.Scale(domain=list(names.values()), range=[TRAINED, FROZEN])
    title = canvas.words("axis_parameters")
    bars = (
        canvas.rows(rows)
        .mark_bar()
        .encode(
            y=alt.Y("layer:N", sort=order, title=None, axis=alt.Axis(grid=False, labelLimit=130)),
            x=alt.X("n:Q", title=title, axis=alt.Axis(labelExpr=ROUGHLY, tickCount=3)),
            color=alt.Color("kind:N", scale=fill, legend=alt.Legend(title=None, orient="top")),
            tooltip=[
                alt.Tooltip("layer:N", title=canvas.words("layer")),
                alt.Tooltip("kind:N", title=title),
                alt.Tooltip("n:Q", title=canvas.words("count"), format=","),
            ],
        )
        .properties(width=165, height=17 * len(order))
    )
    head = alt.Header(
        title=None, labelExpr="split(datum.label, '\\n')", labelFontWeight="bold", labelLimit=190
    )
    panels = list(dict.fromkeys(str(r["panel"]) for r in rows))
    facet = bars.facet(alt.Facet("panel:N", sort=panels, header=head), columns=3)
    return canvas.spec(facet)


def tuning(canvas: Canvas, study: Study) -> Spec:
    """The result at every point of the grid, where the grid runs over one number."""
    rows: list[Row] = []
    log = metric(study.primary).ratio
    for arm in study.arms.values():
        for point in arm.points:
            key, _, text = point.partition("=")
            values = np.array(list(arm.values(study.primary, study.seeds, point).values()))
            try:
                at = float(text)
            except ValueError:
                continue
            if len(values):
                mean = float(np.exp(np.log(values).mean()) if log else values.mean())
                row = {"arm": arm.name, "key": key, "at": at, "mean": mean}
                row["size"] = 130 if point == arm.chosen else 40
                rows.append(row | {"low": float(values.min()), "high": float(values.max())})
    places = sorted({float(r["at"]) for r in rows})
    if len(places) < 2 or len({r["key"] for r in rows}) > 1:
        return None
    wide = places[0] > 0 and places[-1] / places[0] > 2
    key = str(rows[0]["key"])
    x = Axis(
        canvas.words.either(f"axis_{key}", key),
        alt.Scale(type="log", nice=False, padding=14)
        if wide
        else alt.Scale(zero=False, nice=False, padding=14),
        alt.Axis(values=places, format=".3~g", grid=False),  # 0.012 is not 0.01
    )
    title, ends = canvas.words(f"axis_{study.primary}"), _ends(rows)
    if log and max(ends) > STEEP * min(ends):  # a rate too high must not flatten the others
        y = log_axis(title, ends)
    else:
        y = plain_axis(title, ends, PLAIN if log else "%")
    return canvas.finish(alt.layer(*_joined(canvas, rows, x, y)), height=280)


def margins_of(study: Study) -> list[float]:
    """The margins that claims set on the gap to the reference arm, as shares."""
    found: set[float] = set()
    for claim in study.claims:
        if claim.metric != study.primary or claim.vs != study.reference.name:
            continue
        if (
            claim.kind in ("less", "greater")
            or claim.margin.relative != metric(study.primary).ratio
        ):
            continue
        size = claim.margin.value if claim.margin.relative else claim.margin.value / 100
        found |= {size, -size} if claim.kind == "equivalent_within" else {size}
    return sorted(found)


def _arms(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(r["arm"]) for r in rows))


def _percent(value: float) -> str:
    return numbers.percent(value, signed=False, digits=2)


def _six(value: float) -> float:
    """Six digits: enough for any screen, a third of the file."""
    return float(f"{value:.6g}")
