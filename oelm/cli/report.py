"""`oelm report`: decide a study's claims and write its report."""

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import tyro

from oelm.cli.options import parse
from oelm.errors import UserError

EVERY = 5.0
"""Seconds between two looks at a study that is running."""


def report(argv: list[str]) -> int:
    """Run the command."""
    return parse(_report, argv, prog="oelm report")


def _report(
    studies: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="STUDY [STUDY ...]")
    ],
    /,
    format: str = "html",
    out: Path | None = None,
    lang: Literal["en", "zh"] = "en",
    live: bool = False,
) -> int:
    """Decide the claims of studies and write a report: one, several side by side, or single runs.

    STUDIES are study folders (runs/quickstart, results/quickstart, or just quickstart), folders of
    single runs to compare, or numbers that others published (reference:tinystories).

    Args:
        studies: what to report on.
        format: html, md, pdf, or several: html,md,pdf.
        out: the folder to write to; if not given, a study's own folder, else report/.
        lang: the language of the report: en or zh.
        live: rewrite the page while the study runs, until its last run has ended.
    """
    from oelm.analysis.report import FORMATS

    formats = [name.strip() for name in format.split(",") if name.strip()]
    if not studies:
        raise UserError("name a study: oelm report runs/quickstart")
    if not formats:
        raise UserError(f"name a format: {', '.join(FORMATS)}")
    said: set[str] = set()
    while True:
        running = _once(studies, formats, out, lang, live, said)
        if not (live and running):
            return 0
        try:
            time.sleep(EVERY)
        except KeyboardInterrupt:
            _once(studies, formats, out, lang, False, said)
            return 0


def _once(
    places: tuple[str, ...],
    formats: list[str],
    out: Path | None,
    lang: Literal["en", "zh"],
    live: bool,
    said: set[str],
) -> bool:
    """Write the report once; say on stderr what is new, and whether anything still runs."""
    from oelm.analysis.document import document
    from oelm.analysis.report import write
    from oelm.analysis.sentences import line
    from oelm.analysis.sources import load
    from oelm.analysis.words import Words

    studies = load(places, lang)
    running = any(study.unfinished for study in studies)
    doc = document(studies, Words(lang), places=places, live=live and running)
    for problem in dict.fromkeys(str(p) for p in doc.problems):
        if problem not in said:
            print(f"oelm: {problem}", file=sys.stderr)
    first = not said
    said |= {"", *(str(p) for p in doc.problems)}
    one = len(studies) == 1 and studies[0].path is not None
    folder = out or (studies[0].path if one and studies[0].path else Path("report"))
    written = write(doc, folder, formats, live=live and running)
    if first or not running:
        for study, verdict in doc.verdicts:
            where = f"{study}: " if len(studies) > 1 else ""
            print(f"{verdict.state:<10} {where}{verdict.claim.name}: {line(doc.words, verdict)}")
        for path in written:
            print(path)
    return running
