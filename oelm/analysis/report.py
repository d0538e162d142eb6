"""Write a report as a page, as Markdown with pictures, and as a paper."""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import typst
from markupsafe import Markup

from oelm.analysis import fonts
from oelm.analysis.blocks import Document
from oelm.analysis.markdown import markdown
from oelm.analysis.pictures import Pictures, draw, script
from oelm.errors import UserError, unknown

FORMATS = ("html", "md", "pdf")
RELOAD = 10
"""Seconds after which a live page loads itself again."""


def write(doc: Document, folder: Path, formats: Sequence[str], *, live: bool = False) -> list[Path]:
    """Write the report into `folder` in each format; each file appears whole or not at all."""
    for name in formats:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from None
    pictures = draw(doc, all_text(doc))
    written = []
    for name in dict.fromkeys(formats):
        path = folder / f"report.{name}"
        if name == "html":
            content = page(doc, pictures, live=live).encode()
        elif name == "md":
            _pictures(doc, pictures, folder / "pictures")
            content = markdown(doc, "pictures").encode()
        else:
            content = paper(doc, pictures)
        _replace(path, content)
        written.append(path)
    return written


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _template(name: str) -> str:
    return files("oelm.analysis.templates").joinpath(name).read_text(encoding="utf-8")


def all_text(doc: Document) -> str:
    """Everything a reader will see, charts included; escapes of JSON undone."""
    charts = [doc.chart(id, web=False) for id in doc.charts]
    parts = [doc.title, doc.lead, doc.meta, doc.made, *doc.banners, *doc.palette.arms]
    said = [
        doc.words(key)
        for key in ("supported", "refuted", "undecided", "figure", "contents", "colon")
    ]
    said += [doc.words(key) for key in ("show_hide", "theme")]
    return json.dumps([parts, said, doc.sections, charts], ensure_ascii=False)


def page(doc: Document, pictures: Pictures, *, live: bool = False) -> str:
    """One HTML file that needs nothing else: styles, fonts, data and scripts are inside."""
    charts = {id: doc.chart(id, web=True) for id in doc.charts}
    data = {"charts": charts, "arms": doc.palette.arms, "reload": RELOAD if live else 0}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    family = f'"{pictures.font.family}"' if pictures.font else "system-ui"
    return environment.from_string(_template("report.html.j2")).render(
        doc=doc,
        words=doc.words,
        svgs={id: pictures.inline(id) for id in doc.charts},
        css=Markup(_template("report.css")),
        font_face=Markup(pictures.font.css() if pictures.font else ""),
        font_name=Markup(family),
        js=Markup(_template("report.js")),
        vega=Markup(script()),
        # Inside a script element only `<` could end it.
        data=Markup(json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")),
    )


def _pictures(doc: Document, pictures: Pictures, folder: Path) -> None:
    """A PNG file for each chart, for Markdown."""
    folder.mkdir(exist_ok=True)
    for id in doc.charts:
        _replace(folder / f"{id}.png", pictures.png(id))


def paper(doc: Document, pictures: Pictures) -> bytes:
    """A PDF made by typst from JSON and SVG."""
    family = pictures.font.family if pictures.font else ""
    chinese = doc.words.language == "zh"
    data = {
        "title": doc.title,
        "lead": doc.lead,
        "meta": doc.meta,
        "made": doc.made,
        "banners": doc.banners,
        "figure": doc.words("figure"),
        "colon": doc.words("colon"),
        "language": doc.words.language,
        "fonts": [f for f in ([family] if chinese else [fonts.SERIF, family]) if f],
        "colours": {arm: doc.palette.colour(arm) for arm in doc.palette.arms},
        "tally": [
            {"state": state, "label": f"{n} {doc.words(state)}"}
            for state, n in doc.counts.items()
            if n
        ],
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        widths = {}
        for id in doc.charts:
            svg = pictures.with_font(
                id, family if chinese else f"{fonts.SERIF}, {family or 'serif'}"
            )
            (folder / f"{id}.svg").write_text(svg, encoding="utf-8")
            found = re.search(r'width="([\d.]+)"', svg)
            widths[id] = float(found[1]) if found else 600.0
        data["sections"] = [
            {
                "id": s["id"],
                "title": s["title"],
                "part": s["part"],
                "blocks": _paired(s["blocks"], widths),
            }
            for s in doc.sections
        ]
        (folder / "report.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
        (folder / "report.typ").write_text(_template("report.typ"), encoding="utf-8")
        paths = [str(pictures.font.folder)] if pictures.font else []
        content = typst.compile(str(folder / "report.typ"), root=place, font_paths=paths)
    assert isinstance(content, bytes)
    return content


def _paired(blocks: Iterable[dict[str, Any]], widths: dict[str, float]) -> list[dict[str, Any]]:
    """Figures with their files; two half ones after another share a row."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if block["kind"] == "figure":
            block = {**block, "file": f"{block['id']}.svg", "width": widths[block["id"]]}
            before = found[-1] if found else {}
            if block["half"] and before.get("kind") == "figure" and before["half"]:
                found[-1] = {"kind": "pair", "figures": [before, block]}
                continue
        found.append(block)
    return found
