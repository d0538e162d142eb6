"""Tokenize a stream of documents in workers, in order and in constant memory.

The workers are threads: tiktoken and `tokenizers` let go of the interpreter lock, and nothing has to
be copied between processes.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.data.tokenizers import Tokenizer

CHUNK = 2**17  # characters of text that a worker tokenizes at a time
TIDY = 64  # chunks after which freed memory goes back to the system
Document = tuple[int, str]
"""A split's number, and the text."""


@dataclass
class Chunk:
    """Consecutive documents: each one's split and size in bytes, and the ids of all, one after the other."""

    splits: npt.NDArray[np.int8]
    sizes: npt.NDArray[np.int64]
    ids: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]

    def ids_of(self, split: int) -> npt.NDArray[Any]:
        """The ids of the documents of one split."""
        of_split = self.splits == split
        if of_split.all():
            return self.ids
        chosen: npt.NDArray[Any] = self.ids[np.repeat(of_split, self.lengths)]
        return chosen

    def until(self, tokens: int) -> "Chunk":
        """The documents up to the one with which train reaches that many tokens."""
        reached = np.cumsum(np.where(self.splits == 0, self.lengths, 0)) >= tokens
        if not reached.any():
            return self
        n = int(reached.argmax()) + 1
        return Chunk(
            self.splits[:n], self.sizes[:n], self.ids[: self.lengths[:n].sum()], self.lengths[:n]
        )


def encoded(documents: Iterator[Document], tokenizer: Tokenizer, workers: int) -> Iterator[Chunk]:
    """The documents tokenized, in order. Few chunks are under way at a time, so that memory stays flat."""

    def work(chunk: list[Document]) -> Chunk:
        ids = tokenizer.encode_documents([text for _, text in chunk])
        ends = np.flatnonzero(ids == tokenizer.eot) + 1
        splits = np.array([split for split, _ in chunk], np.int8)
        sizes = np.array([len(text.encode()) for _, text in chunk], np.int64)
        return Chunk(splits, sizes, ids, np.diff(ends, prepend=0))

    waiting: deque[Future[Chunk]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for number, chunk in enumerate(_chunks(documents), 1):
            waiting.append(pool.submit(work, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
            if number % TIDY == 0:
                _return_freed_memory()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _return_freed_memory() -> None:
    """Freed texts and ids leave holes in the heap of glibc, more of them the longer it goes on."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document[1])
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
