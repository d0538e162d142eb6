"""The report's words in each language: one table of sentences, filled in where they are shown."""

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

Language = Literal["en", "zh"]


@dataclass(frozen=True)
class Text:
    """A sentence of the table and what fills it; becomes words only in a report's language."""

    key: str
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return Words("en")(self)


def text(key: str, **values: Any) -> Text:
    """A sentence to be said later, in a language not known yet."""
    return Text(key, values)


@cache
def table() -> dict[str, dict[str, str]]:
    """`words.yaml`: key → language → sentence."""
    source = files("oelm.analysis.templates").joinpath("words.yaml").read_text(encoding="utf-8")
    words: dict[str, dict[str, str]] = yaml.load(
        source, getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return words


@dataclass(frozen=True)
class Words:
    """Says things in one language."""

    language: Language

    def __call__(self, said: str | Text, /, **values: Any) -> str:
        """The sentence of a key or `Text`; texts among its values are said as well."""
        if isinstance(said, Text):
            return self(said.key, **said.values)
        shown = {name: self(v) if isinstance(v, Text) else v for name, v in values.items()}
        return table()[said][self.language].format(**shown)

    def either(self, key: str, otherwise: str) -> str:
        """The sentence of a key, or `otherwise` if the table lacks it."""
        return table()[key][self.language] if key in table() else otherwise

    def listing(self, items: list[str]) -> str:
        """`a, b and c` as the language writes it."""
        if self.language == "zh":
            return "、".join(items)
        return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
