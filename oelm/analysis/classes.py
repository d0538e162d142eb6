"""How well a classifier tells each class: its scores, and what it takes for what."""

import textwrap
from typing import Any

import altair as alt
import numpy as np

from oelm.analysis import numbers
from oelm.analysis.blocks import Block, cell, table
from oelm.analysis.charts import COLOURS, WIDTH, Canvas, Row
from oelm.analysis.figures import Spec
from oelm.analysis.study import Arm, Study
from oelm.analysis.words import Words

MOST_CLASSES = 12
"""Beyond this, the cells of a confusion matrix are too small for their numbers."""
MOST_PANELS = 9


def scores(words: Words, study: Study) -> Block | None:
    """Precision, recall and F1 of each class, from the confusion matrices summed over seeds."""
    rows = []
    for arm in study.arms.values():
        total = _total(arm, study)
        for i, name in enumerate(_names(study, len(total)) if total is not None else ()):
            assert total is not None
            with np.errstate(invalid="ignore", divide="ignore"):
                recall, precision = total[i, i] / total[i].sum(), total[i, i] / total[:, i].sum()
                f1 = 2 * precision * recall / (precision + recall)
            shares = [numbers.percent(float(v), signed=False) for v in (precision, recall, f1)]
            rows.append(
                [cell(arm.label, arm=arm.name), name, *shares, numbers.count(total[i].sum())]
            )
    heads = [words(f"col_{k}") for k in ("arm", "class", "precision", "recall")]
    return table([*heads, "F1", words("col_support")], rows, left=2)


def confusion(canvas: Canvas, study: Study) -> Spec:
    """For each arm, which share of each true class was given which class."""
    rows: list[Row] = []
    names: list[str] = []
    for arm in study.arms.values():
        total = _total(arm, study)
        if total is None or len(total) > MOST_CLASSES:
            continue
        names = _names(study, len(total))
        panel = "\n".join(textwrap.wrap(arm.name, 28, break_on_hyphens=False))
        for i, true in enumerate(names):
            for j, said in enumerate(names):
                share = float(total[i, j] / max(total[i].sum(), 1.0))
                row = {"panel": panel, "true": true, "said": said, "share": share}
                rows.append(row | {"n": int(total[i, j])})
    panels = list(dict.fromkeys(str(r["panel"]) for r in rows))[:MOST_PANELS]
    if not panels:
        return None
    plain: dict[str, Any] = {"grid": False, "ticks": False, "domain": False, "labelLimit": 110}
    look = alt.Axis(**plain, labelOverlap=False)
    long = len(names) > 3 or max(map(len, names)) > 10
    across = alt.Axis(**plain, labelOverlap=False, labelAngle=-40 if long else 0)
    base = canvas.rows(r for r in rows if r["panel"] in panels).encode(
        x=alt.X("said:N", sort=names, title=canvas.words("axis_said"), axis=across),
        y=alt.Y("true:N", sort=names, title=canvas.words("axis_true"), axis=look),
        tooltip=[
            alt.Tooltip("true:N", title=canvas.words("axis_true")),
            alt.Tooltip("said:N", title=canvas.words("axis_said")),
            alt.Tooltip("share:Q", title=canvas.words("axis_row_share"), format=".1%"),
            alt.Tooltip("n:Q", title=canvas.words("col_support"), format=","),
        ],
    )
    # Opacity rather than a ramp of colours, and never full: ink stays readable on white and on dark.
    shade = alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0.04, 0.6]), legend=None)
    size = max(150, 34 * len(names))
    drawn = alt.layer(
        base.mark_rect(color=COLOURS[0]).encode(opacity=shade),
        base.mark_text(fontSize=11).encode(text=alt.Text("share:Q", format=".1%")),
    ).properties(width=size, height=max(64, 30 * len(names)))
    head = alt.Header(
        title=None, labelExpr="split(datum.label, '\\n')", labelFontWeight="bold", labelLimit=190
    )
    columns = max(1, min(3, WIDTH // (size + 20)))
    facet = drawn.facet(alt.Facet("panel:N", sort=panels, header=head), columns=columns)
    # Each panel has its own axis: a last row that is not full would leave one under nothing.
    return canvas.spec(facet.resolve_axis(x="independent"))


def _total(arm: Arm, study: Study) -> np.ndarray | None:
    """The confusion matrices of an arm's finished runs, summed; None if they do not fit together."""
    matrices = [
        np.array(r.confusion, dtype=float)
        for r in arm.runs
        if r.finished and r.confusion and r.seed in study.seeds
    ]
    shapes = {m.shape for m in matrices}
    if len(shapes) != 1 or len({*next(iter(shapes))}) != 1 or matrices[0].ndim != 2:
        return None
    return np.sum(matrices, axis=0)  # type: ignore[no-any-return]


def _names(study: Study, n: int) -> list[str]:
    """The classes' names as runs recorded them; their numbers where none did."""
    found = (run.classes for run in study.runs if len(set(run.classes)) == n)
    return next(found, [str(i) for i in range(n)])
