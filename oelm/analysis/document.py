"""Put a report together: sections of blocks and the charts between them, independent of format."""

import datetime
from collections.abc import Sequence
from functools import partial

from oelm.analysis import growth, intervals, tables
from oelm.analysis.blocks import Block, Document, paragraph, section
from oelm.analysis.charts import Palette
from oelm.analysis.conclusions import headline
from oelm.analysis.metrics import metric
from oelm.analysis.sections import study_sections
from oelm.analysis.study import Study
from oelm.analysis.verdicts import State, Verdict, judge
from oelm.analysis.words import Words
from oelm.version import __version__

STATES: tuple[State, ...] = ("supported", "refuted", "undecided")


def document(
    studies: Sequence[Study], words: Words, *, places: Sequence[str] = (), live: bool = False
) -> Document:
    """The report on one study, or on several side by side."""
    arms = tuple(dict.fromkeys(name for study in studies for name in _ordered(study)))
    several = len(studies) > 1
    doc = Document(words, _title(words, studies), Palette(arms))
    judged = [(study, judge(study)) for study in studies]
    doc.verdicts = [(study.name, verdict) for study, verdicts in judged for verdict in verdicts]
    doc.counts = {s: sum(v.state == s for _, v in doc.verdicts) for s in STATES}
    if several:
        doc.lead = words("head_several", n=len(studies), counts=words("head_counts", **doc.counts))
        blocks = _overview(doc, studies)
        doc.sections += [s for s in [section("overview", words("sec_overview"), blocks)] if s]
    else:
        doc.lead = headline(words, *judged[0])
        doc.meta = _meta(words, studies[0])
        doc.banners = _banners(words, studies[0], live=live)
    for place, (study, verdicts) in enumerate(judged, 1):
        doc.problems += study.all_problems()
        prefix = f"s{place}-" if several else ""
        if several:
            doc.sections.append({"id": prefix + "study", "title": study.name, "part": True})
            doc.sections[-1]["blocks"] = _opening(words, study, verdicts)
        doc.sections += [s for s in study_sections(doc, study, verdicts, prefix, places) if s]
    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    doc.made = words("made_by", version=__version__, date=made)
    return doc


def _ordered(study: Study) -> list[str]:
    """The reference first, so that it has the first colour everywhere."""
    names = [study.reference.name, *study.arms]
    return list(dict.fromkeys(names))


def _title(words: Words, studies: Sequence[Study]) -> str:
    if len(studies) > 1:
        return words("title_several")
    study = studies[0]
    single = study.path is None and not study.source
    return words("title_comparison") if single else words("title", name=study.name)


def _meta(words: Words, study: Study) -> str:
    done = sum(run.finished for run in study.runs)
    runs = words("unfinished_runs", done=done, all=len(study.runs))
    meta = words("meta", arms=len(study.arms), seeds=len(study.seeds), runs=runs)
    return f"{study.question} — {meta}" if study.question else meta


def _banners(words: Words, study: Study, *, live: bool) -> list[str]:
    banners = [words("quoted_banner", source=study.source)] if study.source else []
    planned = [run for arm in study.arms.values() for run in arm.runs if run.seed in study.seeds]
    done = sum(run.finished for run in planned)
    if live:
        banners.append(words("live_banner"))
    if done < len(planned):
        banners.append(words("incomplete_banner", done=done, all=len(planned)))
    return banners


def _opening(words: Words, study: Study, verdicts: list[Verdict]) -> list[Block]:
    """What a study among others says first."""
    blocks = [paragraph(headline(words, study, verdicts), style="lead")]
    blocks.append(paragraph(_meta(words, study), style="note"))
    return blocks + [
        paragraph(text, style="warning") for text in _banners(words, study, live=False)
    ]


def _overview(doc: Document, studies: Sequence[Study]) -> list[Block | None]:
    """Several studies at a glance: their gaps, kind by kind, how these grow, and all their claims."""
    words, blocks = doc.words, []
    for ratio in (True, False):
        alike = [s for s in studies if metric(s.primary).ratio == ratio]
        if alike:
            build = partial(intervals.overview, studies=alike)
            id = "overview" if ratio else "overview-points"
            blocks.append(doc.figure(id, words("fig_overview"), words("fig_overview_note"), build))
    if found := growth.growth(studies):
        note = words("fig_growth_note", factor=f"{growth.BEYOND:g}")
        build = partial(growth.chart, found=found)
        blocks.append(doc.figure("growth", words(f"fig_growth_{found.by}"), note, build))
        blocks.append(growth.trend_table(words, found))
    return [*blocks, tables.claims(words, doc.verdicts)]
