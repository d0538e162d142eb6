"""The charts' common ground: colours, axes, hovering; one definition for web, paper and Markdown.

On the web an arm can be hidden (`hidden`) and a step pointed at (`pointed`); both are parameters
that the page sets in all charts at once. Static pictures have a legend instead.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from oelm.analysis.words import Words

# Okabe and Ito's colours in the order that keeps neighbours apart; without black and yellow, which
# vanish on a dark or a white page. Beyond seven arms they come again, dashed and in another shape.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
DASHES: tuple[list[int], ...] = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
FROZEN, TRAINED = "#56B4E9", "#E69F00"
MARGIN = "#B8860B"
GREY = "#8A8F98"
WIDTH = 620
HALF = 260
ROUGHLY = "datum.value == 0 ? '0' : format(datum.value, '~s')"
"""Labels such as 20k, and 0 rather than 0k."""
STEPS = "format(datum.value, datum.value < 10000 ? ',' : '~s')"
"""Steps as they are counted, until that takes too much room."""
PLAIN = ",~r"
"""Labels such as 0.003, 50 and 2,000: never an exponent."""
LETTER = 6.6
"""Pixels that a letter of a label takes, about."""
WIDE_ONLY = "wide-only"
"""Name of layers that a phone leaves out."""


@dataclass(frozen=True)
class Palette:
    """The same colour, dash and shape for an arm in every chart."""

    arms: tuple[str, ...]

    def colour(self, arm: str) -> str:
        """The arm's colour; grey for a row that is no single arm."""
        return COLOURS[self._place(arm) % len(COLOURS)]

    def dash(self, arm: str) -> list[int]:
        """The arm's dash pattern."""
        return DASHES[self._place(arm) // len(COLOURS) % len(DASHES)]

    def shape(self, arm: str) -> str:
        """The arm's shape where it is a point."""
        i = self._place(arm)
        return SHAPES[(i + i // len(COLOURS)) % len(SHAPES)]

    def _place(self, arm: str) -> int:
        return self.arms.index(arm) if arm in self.arms else len(COLOURS) - 1


Row = dict[str, Any]


def legend(names: Sequence[str], *, points: bool) -> alt.Legend:
    """A legend above the chart, in as many columns as the chart is wide for."""
    widest = min(180.0, max(LETTER * len(name) for name in names)) + 32
    return alt.Legend(
        title=None,
        orient="top",
        labelLimit=180,
        columns=max(1, int(WIDTH / widest)),
        symbolType=alt.Undefined if points else "stroke",
        symbolOpacity=1,
        symbolStrokeWidth=3,
    )


@dataclass(frozen=True)
class Axis:
    """An axis that several fields of a chart share."""

    title: str
    scale: alt.Scale
    look: alt.Axis

    def x(self, field: str) -> alt.X:
        """A quantitative field along this axis, horizontally."""
        return alt.X(f"{field}:Q", title=self.title, scale=self.scale, axis=self.look)

    def y(self, field: str) -> alt.Y:
        """A quantitative field along this axis, vertically."""
        return alt.Y(f"{field}:Q", title=self.title, scale=self.scale, axis=self.look)


@dataclass(frozen=True)
class Canvas:
    """Makes charts: whose colours, in whose words, for the web or for paper."""

    palette: Palette
    words: Words
    web: bool = False
    datasets: dict[str, list[Row]] = field(default_factory=dict)
    """Rows of the charts by name: altair copies what it holds many times over."""

    def rows(self, rows: Iterable[Row]) -> alt.Chart:
        """A chart of these rows."""
        name = f"rows{len(self.datasets)}"
        self.datasets[name] = list(rows)
        return alt.Chart(alt.NamedData(name))

    def data(self, rows: Iterable[Row]) -> alt.Chart:
        """A chart of rows that belong to arms; on the web without those whose arm is hidden."""
        chart = self.rows(rows)
        return chart.transform_filter("indexof(hidden, datum.arm) < 0") if self.web else chart

    def colour(
        self, arms: Sequence[str], *, legend: bool = True, points: bool = False
    ) -> alt.Color:
        """Colour by arm, of lines or `points`; the web page has its own legend."""
        return alt.Color(
            "arm:N",
            scale=alt.Scale(domain=list(arms), range=[self.palette.colour(a) for a in arms]),
            legend=self._legend(arms, legend, points),
        )

    def dash(self, arms: Sequence[str], *, legend: bool = True) -> alt.StrokeDash:
        """Dash by arm: what tells the second seven arms from the first."""
        return alt.StrokeDash(
            "arm:N",
            scale=alt.Scale(domain=list(arms), range=[self.palette.dash(a) for a in arms]),
            legend=self._legend(arms, legend, points=False),
        )

    def shape(self, arms: Sequence[str], *, legend: bool = False) -> alt.Shape:
        """Shape by arm."""
        scale = alt.Scale(domain=list(arms), range=[self.palette.shape(a) for a in arms])
        return alt.Shape("arm:N", scale=scale, legend=self._legend(arms, legend, points=True))

    def _legend(self, arms: Sequence[str], wanted: bool, points: bool) -> alt.Legend | None:
        return legend(arms, points=points) if wanted and not self.web else None

    def finish(self, chart: Any, *, height: int, width: int = WIDTH) -> dict[str, Any]:
        """The chart as a Vega-Lite specification, with the page's parameters on the web."""
        chart = chart.properties(width=width, height=height)
        if self.web:
            chart = chart.add_params(
                alt.param(name="hidden", value=[]), alt.param(name="pointed", value=None)
            )
        return self.spec(chart)

    def spec(self, chart: Any) -> dict[str, Any]:
        """The chart with its rows; validation is the tests' business, not every report's."""
        spec: dict[str, Any] = chart.configure(**CONFIG).to_dict(validate=False)
        spec.pop("$schema", None)
        return {**spec, "datasets": self.datasets}

    def hover(self, x: Axis, table: list[Row], titles: Sequence[str]) -> list[alt.Chart]:
        """A rule at the step pointed at, and a tooltip with every arm's value there.

        `table` has one row per step: `step` and `c0`, `c1`… as text, one for each of `titles`.
        Names of arms are titles only, never field names, where a dot or bracket would be syntax.
        """
        if not self.web or not table:
            return []
        rule = (
            self.rows([{}])
            .transform_calculate(step="pointed")
            .transform_filter("isValid(datum.step)")
            .mark_rule(color=GREY, strokeWidth=1, aria=False)
            .encode(x=x.x("step"))
        )
        tips = [alt.Tooltip("step:Q", title=self.words("axis_step"), format=",")]
        tips += [alt.Tooltip(f"c{i}:N", title=title) for i, title in enumerate(titles)]
        near = alt.selection_point(
            name="at", on="pointermove", nearest=True, encodings=["x"], clear="pointerout"
        )
        catch = (
            self.rows(table)
            .mark_rule(strokeWidth=8, opacity=0, aria=False)
            .encode(x=x.x("step"), tooltip=tips)
            .add_params(near)
        )
        return [rule, catch]


CONFIG: dict[str, Any] = {
    "view": alt.ViewConfig(stroke=None),
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "axis": alt.AxisConfig(
        grid=True,
        gridColor="#E4E6EA",
        domainColor="#9AA0A8",
        tickColor="#9AA0A8",
        labelColor="#3C4149",
        titleColor="#3C4149",
        labelFontSize=12,
        titleFontSize=12,
        titleFontWeight="normal",
        titlePadding=8,
        labelOverlap="greedy",
        labelSeparation=6,
    ),
    "header": alt.HeaderConfig(labelColor="#3C4149"),
    "legend": alt.LegendConfig(labelFontSize=12, labelColor="#3C4149", titleColor="#3C4149"),
    "text": alt.MarkConfig(color="#3C4149", fontSize=12),
}


def step_axis(words: Words, last: float) -> Axis:
    """Steps from 0 to the last."""
    return Axis(
        words("axis_step"),
        alt.Scale(domain=[0, last * 1.015], nice=False),  # room for half a point at the end
        alt.Axis(labelExpr=STEPS, tickCount=6, grid=False),
    )


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers between two, evenly spread on a log scale."""
    choices: list[list[float]] = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]
    choices.append([1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8])
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    best: list[float] = []
    for mantissas in choices:
        ticks = sorted({float(f"{m * 10.0**d:.6g}") for d in decades for m in mantissas})
        ticks = [t for t in ticks if low <= t <= high]
        if len(ticks) > most:
            break
        best = ticks
        if len(best) > 3:
            break
    return best if len(best) > 2 else _even_ticks(low, high)


def _even_ticks(low: float, high: float) -> list[float]:
    """Multiples of a round number: over a short stretch a log scale is nearly a linear one."""
    power = 10.0 ** math.floor(math.log10(high - low))
    for step in (2 * power, power, power / 2, power / 4):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first >= 2:
            break
    return [float(f"{i * step:.6g}") for i in range(first, last + 1)]


def log_axis(title: str, values: Iterable[float]) -> Axis:
    """A log axis over these values, with a little air, and round ticks."""
    known = [v for v in values if v > 0 and math.isfinite(v)]
    low, high = min(known), max(known)
    air = max((high / low) ** 0.04, 1.01)
    low, high = low / air, high * air
    return Axis(
        title,
        alt.Scale(type="log", domain=[low, high], nice=False),
        alt.Axis(values=log_ticks(low, high), format=PLAIN),
    )


def plain_axis(title: str, values: Iterable[float], form: str = PLAIN, *, ticks: int = 6) -> Axis:
    """A linear axis over these values, with a little air."""
    domain = plain_range(values)
    look = alt.Axis(format=form, tickCount=ticks)
    return Axis(title, alt.Scale(domain=domain, nice=False), look)


def gap_axis(title: str, values: Sequence[float], *, points: bool) -> Axis:
    """A linear axis of gaps, in per cent or in percentage points, with 0 on it."""
    low, high = plain_range([*values, 0.0])
    digits = 0 if high - low >= 0.05 else 1 if high - low >= 0.005 else 2
    said = f"format(100 * datum.value, '+.{digits}f')" + ("" if points else " + '%'")
    look = alt.Axis(tickCount=6, labelExpr=f"datum.value == 0 ? '0' : {said}")
    return Axis(title, alt.Scale(domain=[low, high], nice=False), look)


def plain_range(values: Iterable[float]) -> list[float]:
    """A linear domain over these values, with a little air on both sides."""
    known = [float(v) for v in values if math.isfinite(v)]
    low, high = min(known), max(known)
    air = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    return [low - air, high + air]
