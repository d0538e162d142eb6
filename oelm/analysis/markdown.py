"""A report as Markdown that code hosts render."""

import html
import re
from collections.abc import Iterable

from oelm.analysis.blocks import Block, Document

BADGE = {"supported": "✅", "refuted": "❌", "undecided": "❔"}


def markdown(doc: Document, pictures: str) -> str:
    """The document, with its charts as PNG files in the folder `pictures`."""
    parts = [f"# {plain(doc.title)}", f"**{plain(doc.lead)}**"]
    parts += [plain(doc.meta)] if doc.meta else []
    parts += [f"> {plain(banner)}" for banner in doc.banners]
    for section in doc.sections:
        parts.append(f"{'#' if section['part'] else '##'} {plain(section['title'])}")
        parts += [_block(doc, block, pictures) for block in section["blocks"]]
    return "\n\n".join([*parts, "---", plain(doc.made)]) + "\n"


def plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    flat = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", flat)


def fence(text: str) -> str:
    """A code block that the text cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{text}\n{marks}"


def _block(doc: Document, block: Block, pictures: str) -> str:
    kind = block["kind"]
    if kind == "paragraph":
        said = plain(block["text"])
        return {"lead": f"**{said}**", "warning": f"> {said}", "note": f"<sub>{said}</sub>"}.get(
            block["style"], said
        )
    if kind == "subtitle":
        return f"### {plain(block['text'])}"
    if kind == "bullets":
        return "\n".join(f"- {plain(item)}" for item in block["items"])
    if kind == "code":
        return fence(block["text"])
    if kind == "claims":
        return _claims(block)
    if kind == "samples":
        heard = [f"### {plain(block['label'] + doc.words('colon') + block['prompt'])}"]
        heard += [f"**{plain(item['arm'])}**\n\n{fence(item['text'])}" for item in block["items"]]
        return "\n\n".join(heard)
    if kind == "figure":
        title = plain(block["title"])
        return (
            f"**{doc.words('figure')} {block['n']}. {title}**\n\n"
            f"![{title}]({pictures}/{block['id']}.png)\n\n<sub>{plain(block['note'])}</sub>"
        )
    assert kind == "table", kind
    rows = [[_cell(cell) for cell in row] for row in block["rows"]]
    return _table([plain(head) for head in block["columns"]], block["align"], rows)


def _cell(cell: dict[str, str]) -> str:
    said = plain(cell["text"])
    return f"**{said}**" if cell["strong"] and said and said != "–" else said


def _claims(block: Block) -> str:
    heads = block["heads"]
    rows = []
    for c in block["items"]:
        study = f"{plain(c['study'])}: " if c["study"] else ""
        mark = f" **[{plain(c['mark'])}]**" if c["mark"] else ""
        lines = [c["statement"], c["twin"]]
        small = "".join(f"<br><sub>{plain(line)}</sub>" for line in lines if line)
        verdict = f"{BADGE[c['verdict']]} **{plain(c['label'])}**"
        numbers = [plain(c[key]) for key in ("estimate", "interval", "p", "seeds", "why")]
        rows.append([verdict, study + plain(c["text"]) + mark + small, *numbers])
    keys = ("verdict", "claim", "estimate", "interval", "p", "seeds", "why")
    align = ["left", "left", "right", "right", "right", "right", "left"]
    return _table([plain(heads[key]) for key in keys], align, rows)


def _table(heads: Iterable[str], align: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    rule = ["---" if side == "left" else "--:" for side in align]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(heads), rule, *map(list, rows)])
