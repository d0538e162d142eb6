import json
import math

import numpy as np
import pytest
import yaml
from scipy import stats

from oelm.analysis.document import document
from oelm.analysis.growth import Line, growth
from oelm.analysis.metrics import metric
from oelm.analysis.sources import read_study
from oelm.analysis.words import Words
from tests.analysis.synthetic import blocks, labels, write_study


def studies(root, gaps, **each):
    """One study per gap of the frozen arm; `each` holds what differs between them."""
    found = []
    for i, gap in enumerate(gaps):
        own = {name: values[i] for name, values in each.items()}
        arms = {"baseline": ("baseline", 40.0), "frozen": ("oelm_v2", 40.0 * (1 + gap))}
        found.append(write_study(root, name=f"study-{i}", arms=arms, seeds=(0, 1, 2), **own))
    return found


def resize(folder, total, d_model):
    """As if the study's models were of this size."""
    for path in folder.glob("*/*/freeze_audit.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"total": total}))
    for path in folder.glob("*/*/config.yaml"):
        config = yaml.safe_load(path.read_text())
        config["resolved"]["model"]["d_model"] = d_model
        path.write_text(yaml.safe_dump(config))


def test_the_line_is_least_squares_through_the_means():
    draw = np.random.default_rng(0)
    places = np.array([1e5, 3e5, 2e6, 9e6])
    sizes = np.repeat(places, 3)
    gaps = 0.1 - 0.02 * np.log2(sizes / 1e5) + 0.01 * draw.standard_normal(12)
    line = Line("frozen", "baseline", metric("ppl"), sizes, gaps)
    known = stats.linregress(np.log2(places), gaps.reshape(4, 3).mean(1))
    assert line.slope.mean == pytest.approx(known.slope)
    assert line.slope.se == pytest.approx(known.stderr)
    assert line.slope.df == 2
    assert line.at(1.0).mean == pytest.approx(known.intercept)
    assert line.at(1.0).se == pytest.approx(known.intercept_stderr)
    assert line.seen(3e5).mean == pytest.approx(gaps[3:6].mean())
    assert line.seen(3e5).df == 2


def test_means_that_lie_on_a_line_by_luck_get_the_interval_of_their_seeds():
    places, spread = np.array([1e5, 2e5, 4e5, 8e5]), np.array([-0.03, 0.0, 0.03])
    gaps = (np.arange(4)[:, None] * 0.02 + spread).ravel()
    slope = Line("a", "b", metric("ppl"), np.repeat(places, 3), gaps).slope
    assert slope.mean == pytest.approx(0.02)
    assert slope.df == 8
    assert slope.se == pytest.approx(0.03 / math.sqrt(3) / math.sqrt(5))


def test_the_interval_covers_a_truth_that_is_not_quite_straight():
    draw, places, covered = np.random.default_rng(1), np.array([1e5, 3e5, 1e6, 3e6]), 0
    for _ in range(400):
        off = 0.02 * np.log2(places / 1e5) + 0.01 * draw.standard_normal(4)  # shared by all seeds
        gaps = np.repeat(off, 20) + 0.003 * draw.standard_normal(80)
        low, high = Line("a", "b", metric("ppl"), np.repeat(places, 20), gaps).slope.interval()
        covered += low < 0.02 < high
    assert covered > 0.92 * 400


def test_two_sizes_give_the_change_between_them_and_no_more():
    gaps = np.array([0.10, 0.11, 0.12, 0.20, 0.21, 0.22])
    line = Line("a", "b", metric("ppl"), np.repeat([1e6, 4e6], 3), gaps)
    assert line.slope.mean == pytest.approx(0.05)
    assert line.slope.df == 4
    assert line.slope.se == pytest.approx(math.sqrt(2 * 0.01**2 / 3) / 2)
    assert line.at(2e6).interval() is not None
    assert line.at(4e7).mean == pytest.approx(0.21 + 0.05 * math.log2(10))
    assert line.at(4e7).interval() is None


def test_gaps_that_grow_with_the_tokens(tmp_path):
    folders = studies(tmp_path, (0.05, 0.10, 0.15), steps=(300, 600, 1200))
    found = growth([read_study(folder) for folder in folders])
    assert found is not None
    assert found.by == "tokens"
    assert found.sizes == (300 * 2048, 600 * 2048, 1200 * 2048)
    (line,) = found.lines
    assert (line.arm, line.other) == ("frozen", "baseline")
    assert line.slope.mean == pytest.approx(math.log(1.15 / 1.05) / 2, abs=0.01)
    low, high = line.slope.interval()
    assert low < math.log(1.15 / 1.05) / 2 < high


def test_the_report_on_studies_of_three_sizes_draws_and_tells_the_trend(tmp_path):
    folders = studies(tmp_path, (0.10, 0.10, 0.10))
    for folder, (total, d_model) in zip(
        folders, ((200_000, 64), (650_000, 128), (2_300_000, 256)), strict=True
    ):
        resize(folder, total, d_model)
    doc = document([read_study(folder) for folder in folders], Words("en"))
    drawn = labels(doc.chart("growth", web=False))
    assert {"parameters of the reference arm", "1M", "10M"} <= set(drawn)
    (table,) = (
        b
        for b in blocks(doc, "table")
        if b["columns"][0] == "Comparison" and "200k" in b["columns"]
    )
    assert table["columns"][1:5] == ["200k", "650k", "2.3M", "Change per doubling"]
    assert table["columns"][6] == "The line at 23M"
    (row,) = table["rows"]
    assert row[0]["text"] == "frozen vs baseline"
    assert all(9 < float(cell["text"].split("\u202f")[0]) < 11 for cell in row[1:4])


@pytest.mark.parametrize(
    "differs", ["dataset", "weight_decay", "model and tokens", "nothing", "one study"]
)
def test_no_trend_where_not_one_size_alone_differs(tmp_path, differs):
    more = {"dataset": ("sotu", "stories"), "weight_decay": (0.1, 0.0)}
    each = {differs: more[differs], "steps": (300, 600)} if differs in more else {}
    if differs == "model and tokens":
        each = {"steps": (300, 600)}
    folders = studies(tmp_path, (0.1,) if differs == "one study" else (0.1, 0.1), **each)
    if differs == "model and tokens":
        resize(folders[1], 3_000_000, 256)
    read = [read_study(folder) for folder in folders]
    assert growth(read) is None
    assert "growth" not in document(read, Words("en")).charts
