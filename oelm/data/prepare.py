"""Corpus → tokens: read, assign to a split, tokenize in workers, write in order, publish at once."""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.data import tokenizers
from oelm.data.corpora import Corpus
from oelm.data.dataset import SCHEMA, SPLITS, Dataset, data_home
from oelm.data.tokenizers import Tokenizer
from oelm.version import __version__

CHUNK_BYTES = 2**19
Document = tuple[int, str]


def dataset_name(corpus: str, tokenizer: str) -> str:
    """`sotu` and `bpe:2048` → `sotu-bpe2048`."""
    return f"{corpus}-{Path(tokenizer).stem if '/' in tokenizer else tokenizer.replace(':', '')}"


def split_of(text: str, val: float, test: float) -> int:
    """0, 1, 2 for train, val, test, by a hash of the text: duplicates stay together, and where a
    document goes depends on no other document.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    return 1 if place < val else 2 if place < val + test else 0


def prepare(corpus: Corpus, tokenizer: str = "gpt2", workers: int | None = None) -> Dataset:
    """Tokenize a corpus into a dataset."""
    name = dataset_name(corpus.name, tokenizer)
    out = data_home() / "datasets" / name
    partial = out.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    val = test = corpus.held_out

    def documents() -> Iterator[Document]:
        for text in corpus.documents("train"):
            yield split_of(text, val, test), text

    size = tokenizers.bpe_size(tokenizer)
    if size is not None:
        encoder = tokenizers.train_bpe(size, (text for split, text in documents() if split == 0))
    else:
        encoder = tokenizers.Bytes() if tokenizer == "bytes" else tokenizers.gpt2()
    counts = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
    with ExitStack() as stack:
        files = [stack.enter_context(open(partial / f"{split}.bin", "wb")) for split in SPLITS]
        for splits, sizes, ids in _encode(documents(), encoder, workers or os.cpu_count() or 1):
            ends = np.flatnonzero(ids == encoder.eot) + 1
            lengths = np.diff(ends, prepend=0)
            of_token = np.repeat(splits, lengths)
            for code, split in enumerate(SPLITS):
                part = ids[of_token == code]
                files[code].write(part.tobytes())
                counts[split]["tokens"] += len(part)
                counts[split]["documents"] += int((splits == code).sum())
                counts[split]["bytes"] += int(sizes[splits == code].sum())
    (partial / "tokenizer.json").write_text(encoder.json, encoding="utf-8")
    meta = {
        "schema": SCHEMA, "name": name, "version": __version__, "corpus": corpus.origin(),
        "tokenizer": {"name": tokenizer, "sha256": encoder.sha256, "vocab_size": encoder.vocab_size, "eot": encoder.eot},
        "dtype": np.dtype(encoder.dtype).name, "splits": counts,
    }  # fmt: skip
    for split in SPLITS:
        with open(partial / f"{split}.bin", "rb") as file:
            counts[split]["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[assignment]
    (partial / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return Dataset.open(out)


def _encode(
    documents: Iterator[Document], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]]:
    """Splits, sizes in bytes and ids of chunks of documents, in order."""

    def work(chunk: list[Document]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        splits = np.array([split for split, _ in chunk])
        sizes = np.array([len(text.encode()) for _, text in chunk])
        return splits, sizes, tokenizer.encode_documents([text for _, text in chunk])

    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for chunk in _chunks(documents):
            waiting.append(pool.submit(work, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document[1])
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
