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


def test_the_line_is_least_squares_with_its_t_interval():
    draw = np.random.default_rng(0)
    sizes = np.repeat([1e5, 3e5, 2e6], 3)
    gaps = 0.1 - 0.02 * np.log2(sizes / 1e5) + 0.01 * draw.standard_normal(9)
    line = Line("frozen", "baseline", metric("ppl"), sizes, gaps)
    known = stats.linregress(np.log2(sizes), gaps)
    assert line.slope.mean == pytest.approx(known.slope)
    assert line.slope.se == pytest.approx(known.stderr)
    assert line.slope.df == 7
    assert line.at(1.0).mean == pytest.approx(known.intercept)
    assert line.at(1.0).se == pytest.approx(known.intercept_stderr)
    assert line.seen(3e5).mean == pytest.approx(gaps[3:6].mean())
    assert line.seen(3e5).df == 2


def test_gaps_that_grow_with_the_tokens(tmp_path):
    folders = studies(tmp_path, (0.05, 0.10, 0.15), steps=(300, 600, 1200))
    found = growth([read_study(folder) for folder in folders])
    assert found is not None
    assert found.by == "tokens"
    assert found.sizes == (300 * 2048, 600 * 2048, 1200 * 2048)
    (line,) = found.lines
    assert (line.arm, line.other) == ("frozen", "baseline")
    low, high = line.slope.interval()
    assert low < math.log(1.15 / 1.05) / 2 < high
    assert low > 0


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


@pytest.mark.parametrize("differs", ["dataset", "model and tokens", "nothing", "one study"])
def test_no_trend_where_not_one_size_alone_differs(tmp_path, differs):
    each = {"dataset": {"dataset": ("sotu", "stories"), "steps": (300, 600)}}.get(differs, {})
    if differs == "model and tokens":
        each = {"steps": (300, 600)}
    folders = studies(tmp_path, (0.1,) if differs == "one study" else (0.1, 0.1), **each)
    if differs == "model and tokens":
        resize(folders[1], 3_000_000, 256)
    read = [read_study(folder) for folder in folders]
    assert growth(read) is None
    assert "growth" not in document(read, Words("en")).charts
