"""A prepared dataset: three files of token ids and a `meta.json` that says what they are."""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs

from oelm.data import tokenizers
from oelm.data.tokenizers import Tokenizer
from oelm.errors import UserError, nearest

SCHEMA = 1
SPLITS = ("train", "val", "test")


def data_home() -> Path:
    """Where datasets live: `$OELM_HOME`, or the user's data folder."""
    home = os.environ.get("OELM_HOME")
    return Path(home).expanduser() if home else platformdirs.user_data_path("oelm")


def installed() -> dict[str, Path]:
    """The prepared datasets under `data_home()`, by name."""
    files = sorted((data_home() / "datasets").glob("*/meta.json"))
    return {f.parent.name: f.parent for f in files if not f.parent.name.startswith(".")}


class Dataset:
    """Open one with `Dataset.open`, which checks everything that can be checked in no time."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path, self.meta = path, meta
        self.name: str = meta["name"]
        self.vocab_size: int = meta["tokenizer"]["vocab_size"]
        self.eot: int = meta["tokenizer"]["eot"]
        self.dtype = np.dtype(meta["dtype"])

    @classmethod
    def open(cls, name_or_path: str | Path) -> "Dataset":
        """The dataset of that name, at that path, or the only one prepared from that corpus."""
        path = _find(str(name_or_path))
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            if meta["schema"] != SCHEMA:
                raise UserError(
                    f"{path} has schema {meta['schema']}, this version reads {SCHEMA}; prepare it again"
                )
            dataset = cls(path, meta)
            dataset._check_sizes()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is not a whole dataset ({error!r}); prepare it again"
            ) from None
        return dataset

    def tokens(self, split: str) -> npt.NDArray[Any]:
        """The ids of a split, memory-mapped; each document ends with the end-of-text id."""
        return np.memmap(self.path / f"{split}.bin", self.dtype, mode="r")

    def text_bytes(self, split: str) -> int:
        """Bytes of UTF-8 text behind the tokens of a split, for bits per byte."""
        return int(self.meta["splits"][split]["bytes"])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored beside the tokens."""
        about = self.meta["tokenizer"]
        file = self.path / "tokenizer.json"
        try:
            tokenizer = tokenizers.load(about["name"], file.read_text(encoding="utf-8"))
        except OSError:
            raise UserError(f"{file} is missing; prepare the dataset again") from None
        if tokenizer.sha256 != about["sha256"]:
            raise UserError(f"{file} was altered since it was written; prepare the dataset again")
        return tokenizer

    def documents(self, split: str) -> Iterator[npt.NDArray[Any]]:
        """The ids of each document of a split, its end-of-text left out."""
        tokens, begin = self.tokens(split), 0
        for block in range(0, len(tokens), 2**22):
            for end in block + np.flatnonzero(tokens[block : block + 2**22] == self.eot):
                yield tokens[begin:end]
                begin = int(end) + 1

    def document(self, split: str, number: int) -> npt.NDArray[Any]:
        """The ids of document `number` of a split, counted from 0."""
        total = self.meta["splits"][split]["documents"]
        if not 0 <= number < total:
            raise UserError(
                f"{split} of '{self.name}' has documents 0 to {total - 1:,}, not {number:,}"
            )
        return next(islice(self.documents(split), number, None))

    def require_vocabulary(self, vocab_size: int, tokenizer_sha256: str | None = None) -> None:
        """Refuse a model whose vocabulary is not this dataset's."""
        ours = self.meta["tokenizer"]
        if vocab_size != self.vocab_size:
            what = f"a vocabulary of {vocab_size:,} tokens, dataset '{self.name}' has {self.vocab_size:,}"
        elif tokenizer_sha256 not in (None, ours["sha256"]):
            what = f"another tokenizer than '{ours['name']}' of dataset '{self.name}'"
        else:
            return
        raise UserError(f"the model was made for {what}; use the dataset that it was trained on")

    def _check_sizes(self) -> None:
        """Refuse files that are truncated or that hold something else."""
        for split in SPLITS:
            expected = self.meta["splits"][split]["tokens"] * self.dtype.itemsize
            file = self.path / f"{split}.bin"
            size = file.stat().st_size if file.exists() else 0
            if size != expected:
                raise UserError(
                    f"{file} has {size:,} bytes instead of {expected:,}; prepare the dataset again"
                )
            if self.tokens(split)[-1] != self.eot:
                raise UserError(
                    f"{file} does not end a document, so it was altered; prepare the dataset again"
                )


def _find(name: str) -> Path:
    known = installed()
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if (path / "meta.json").exists():
        return path
    of_corpus = [n for n, folder in known.items() if _corpus(folder) == name]
    if len(of_corpus) == 1:
        return known[of_corpus[0]]
    if of_corpus:
        raise UserError(
            f"'{name}' was prepared more than once; choose from: {', '.join(of_corpus)}"
        )
    hint = nearest(name, known) if known else ""
    raise UserError(
        f"no dataset '{name}' in {data_home() / 'datasets'}{hint}; "
        "`oelm data prepare CORPUS` makes one, `oelm data list` shows what is there"
    )


def _corpus(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "meta.json").read_text(encoding="utf-8"))["corpus"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
