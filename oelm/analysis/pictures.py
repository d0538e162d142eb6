"""Static pictures of a document's charts, and the script that draws them in a browser."""

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import platformdirs
import vl_convert

from oelm.analysis import fonts
from oelm.analysis.blocks import Document

VEGA_LITE = "6.1"
"""With 6.4, tooltips of nearest-point selections say "undefined"."""
PIXELS = 2
"""Pixels per point in PNG files: sharp on the screens people have."""


@dataclass
class Pictures:
    """Every chart of a document as SVG."""

    svg: dict[str, str]
    font: fonts.Font | None

    def inline(self, id: str) -> str:
        """A chart to stand in a page among others: no identifier may be there twice."""
        prefix = re.sub(r"\W", "-", id)
        return re.sub(
            r"<[^>]*>",
            lambda tag: re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", tag[0]),
            self.svg[id],
        )

    def png(self, id: str) -> bytes:
        """A chart as a PNG file's content."""
        return bytes(vl_convert.svg_to_png(self.svg[id], scale=PIXELS))

    def with_font(self, id: str, family: str) -> str:
        """A chart set in another font."""
        return re.sub(r'font-family="[^"]*"', f'font-family="{family}"', self.svg[id])


def cache() -> Path:
    """Where things that take seconds to make are kept; a temporary place if there is no home."""
    path = Path(platformdirs.user_cache_dir("oelm"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        path = Path(tempfile.gettempdir()) / f"oelm-{os.getuid()}"
        path.mkdir(exist_ok=True)
    return path


def draw(doc: Document, text: str) -> Pictures:
    """Draw every chart; `text` is all text of the document, so that no character lacks a glyph."""
    font = None
    if doc.words.language == "zh" or fonts.has_chinese(text):
        font = fonts.chinese(text, cache() / "fonts")
    family = f"{font.family}, sans-serif" if font else fonts.SANS
    svg = {}
    for id in doc.charts:
        spec = doc.chart(id, web=False)
        spec |= {"config": {**spec["config"], "font": family}, "background": "white"}
        svg[id] = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    return Pictures(svg, font)


def script() -> str:
    """The libraries that draw the charts in a browser, bundled once and kept."""
    path = cache() / f"vega-{version('vl-convert-python')}-{VEGA_LITE}.js"
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    bundle = bundle.replace("</script", r"<\/script").replace("<!--", r"<\!--")
    with contextlib.suppress(OSError):  # a disk that is full costs only time
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(bundle, encoding="utf-8")
        temporary.replace(path)
    return bundle
