import html.parser
import json
import math
import re

import pytest
from markdown_it import MarkdownIt
from synthetic import blocks, labels, write, write_run, write_study

from oelm.analysis import numbers, pictures, report
from oelm.analysis.document import document
from oelm.analysis.markdown import fence, markdown, plain
from oelm.analysis.sources import load, read_reference, read_study
from oelm.analysis.statistics import compare
from oelm.analysis.verdicts import confirmations
from oelm.analysis.words import Words, table, text
from oelm.errors import UserError

NASTY = "<img src=x onerror=alert(1)>"
QUOTES = 'it\'s "so" & $x$ |_*`` [a](b)'
LONG = "a-rather-long-name-of-an-arm-that-goes-on-and-on-" * 3
CHINESE = "冻结正交组"
ATTACK = "</script><script>alert(document.domain)</script>"


@pytest.fixture(scope="module")
def nasty_folder(tmp_path_factory):
    """A study whose every name and text tries to be markup."""
    arms = {"baseline": ("baseline", 42.0), NASTY: ("oelm_v2", 46.0), QUOTES: ("oelm_random", 48.0)}
    arms |= {LONG: ("oelm_gain", 45.0), CHINESE: ("oelm_lowrank", 43.0)}
    claim = {"metric": "ppl", "arm": NASTY, "vs": "baseline", "at_most": "+5%", "text": ATTACK}
    folder = write_study(
        tmp_path_factory.mktemp("nasty"),
        name="nasty",
        arms=arms,
        seeds=(0, 1),
        claims={ATTACK: claim},
        question=ATTACK,
    )
    run = folder / "baseline" / "seed-0"
    write(run / "samples.json", [{"prompt": ATTACK, "text": ATTACK + "```\n# x"}])
    write(
        folder / "confounds.json", [{"kind": ATTACK, "line": ATTACK, "arms": [], "claim": ATTACK}]
    )
    return folder


def test_both_languages_say_the_same_things():
    for key, said in table().items():
        assert set(said) == {"en", "zh"}, key
        fields = [set(re.findall(r"{(\w+)}", sentence)) for sentence in said.values()]
        assert fields[0] == fields[1], key
        assert said["zh"] != said["en"], key
        assert re.search("[\u4e00-\u9fff，。：；“”（）]", said["zh"]), key


def test_a_text_is_said_in_the_language_of_the_report():
    waiting = text("not_finished", n=2, state=text("state_running"), runs="a, b")
    assert Words("en")(waiting) == str(waiting) == "not finished: 2 running (a, b)"
    assert Words("zh")(waiting) == "未完成：2 个运行中（a, b）"


def test_the_report_has_all_its_parts(doc):
    assert [s["id"] for s in doc.sections] == [
        "claims", "results", "confirmation", "curves", "parts", "cost", "probes", "samples", "conclusion",
        "confounds", "limitations", "audit", "appendix",
    ]  # fmt: skip
    assert list(doc.charts) == [
        "forest", "confirmation", "val", "gap", "train", "lr", "parts", "step", "tokens", "target", "memory",
        "scatter", "layers", "probe0",
    ]  # fmt: skip
    assert doc.lead.startswith(
        "“Frozen orthogonal Q/K cost at most 5 % of perplexity” is refuted: +10."
    )
    assert doc.counts == {"supported": 4, "refuted": 1, "undecided": 0}


def test_the_results_table_shows_the_numbers_of_the_runs(doc, study_folder):
    results = next(s for s in doc.sections if s["id"] == "results")["blocks"][0]
    rows = {row[0]["text"]: [c["text"] for c in row[1:]] for row in results["rows"]}
    frozen = read_study(study_folder).arms["frozen"]
    assert rows["frozen"][0] == "5/5"
    losses = [run.value("loss") for run in frozen.runs]
    assert rows["frozen"][6].startswith(f"{sum(losses) / 5:.3f} ±")
    assert rows["frozen"][2].startswith("+10.")
    assert rows["baseline"][2] == "–"


def test_the_scenario_is_chosen_by_the_gap(doc):
    conclusion = next(s for s in doc.sections if s["id"] == "conclusion")
    (marked,) = [r for r in conclusion["blocks"][1]["rows"] if r[2]["text"]]
    assert marked[0]["text"] == "Frozen is worse by more than 5\u202f%"


def test_a_comparison_stands_on_val_and_on_test(doc, study_folder):
    study = read_study(study_folder)
    found = {(t.arm.name, t.other.name): t for t in confirmations(study)}
    assert list(found)[:3] == [
        ("frozen", "baseline"),
        ("lowrank", "baseline"),
        ("frozen", "matched"),
    ]
    assert len(found) == 6  # each other arm against the baseline, and one pair of a claim
    sides = [study.arms[a].values("test_ppl", study.seeds) for a in ("frozen", "baseline")]
    seen = found["frozen", "baseline"]
    assert seen.test == compare(*sides, log=True)
    assert seen.val != seen.test
    shown = next(s for s in doc.sections if s["id"] == "confirmation")["blocks"][1]
    row = [c["text"] for c in shown["rows"][0]]
    assert shown["columns"][1::2] == ["Gap in val PPL", "Gap in test PPL", "Seeds"]
    assert row[0] == "frozen vs baseline"
    assert row[1] == numbers.percent(math.expm1(seen.val.mean))
    assert row[3] == numbers.percent(math.expm1(seen.test.mean))


def test_a_claim_on_test_is_marked_as_a_confirmation(tmp_path):
    claim = {"arm": "frozen", "vs": "baseline", "at_most": "+5%"}
    claims = {"val": {**claim, "metric": "ppl"}, "test": {**claim, "metric": "test_ppl"}}
    arms = {"baseline": ("baseline", 42.0), "frozen": ("oelm_v2", 46.0)}
    folder = write_study(tmp_path, arms=arms, seeds=(0, 1, 2), claims=claims)
    doc = document([read_study(folder)], Words("en"))
    on_val, on_test = blocks(doc, "claims")[0]["items"]
    assert (on_val["mark"], on_test["mark"]) == ("", "confirmation on test")
    assert on_val["twin"] == f"On test: {on_test['estimate']} ({on_test['interval']})"
    assert on_test["twin"] == f"On val: {on_val['estimate']} ({on_val['interval']})"
    assert "**[confirmation on test]**" in markdown(doc, "pictures")
    assert [v.family for _, v in doc.verdicts] == [2, 2]  # what is shown beside is not tested


def test_probes_run_against_the_step_and_by_layer(tmp_path):
    arms = {"baseline": ("baseline", 42.0), "frozen": ("oelm_v2", 46.0)}
    folder = write_study(tmp_path, arms=arms, seeds=(0, 1), claims={}, probes=True)
    study = read_study(folder)
    doc = document([study], Words("en"))
    titles = [b["title"] for s in doc.sections if s["id"] == "probes" for b in s["blocks"][2:]]
    assert titles == [
        "In-context copying: accuracy",
        "In-context copying: gain",
        "Sharpness of attention by layer",
        "Spread of attention logits by layer",
    ]
    assert "60%" in labels(doc.chart("probe0", web=False))
    (rows,) = doc.chart("layer0", web=False)["datasets"].values()
    assert [(r["arm"], r["at"]) for r in rows] == [(a, i) for a in arms for i in range(4)]
    ends = [float(r.probes["attention_entropy_3"]["value"][-1]) for r in study.arms["frozen"].runs]
    assert rows[-1]["mean"] == pytest.approx(sum(ends) / 2)
    assert (rows[-1]["low"], rows[-1]["high"]) == (min(ends), max(ends))


class Page(html.parser.HTMLParser):
    """What a browser would make of the page: elements, attributes, text."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *a) for a in attrs]

    def handle_data(self, data):
        self.text.append(data)


def test_names_and_texts_never_become_markup(nasty_folder, tmp_path):
    doc = document([read_study(nasty_folder)], Words("en"))
    report.write(doc, tmp_path, ["html", "md", "pdf"])
    source = (tmp_path / "report.html").read_text()
    page = Page(source)
    assert page.tags.count("script") == 4  # theme, data, libraries, ours
    assert "img" not in page.tags
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert not [
        a for a in page.attributes if a[1] in ("src", "href") and not str(a[2]).startswith("#")
    ]
    shown = "".join(page.text)
    for name in (NASTY, QUOTES, LONG, CHINESE, ATTACK):
        assert name in shown
    rendered = (
        MarkdownIt("commonmark", {"html": True})
        .enable("table")
        .render((tmp_path / "report.md").read_text())
    )
    tags = set(Page(rendered).tags)
    assert not tags & {"script", "a"}
    assert all(
        not s.startswith("x") for t, n, s in Page(rendered).attributes if (t, n) == ("img", "src")
    )
    assert QUOTES.replace("``", "``") in "".join(Page(rendered).text)
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF-")


def test_markdown_tables_and_pictures_render(doc, tmp_path):
    rendered = Page(
        MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown(doc, "pictures"))
    )
    assert rendered.tags.count("img") == len(doc.charts)
    assert rendered.tags.count("table") == len(blocks(doc, "table")) + len(blocks(doc, "claims"))
    assert plain("a_b|c") == r"a\_b\|c"
    assert fence("``` x").startswith("````text\n")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_is_one_small_file_that_asks_for_nothing(doc, tmp_path, language):
    doc = document([load(["reference:tinystories"], language)[0]], Words(language))
    (path,) = report.write(doc, tmp_path, ["html"])
    source = path.read_text()
    assert len(source.encode()) < 6e6
    assert "default-src 'none'" in source
    assert not re.search(r'(src|href)="(?!#)', source.split("<script>")[0])


def test_a_chinese_report_has_a_glyph_for_every_character(study_folder, tmp_path):
    from fontTools.ttLib import TTFont

    doc = document([read_study(study_folder)], Words("zh"))
    drawn = pictures.draw(doc, report.all_text(doc))
    glyphs = TTFont(drawn.font.folder / "Regular.ttf").getBestCmap()
    missing = {c for c in report.all_text(doc) if ord(c) not in glyphs and not c.isspace()}
    assert not missing
    assert drawn.font.family in drawn.svg["val"]


def test_identifiers_of_inline_pictures_do_not_collide(doc):
    drawn = pictures.draw(doc, "")
    ids = [i for id in doc.charts for i in re.findall(r'\bid="([^"]+)"', drawn.inline(id))]
    assert len(ids) == len(set(ids))


def test_a_study_without_a_finished_run_still_gets_a_report(tmp_path):
    folder = write_study(
        tmp_path,
        arms={"baseline": ("baseline", 42), "frozen": ("oelm_v2", 45)},
        seeds=(0, 1),
        state="running",
    )
    doc = document([read_study(folder)], Words("en"), live=True)
    assert doc.lead == "No finished run yet: nothing can be said."
    assert "no run has finished" in "\n".join(map(str, doc.problems))
    assert "curves" in [s["id"] for s in doc.sections]
    assert any("is running" in banner for banner in doc.banners)
    assert len(report.write(doc, tmp_path / "out", ["html", "md", "pdf"], live=True)) == 3
    assert '"reload": 10' in (tmp_path / "out" / "report.html").read_text()


def test_an_empty_study_still_gets_a_report(tmp_path):
    folder = write_study(
        tmp_path, arms={"a": ("baseline", 42)}, seeds=(0,), state="waiting", claims={}
    )
    doc = document([read_study(folder)], Words("en"))
    assert report.write(doc, tmp_path / "out", ["html", "md", "pdf"])


def test_classification_is_reported_in_points_with_its_classes(tmp_path):
    claims = {"kept": {"metric": "accuracy", "arm": "frozen", "vs": "baseline", "at_least": "-2pt"}}
    arms = {"baseline": ("baseline", 0.81), "frozen": ("oelm_v2", 0.80)}
    folder = write_study(tmp_path, arms=arms, seeds=(0, 1, 2), claims=claims, task="classification")
    doc = document([read_study(folder)], Words("en"))
    assert "pt (95 % interval" in doc.lead
    ids = [s["id"] for s in doc.sections]
    assert "classes" in ids
    assert "target" not in doc.charts
    scores, _, matrix = next(s for s in doc.sections if s["id"] == "classes")["blocks"]
    assert [r[1]["text"] for r in scores["rows"]] == ["negative", "positive"] * 2
    cells = next(iter(doc.chart(matrix["id"], web=False)["datasets"].values()))
    by_row = {(c["panel"], c["true"], c["said"]): c["share"] for c in cells}
    assert len(by_row) == 8
    assert by_row["frozen", "negative", "positive"] == pytest.approx(0.2, abs=0.02)
    assert {"negative", "positive", "true class", "class given"} <= set(
        labels(doc.chart(matrix["id"], web=False))
    )
    # A gap of accuracies is one of points, and its axis says so with plain numbers.
    assert not [t for t in labels(doc.chart("gap", web=False)) if t.endswith("%")]
    assert report.write(doc, tmp_path / "out", ["html", "pdf"])


@pytest.mark.parametrize(
    ("accuracy", "verb"), [(0.9, "beat frozen random ones"), (0.7, "No advantage of")]
)
def test_more_accuracy_is_better_and_counted_in_points(tmp_path, accuracy, verb):
    arms = {"baseline": ("baseline", 0.8), "frozen": ("oelm_v2", accuracy)}
    arms["matched"] = ("random_matched", 0.8)
    folder = write_study(tmp_path, arms=arms, claims={}, task="classification", noise=0.001)
    text = json.dumps(document([read_study(folder)], Words("en")).sections, ensure_ascii=False)
    (said,) = (line for line in text.split('"') if "(frozen)" in line)
    assert verb in said
    assert "\u202fpt" in said
    assert "\u202f%" not in said.replace("95\u202f%", "")


def test_a_grid_gets_its_curve_and_the_chosen_point_is_named(tmp_path):
    for arm, method in (("baseline", "baseline"), ("frozen", "oelm_v2")):
        for i, point in enumerate(("max_lr=0.0003", "max_lr=0.001", "max_lr=0.003")):
            for seed in (0, 1):
                folder = tmp_path / "g" / arm / point / f"seed-{seed}"
                write_run(
                    folder,
                    method=method,
                    seed=seed,
                    final=42 + (i - 1) ** 2 + 3 * (arm == "frozen"),
                )
    doc = document([read_study(tmp_path / "g")], Words("en"))
    drawn = labels(doc.chart("tuning", web=False))
    assert {"0.0003", "0.001", "0.003", "peak learning rate (max_lr)"} <= set(drawn)
    (rows,) = doc.chart("tuning", web=False)["datasets"].values()
    largest = [(r["arm"], r["at"]) for r in rows if r["size"] == max(q["size"] for q in rows)]
    assert largest == [("baseline", 0.001), ("frozen", 0.001)]
    text = json.dumps(doc.sections, ensure_ascii=False)
    assert "frozen (max_lr=0.001)" in text
    assert "flatters every arm a little" in text


def test_several_studies_stand_side_by_side(study_folder, tmp_path):
    studies = [
        read_study(study_folder),
        read_reference("reference:tinystories"),
        read_reference("reference:xnli-bert"),
    ]
    doc = document(studies, Words("en"))
    assert list(doc.charts)[:2] == ["overview", "overview-points"]
    assert doc.lead == "3 studies side by side: 4 claims supported, 1 refuted, 4 undecided."
    assert len({s["id"] for s in doc.sections}) == len(doc.sections)
    assert report.write(doc, tmp_path, ["html", "md", "pdf"])


def test_an_unknown_format_is_refused(doc, tmp_path):
    with pytest.raises(UserError, match="did you mean 'pdf'"):
        report.write(doc, tmp_path, ["pdff"])
