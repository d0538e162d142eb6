"""Look into a dataset: is it intact, how long are its documents, do splits share any."""

import hashlib
from collections.abc import Iterator
from itertools import islice

import numpy as np

from oelm.data.dataset import SPLITS, Dataset
from oelm.errors import UserError

BLOCK = 2**24
SAMPLE = 200


def check(dataset: Dataset) -> Iterator[str]:
    """Prove file by file that a dataset is what it was when written; the first fault raises."""
    tokenizer = dataset.tokenizer()
    yield f"tokenizer {tokenizer.name}: definition unaltered"
    for split in SPLITS:
        about = dataset.meta["splits"][split]
        file = dataset.path / f"{split}.bin"
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        tokens = dataset.tokens(split)
        documents = 0
        for begin in range(0, len(tokens), BLOCK):
            block = tokens[begin : begin + BLOCK]
            if int(block.max()) >= dataset.vocab_size:
                at = begin + int((block >= dataset.vocab_size).argmax())
                raise _altered(f"{file}: id {tokens[at]} at token {at:,} is beyond the vocabulary")
            documents += int((block == dataset.eot).sum())
        if documents != about["documents"]:
            raise _altered(f"{file}: {documents:,} documents instead of {about['documents']:,}")
        if digest != about["sha256"]:
            raise _altered(f"{file}: altered since it was written (its hash differs)")
        step = -(-documents // SAMPLE)
        sample = list(islice(dataset.documents(split), 0, None, step))
        if tokenizer.lossless:
            for number, ids in enumerate(sample):
                if tokenizer.encode(tokenizer.decode(ids.tolist())) != ids.tolist():
                    raise _altered(
                        f"{file}: document {number * step} does not give its own ids when encoded again",
                    )
        yield (
            f"{split}: hash, {len(tokens):,} ids below {dataset.vocab_size:,}, {documents:,} documents"
            + (f", {len(sample)} of them encoded again" if tokenizer.lossless else "")
        )


def lengths(dataset: Dataset, split: str) -> np.ndarray:
    """The number of tokens of each document, its end-of-text left out."""
    tokens = dataset.tokens(split)
    blocks = range(0, len(tokens), BLOCK)
    ends = np.concatenate(
        [b + np.flatnonzero(tokens[b : b + BLOCK] == dataset.eot) for b in blocks]
    )
    return np.diff(ends, prepend=-1) - 1


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(shortest, longest, documents) by powers of two."""
    edges = [0, *(2**k for k in range(1, int(lengths.max()).bit_length() + 1))]
    counts, _ = np.histogram(lengths, [*edges[:-1], edges[-1]])
    rows = [(low, high - 1, int(n)) for low, high, n in zip(edges, edges[1:], counts, strict=False)]
    while rows and not rows[0][2]:
        rows.pop(0)
    return rows


def duplicates(dataset: Dataset) -> dict[str, int]:
    """How many documents of each of val and test are also in an earlier split, word for word."""
    seen = {split: set(_fingerprints(dataset, split)) for split in ("val", "test")}
    shared = {
        "val and train": seen["val"].intersection(_fingerprints(dataset, "train")),
        "test and train": seen["test"].intersection(_fingerprints(dataset, "train")),
        "val and test": seen["val"] & seen["test"],
    }
    return {pair: len(documents) for pair, documents in shared.items()}


def _fingerprints(dataset: Dataset, split: str) -> Iterator[bytes]:
    for ids in dataset.documents(split):
        yield hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _altered(fault: str) -> UserError:
    return UserError(f"{fault}; prepare the dataset again (oelm data prepare … --force)")
