"""Labelled texts as token ids, made once and kept; and batches of texts that are about equally long."""

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from oelm.data import tokenizers
from oelm.data.dataset import SPLITS, data_home
from oelm.data.labelled import Labelled, Row
from oelm.data.publish import published
from oelm.data.tokenizers import Tokenizer
from oelm.errors import UserError

SCHEMA = 2
POOL = 50  # batches whose texts are sorted by length together; fewer where there are few texts
Ids = npt.NDArray[np.int64]


class Encoding(Protocol):
    """Turns texts into ids; `learn` is called once, with the training rows."""

    def describe(self) -> dict[str, Any]:
        """What decides the ids, besides the rows."""

    def learn(self, rows: Sequence[Row]) -> None:
        """Prepare for `encode`."""

    def encode(self, row: Row) -> tuple[list[int], int, bool]:
        """The ids, where the second text begins (the length if there is none), whether it was cut."""

    def save(self) -> dict[str, Any]:
        """`vocab_size`, `pad`, and whatever is worth keeping."""


class OwnEncoding:
    """`<end> text <end>`, or `<end> text <end> text <end>`: the first and the last token can be read off."""

    def __init__(self, spec: str, max_length: int) -> None:
        self.spec, self.max_length = spec, max_length
        self._size = tokenizers.bpe_size(spec)
        if self._size is None and spec not in ("gpt2", "bytes"):
            raise UserError(
                f"unknown tokenizer '{spec}' for classification; use bpe:N, gpt2 or bytes"
            )
        if max_length < 8:
            raise UserError(
                f"texts of at most {max_length} tokens leave nothing to read; use 8 or more"
            )
        self._tokenizer: Tokenizer | None = None

    def describe(self) -> dict[str, Any]:
        """The tokenizer and the length at which texts are cut."""
        return {"tokenizer": self.spec, "max_length": self.max_length}

    def learn(self, rows: Sequence[Row]) -> None:
        """Learn the BPE, if it is one of ours."""
        if self._size is not None:
            texts = (text for row in rows for text in row.texts)
            self._tokenizer = tokenizers.train_bpe(self._size, texts)
        else:
            self._tokenizer = tokenizers.gpt2() if self.spec == "gpt2" else tokenizers.Bytes()

    def encode(self, row: Row) -> tuple[list[int], int, bool]:
        """The ids; what is too long loses its end, of two texts the longer one first."""
        assert self._tokenizer is not None
        end = self._tokenizer.eot
        parts = [self._tokenizer.encode(text) for text in row.texts]
        room = self.max_length - len(parts) - 1
        cut = sum(map(len, parts)) > room
        if cut and len(parts) == 2:
            first, second = map(len, parts)
            kept = min(second, max(room - first, room // 2))
            parts = [parts[0][: room - kept], parts[1][:kept]]
        elif cut:
            parts = [parts[0][:room]]
        ids = [end, *parts[0], end]
        begin = len(ids)
        for part in parts[1:]:
            ids += [*part, end]
        return ids, begin, cut

    def save(self) -> dict[str, Any]:
        """The tokenizer itself too."""
        assert self._tokenizer is not None
        about = {"vocab_size": self._tokenizer.vocab_size, "pad": self._tokenizer.eot}
        return {**about, "tokenizer.json": self._tokenizer.json}


@dataclass(frozen=True)
class Examples:
    """The texts of a split: their ids end to end, where each begins, and the labels."""

    tokens: npt.NDArray[Any]
    offsets: Ids
    second: Ids
    """Where in each text its second part begins."""
    labels: Ids

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Ids:
        """The number of tokens of each text."""
        return np.diff(self.offsets)

    def batch(
        self, rows: Ids, pad: int, share: slice = slice(None)
    ) -> tuple[Ids, npt.NDArray[np.uint8], Ids]:
        """Tokens [B, T], parts [B, T] (0 padding, 1 and 2 the texts) and labels [B] of the rows' share.

        T is the longest of all rows, whatever the share: every process computes the same shapes.
        """
        width = int(self.lengths[rows].max())
        rows = rows[share]
        tokens = np.full((len(rows), width), pad, np.int64)
        parts = np.zeros((len(rows), width), np.uint8)
        for i, row in enumerate(rows):
            begin, end = self.offsets[row], self.offsets[row + 1]
            tokens[i, : end - begin] = self.tokens[begin:end]
            parts[i, : end - begin] = 1
            parts[i, self.second[row] : end - begin] = 2
        return tokens, parts, self.labels[rows]


class LabelledDataset:
    """Rows as ids, kept under `data_home()`; made on first use, by one process while others wait."""

    def __init__(self, spec: str, encoding: Encoding) -> None:
        rows = Labelled.parse(spec)
        recipe = {
            "schema": SCHEMA,
            "rows": {k: str(v) for k, v in vars(rows).items() if k != "tokenizer"},
            "origin": rows.fingerprint(),
            "encoding": encoding.describe(),
        }
        text = json.dumps(recipe, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.name = Path(rows.name).stem
        self.path = data_home() / "classification" / f"{self.name}-{digest}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.path / "meta.json").is_file():
                _make(self.path, rows, encoding, recipe)
        self.meta: dict[str, Any] = json.loads(
            (self.path / "meta.json").read_text(encoding="utf-8")
        )
        self.classes: list[str] = self.meta["classes"]
        self.vocab_size, self.pad = int(self.meta["vocab_size"]), int(self.meta["pad"])

    def examples(self, split: str) -> Examples:
        """A split, memory-mapped."""
        arrays = [
            np.load(self.path / f"{split}.{name}.npy", mmap_mode="r" if name == "tokens" else None)
            for name in ("tokens", "offsets", "second", "labels")
        ]
        return Examples(*arrays)


def _make(path: Path, rows: Labelled, encoding: Encoding, recipe: dict[str, Any]) -> None:
    splits, classes, dropped = rows.read()
    encoding.learn(splits["train"])
    about = encoding.save()
    number = {name: i for i, name in enumerate(classes)}
    counts: dict[str, dict[str, Any]] = {}
    with published(path) as folder:
        for split in SPLITS:
            encoded = [encoding.encode(row) for row in splits[split]]
            lengths = [len(ids) for ids, _, _ in encoded]
            tokens = np.fromiter((i for ids, _, _ in encoded for i in ids), np.uint32, sum(lengths))
            arrays: dict[str, npt.NDArray[Any]] = {
                "tokens": tokens,
                "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                "second": np.array([second for _, second, _ in encoded], np.int64),
                "labels": np.array([number[row.label] for row in splits[split]], np.int64),
            }
            digest = hashlib.sha256()
            for name, array in arrays.items():
                np.save(folder / f"{split}.{name}.npy", array)
                digest.update(array.tobytes())
            counts[split] = {
                "rows": len(encoded),
                "tokens": int(sum(lengths)),
                "truncated": sum(cut for _, _, cut in encoded),
                "sha256": digest.hexdigest(),
            }
        if definition := about.pop("tokenizer.json", None):
            (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
        meta = {"classes": classes, "dropped": dropped, **about, "splits": counts, "recipe": recipe}
        (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


class Buckets:
    """Which rows are in batch t: a pure function of (data_seed, t).

    An epoch shuffles all rows, sorts each pool of `POOL` batches by length, cuts it into batches, and
    visits those in a shuffled order. Fewer than `batch_size` rows, other ones each time, are left over.
    """

    def __init__(self, lengths: Ids, batch_size: int, data_seed: int) -> None:
        if len(lengths) < batch_size:
            raise UserError(
                f"the training split has {len(lengths)} rows, too few for a batch of {batch_size}"
            )
        self.lengths, self.batch_size, self.data_seed = lengths, batch_size, data_seed
        self.batches_per_epoch = len(lengths) // batch_size
        self._epoch: tuple[int, Ids] | None = None

    def rows(self, t: int) -> Ids:
        """The rows of batch t, counted over all epochs."""
        epoch, place = divmod(t, self.batches_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._order(epoch)
        batch: Ids = self._epoch[1][place]
        return batch

    def _order(self, epoch: int) -> Ids:
        """All batches of an epoch [batches, batch_size]."""
        n, size = self.batches_per_epoch, self.batch_size
        key = hashlib.sha256(f"{self.data_seed}/{epoch}".encode()).digest()[:16]
        # Sorting raw words gives the same order on every platform and version.
        bits = np.random.Philox(key=np.frombuffer(key, "<u8").astype(np.uint64))
        rows: Ids = np.argsort(bits.random_raw(len(self.lengths)), kind="stable")[: n * size]
        # At least four pools: sorted all together, the same texts would meet in every epoch.
        pool_size = max(1, min(POOL, n // 4)) * size
        for pool in np.split(rows, range(pool_size, len(rows), pool_size)):  # views of `rows`
            pool[:] = pool[np.argsort(self.lengths[pool], kind="stable")]
        batches: Ids = rows.reshape(n, size)
        shuffled: Ids = batches[np.argsort(bits.random_raw(n), kind="stable")]
        return shuffled

    def padding(self) -> dict[str, float]:
        """The share of all tokens of the first epoch that is padding: in these batches, and unsorted."""
        bucketed = self._order(0)
        unsorted = np.random.default_rng(0).permutation(bucketed.reshape(-1))
        shares = {}
        for name, rows in (("unsorted", unsorted), ("bucketed", bucketed)):
            lengths = self.lengths[rows.reshape(bucketed.shape)]
            used, room = lengths.sum(), (lengths.max(1) * self.batch_size).sum()
            shares[name] = round(1 - float(used / room), 4)
        return shares


def in_order(lengths: Ids, rows: Ids, batch_size: int) -> Iterator[Ids]:
    """The rows in batches of about equally long texts, always the same."""
    ordered = rows[np.argsort(lengths[rows], kind="stable")]
    for begin in range(0, len(ordered), batch_size):
        yield ordered[begin : begin + batch_size]
