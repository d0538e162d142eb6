"""What a report is made of: sections of a few kinds of blocks, which every format can show.

A block is a plain mapping with a `kind`, so that the pages' templates (and typst, through JSON)
read them without knowing what a study is. Text in blocks is text: each format escapes it itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oelm.analysis.charts import Canvas, Palette
from oelm.analysis.verdicts import Verdict
from oelm.analysis.words import Text, Words

Block = dict[str, Any]
Builder = Callable[[Canvas], dict[str, Any] | None]


def section(id: str, title: str, blocks: Sequence[Block | None]) -> Block | None:
    """A section with those blocks that there are; none if there are none."""
    kept = [block for block in blocks if block]
    return {"id": id, "title": title, "blocks": kept, "part": False} if kept else None


def paragraph(text: str, *, style: str = "plain") -> Block:
    """`style` is plain, note (small), warning or lead."""
    return {"kind": "paragraph", "text": text, "style": style}


def bullets(items: Sequence[str]) -> Block | None:
    """A list; none if it is empty."""
    return {"kind": "bullets", "items": list(items)} if items else None


def subtitle(text: str) -> Block:
    """A heading inside a section."""
    return {"kind": "subtitle", "text": text}


def code(text: str) -> Block:
    """Something to copy."""
    return {"kind": "code", "text": text}


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, left: int = 1) -> Block | None:
    """A table whose first `left` columns are words, the others numbers; columns of dashes go."""
    if not rows:
        return None
    kept = [i for i in range(len(columns)) if i < left or any(_said(row[i]) for row in rows)]
    align = ["left" if i < left else "right" for i in kept]
    cells = [[_cell(row[i]) for i in kept] for row in rows]
    words = [
        sum(len(row[i]["text"]) for row in cells) for i, side in enumerate(align) if side == "left"
    ]
    return {
        "kind": "table",
        "columns": [columns[i] for i in kept],
        "align": align,
        "rows": cells,
        "wide": words.index(max(words)),  # the column that takes the space there is
    }


def cell(text: str, *, arm: str = "", verdict: str = "", strong: bool = False) -> dict[str, Any]:
    """A cell with more than text: the colour of an arm, or the badge of a verdict."""
    return {"text": text, "arm": arm, "verdict": verdict, "strong": strong}


def _cell(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else cell(str(value))


def _said(value: Any) -> bool:
    return _cell(value)["text"] not in ("", "–")


@dataclass
class Document:
    """A whole report."""

    words: Words
    title: str
    palette: Palette
    lead: str = ""
    meta: str = ""
    made: str = ""
    banners: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    sections: list[Block] = field(default_factory=list)
    problems: list[Text] = field(default_factory=list)
    verdicts: list[tuple[str, Verdict]] = field(default_factory=list)
    """Every verdict with its study's name."""
    charts: dict[str, Builder] = field(default_factory=dict)
    """What draws each figure."""
    static: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each figure's specification for paper."""

    def figure(
        self, id: str, title: str, note: str, build: Builder, *, half: bool = False
    ) -> Block | None:
        """A block for a chart, if there is anything to draw."""
        spec = build(Canvas(self.palette, self.words))
        if spec is None:
            return None
        self.charts[id], self.static[id] = build, spec
        place = len(self.charts)
        return {"kind": "figure", "id": id, "title": title, "note": note, "half": half, "n": place}

    def chart(self, id: str, *, web: bool) -> dict[str, Any]:
        """A figure's specification."""
        if not web:
            return dict(self.static[id])
        spec = self.charts[id](Canvas(self.palette, self.words, web=web))
        assert spec is not None
        return spec
