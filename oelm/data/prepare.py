"""Corpus → dataset: read, assign to a split, tokenize in workers, write in order, publish at once."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from oelm.config import to_mapping
from oelm.data import tokenizers
from oelm.data.corpora import Corpus
from oelm.data.dataset import SCHEMA, SPLITS, Dataset, data_home
from oelm.data.encode import Document, encoded
from oelm.data.publish import published
from oelm.data.tokenizers import Tokenizer
from oelm.errors import UserError
from oelm.version import __version__

Progress = Callable[[str, float | None, int, int], None]
"""Told what is being done, the share that is done if known, and documents and tokens so far."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what a dataset holds, besides the text itself."""

    tokenizer: str
    val: float
    test: float
    max_tokens: int | None = None
    max_docs: int | None = None

    def __post_init__(self) -> None:
        if min(self.val, self.test) < 0 or self.val + self.test >= 1:
            raise UserError(
                f"val {self.val} and test {self.test} must be shares that leave some text for train"
            )
        for name in ("max_tokens", "max_docs"):
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise UserError(f"{name} must be at least 1, not {limit}")


def prepare(
    corpus: Corpus,
    tokenizer: str = "gpt2",
    *,
    name: str | None = None,
    out: Path | None = None,
    val: float | None = None,
    test: float | None = None,
    max_tokens: int | None = None,
    max_docs: int | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Progress = lambda *_: None,
) -> Dataset:
    """The dataset of a corpus; one that is there already and was made alike is opened and returned."""
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    recipe = Recipe(
        tokenizer=tokenizer,
        val=corpus.held_out if val is None else val,
        test=corpus.held_out if test is None else test,
        max_tokens=max_tokens,
        max_docs=max_docs,
    )
    asked = {**to_mapping(recipe), "corpus": corpus.origin()}
    name = name or (out.name if out else dataset_name(corpus.name, tokenizer))
    if "/" in name:
        raise UserError(f"a dataset's name has no '/', as '{name}' has; say where with --out")
    if out and out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose a new folder")
    out = out or data_home() / "datasets" / name
    if (out / "meta.json").exists() and not force:
        return _same(Dataset.open(out), asked)
    if out.exists() and not (out / "meta.json").exists() and any(out.iterdir()):
        raise UserError(f"{out} holds other files; choose an empty or a new folder")
    size = tokenizers.bpe_size(tokenizer)
    if size is None:
        named = tokenizers.named(tokenizer)  # before anything is made, for there may be none
    with published(out) as folder:
        encoder = named if size is None else _learnt(size, corpus, recipe, progress)
        splits = _write(folder, corpus, recipe, encoder, workers or os.cpu_count() or 1, progress)
        _refuse_empty(splits)
        (folder / "tokenizer.json").write_text(encoder.json, encoding="utf-8")
        meta = {
            "schema": SCHEMA,
            "name": name,
            "version": __version__,
            "corpus": corpus.origin(),
            "tokenizer": {
                "name": tokenizer,
                "sha256": encoder.sha256,
                "vocab_size": encoder.vocab_size,
                "eot": encoder.eot,
            },
            "dtype": np.dtype(encoder.dtype).name,
            "split_rule": split_rule(corpus, recipe),
            "splits": splits,
            "recipe": asked,
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return Dataset.open(out)


def dataset_name(corpus: str, tokenizer: str) -> str:
    """`sotu` and `bpe:2048` → `sotu-bpe2048`; a tokenizer's file gives its folder's or its own name."""
    path = Path(tokenizer)
    if path.exists() and tokenizer not in ("gpt2", "bytes"):
        label = path.resolve().parent.name if path.name == "tokenizer.json" else path.resolve().stem
    else:
        label = tokenizer.replace(":", "")
    return f"{corpus}-{label}"


def split_of(text: str, val: float, test: float) -> int:
    """The number of the split a document goes to, by a hash of its text.

    Equal documents stay together, and where one goes depends on no other: growing the corpus moves none.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    return 1 if place < val else 2 if place < val + test else 0


def split_rule(corpus: Corpus, recipe: Recipe) -> str:
    """Where each split comes from, in words."""
    shares = {"val": recipe.val, "test": recipe.test}
    hashed = [f"{split} {share:g}" for split, share in shares.items() if split not in corpus.splits]
    official = [split for split in corpus.splits if split != "train" or not hashed]
    rules = [f"official {', '.join(official)}"] if official else []
    if hashed:
        rules.append(f"by hash of the document: {', '.join(hashed)}, train the rest")
    return "; ".join(rules)


def _same(dataset: Dataset, asked: dict[str, Any]) -> Dataset:
    there = dataset.meta["recipe"]
    differing = [key for key in asked if asked[key] != there.get(key)]
    if differing:
        raise UserError(
            f"{dataset.path} was made with other {', '.join(differing)}; "
            "`--force` replaces it, `--name NAME` makes another beside it"
        )
    return dataset


def _documents(corpus: Corpus, recipe: Recipe, source: str) -> Iterator[Document]:
    """The documents of an official split; train also gives up those of the splits that do not exist."""
    val = 0.0 if "val" in corpus.splits else recipe.val
    test = 0.0 if "test" in corpus.splits else recipe.test
    official = SPLITS.index(source)
    for text in islice(corpus.documents(source), recipe.max_docs):
        yield (split_of(text, val, test) if source == "train" else official), text


def _learnt(size: int, corpus: Corpus, recipe: Recipe, progress: Progress) -> Tokenizer:
    """A BPE of that size, from the training split only."""

    def texts() -> Iterator[str]:
        for number, (split, text) in enumerate(_documents(corpus, recipe, "train"), 1):
            if split == 0:
                yield text
            progress(f"learning {recipe.tokenizer}", corpus.done, number, 0)

    return tokenizers.train_bpe(size, texts())


def _write(
    folder: Path,
    corpus: Corpus,
    recipe: Recipe,
    tokenizer: Tokenizer,
    workers: int,
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """Write the ids of every split; what `meta.json` says about them."""
    counts = [{"tokens": 0, "documents": 0, "bytes": 0} for _ in SPLITS]
    hashes = [hashlib.sha256() for _ in SPLITS]
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS]
        for source in corpus.splits:
            limit = recipe.max_tokens if source == "train" else None
            for chunk in encoded(_documents(corpus, recipe, source), tokenizer, workers):
                if limit is not None:
                    chunk = chunk.until(limit - counts[0]["tokens"])
                for split, (count, digest, file) in enumerate(
                    zip(counts, hashes, files, strict=True)
                ):
                    data = chunk.ids_of(split).tobytes()
                    file.write(data)
                    digest.update(data)
                    count["tokens"] += len(data) // chunk.ids.itemsize
                    count["documents"] += int((chunk.splits == split).sum())
                    count["bytes"] += int(chunk.sizes[chunk.splits == split].sum())
                full = counts[0]["tokens"] / limit if limit is not None else 0.0
                share = (
                    None if corpus.done is None and limit is None else max(full, corpus.done or 0.0)
                )
                documents, tokens = (
                    sum(count[what] for count in counts) for what in ("documents", "tokens")
                )
                progress(f"tokenizing {source}", share, documents, tokens)
                if full >= 1:
                    break
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    return {
        split: {**count, "sha256": digest.hexdigest()}
        for split, count, digest in zip(SPLITS, counts, hashes, strict=True)
    }


def _refuse_empty(splits: dict[str, dict[str, Any]]) -> None:
    total = sum(about["documents"] for about in splits.values())
    if not total:
        raise UserError("the corpus is empty: no document with any text in it")
    for split, about in splits.items():
        if not about["documents"]:
            raise UserError(
                f"split '{split}' would hold no document (there are {total:,} in all); "
                "give more text, larger --val and --test, or smaller documents (--documents blank-line)"
            )
