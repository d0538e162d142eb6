import json
import re

import altair as alt
import pytest
import vl_convert
from synthetic import ARMS, blocks, labels, write_study

from oelm.analysis import pictures
from oelm.analysis.charts import COLOURS, DASHES, Canvas, Palette, log_ticks
from oelm.analysis.document import document
from oelm.analysis.sources import read_study
from oelm.analysis.words import Words


def test_every_chart_is_valid_vega_lite_and_compiles(doc):
    for id in doc.charts:
        spec = doc.chart(id, web=True)
        vl_convert.vegalite_to_vega(spec, vl_version=pictures.VEGA_LITE)
        alt.Chart.from_dict({**spec, "datasets": {}})  # checks it against the schema


def scales(spec):
    """Every scale by arm in a chart: arm → look."""
    if isinstance(spec, dict):
        if spec.get("field") == "arm" and "scale" in spec:
            yield from zip(spec["scale"]["domain"], spec["scale"]["range"], strict=True)
        for value in spec.values():
            yield from scales(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from scales(value)


def test_an_arm_has_one_look_in_every_chart(doc):
    seen = {}
    for id in doc.charts:
        for arm, look in scales(doc.chart(id, web=False)):
            if arm in ARMS and str(look).startswith("#"):
                assert seen.setdefault(arm, look) == look
    assert len(set(seen.values())) == len(ARMS)
    many = Palette(tuple(map(str, range(28))))
    looks = {(many.colour(a), tuple(many.dash(a))) for a in many.arms}
    assert len(looks) == len(COLOURS) * len(DASHES)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (18, 210, [20, 50, 100, 200]),
        (60, 140, [60, 80, 100, 120]),
        (40, 1000, [50, 100, 200, 500, 1000]),
        (41, 44, [41, 42, 43, 44]),
        (1.01, 1.02, [1.01, 1.015, 1.02]),
        (5, 9e5, [10, 100, 1e3, 1e4, 1e5]),
    ],
)
def test_log_ticks_are_round_and_few(low, high, ticks):
    assert log_ticks(low, high) == ticks


def test_numbers_on_axes_are_plain(doc):
    for id in doc.charts:
        assert not [t for t in labels(doc.chart(id, web=False)) if re.search(r"\de[+\-−]?\d", t)], (
            id
        )
    assert {"0.001", "0.002", "0.003"} <= set(labels(doc.chart("lr", web=False)))
    assert "training time, s" in labels(doc.chart("target", web=False))


def test_margins_are_explained_where_there_are_any(doc, tmp_path):
    arms = {"baseline": ("baseline", 42.0), "frozen": ("oelm_v2", 46.0)}
    folder = write_study(tmp_path, arms=arms, seeds=(0, 1), claims={}, steps=1200)
    without = document([read_study(folder)], Words("en"))
    for made, wanted in ((doc, True), (without, False)):
        notes = {b["id"]: b["note"] for b in blocks(made, "figure")}
        assert [n.endswith("margins of the claims.") for n in (notes["forest"], notes["gap"])] == [
            wanted
        ] * 2
    assert {"800", "1,000"} <= set(labels(without.chart("val", web=False)))


def test_long_labels_take_two_lines(tmp_path):
    names = ("gaussian-matched-trained", "orthogonal-matched-trained", "orthogonal-matched-frozen")
    methods = ("baseline", "oelm_no_freeze", "oelm_v2")
    arms = {name: (method, 42.0) for name, method in zip(names, methods, strict=True)}
    folder = write_study(tmp_path, arms=arms, seeds=(0, 1), claims={})
    doc = document([read_study(folder)], Words("en"))
    drawn = "".join(labels(doc.chart("parts", web=False)))
    for name in names:
        assert name in drawn
    assert "…" not in drawn


def test_hidden_arms_leave_the_rows_of_a_web_chart_only():
    spec = Canvas(Palette(("a",)), Words("en"), web=True)
    chart = spec.finish(spec.data([{"arm": "a"}]).mark_point(), height=10)
    assert "hidden" in json.dumps(chart["transform"])
    assert {"hidden", "pointed"} == {p["name"] for p in chart["params"]}
