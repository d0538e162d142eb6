"""A Chinese font for pictures, paper and page, cut down to the characters a report uses."""

import base64
import contextlib
import hashlib
import importlib.resources
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vl_convert

from oelm.errors import UserError

SANS = "Liberation Sans, Arial, Helvetica, sans-serif"
"""vl-convert carries Liberation Sans, so pictures need no font of the system's."""
SERIF = "Libertinus Serif"
"""typst carries this one."""
_registered: set[str] = set()


@dataclass(frozen=True)
class Font:
    """Files of one family, made for one text."""

    family: str
    folder: Path
    woff2: Path

    def css(self) -> str:
        """The family as a rule of the page, with the font inside."""
        data = base64.b64encode(self.woff2.read_bytes()).decode()
        return (
            f'@font-face {{ font-family: "{self.family}"; font-weight: 100 900; '
            f'src: url("data:font/woff2;base64,{data}") format("woff2"); }}\n'
        )


def has_chinese(text: str) -> bool:
    """Whether a text has characters that Latin fonts lack: Chinese ones and their punctuation."""
    return any("\u2e80" <= c <= "\u9fff" or "\uf900" <= c <= "\uffef" for c in text)


def chinese(text: str, cache: Path) -> Font:
    """Noto Sans SC with the characters of `text`, regular and bold; made once per set of characters."""
    characters = "".join(sorted({*text, *map(chr, range(0x20, 0x7F))}))
    digest = hashlib.sha256(characters.encode()).hexdigest()[:10]
    # A name of letters only: an unquoted family must not contain a word that starts with a digit.
    family = "Oelm" + digest.translate(str.maketrans("0123456789", "ghijklmnop"))
    font = Font(family, cache / family, cache / family / "page.woff2")
    if not font.woff2.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            _make(family, characters, Path(place) / "made")
            with contextlib.suppress(OSError):  # somebody else was faster
                (Path(place) / "made").rename(font.folder)
    if font.family not in _registered:
        vl_convert.register_font_directory(str(font.folder.resolve()))
        _registered.add(font.family)
    return font


def _make(family: str, characters: str, folder: Path) -> None:
    try:
        from fontTools import subset
        from fontTools.ttLib import TTFont
        from fontTools.varLib import instancer

        package = importlib.resources.files("justmytype_intl_cjk")
    except ImportError:
        raise UserError("Chinese pictures need a font: pip install 'oelm[zh]'") from None
    source = package.joinpath("fonts/ofl/notosanssc/NotoSansSC[wght].ttf")
    options = subset.Options(
        layout_features=["kern", "palt"], name_IDs=[1, 2, 4, 6], notdef_outline=True
    )
    cutter = subset.Subsetter(options)
    cutter.populate(text=characters)
    with importlib.resources.as_file(source) as path:
        small: Any = TTFont(path, lazy=True)
        cutter.subset(small)
    _rename(small, family, "Regular")
    folder.mkdir()
    middle = folder / "variable.bin"
    small.save(middle)
    for style, weight in (("Regular", 400), ("Bold", 700)):
        # vl-convert draws a variable font at its thinnest, so it gets one file per weight.
        one = instancer.instantiateVariableFont(TTFont(middle), {"wght": weight})
        one["OS/2"].usWeightClass = weight
        one["head"].macStyle = int(style == "Bold")
        one["OS/2"].fsSelection = 0x20 if style == "Bold" else 0x40
        _rename(one, family, style)
        one.save(folder / f"{style}.ttf")
    small.flavor = "woff2"
    small.save(folder / "page.woff2")
    middle.unlink()


def _rename(font: Any, family: str, style: str) -> None:
    names = {1: family, 2: style, 4: f"{family} {style}", 6: f"{family}-{style}".replace(" ", "")}
    table = font["name"]
    table.names = []
    for number, name in names.items():
        table.setName(name, number, 3, 1, 0x409)
