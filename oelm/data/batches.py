"""Which tokens are in batch t: a pure function of (data_seed, t), with nothing stored or shuffled.

An epoch cuts the tokens into windows that do not overlap, from a random phase on, and visits them in
a pseudo-random order. The order is a Feistel network over the window numbers, keyed by seed and
epoch: a permutation that is computed for just the windows asked for.
"""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.errors import UserError

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
IGNORE = -100
ROUNDS = 4
STRIDE = 64  # batches whose windows are computed at a time when reading ahead


class Batches:
    """Batches of `batch_size` windows of `seq_len` tokens, each with the token that follows as target."""

    def __init__(
        self, tokens: npt.NDArray[Any], batch_size: int, seq_len: int, data_seed: int
    ) -> None:
        if len(tokens) <= seq_len:
            raise UserError(
                f"the training split has {len(tokens):,} tokens, too few for one window of "
                f"{seq_len:,} and its target; prepare more text or choose a smaller seq_len"
            )
        self.tokens, self.batch_size, self.seq_len, self.data_seed = (
            tokens, batch_size, seq_len, data_seed,
        )  # fmt: skip
        # One window fewer than would fit at phase 0, so that every phase holds equally many.
        self.windows_per_epoch = max(1, len(tokens) // seq_len - 1)
        self._phases = min(seq_len, len(tokens) - self.windows_per_epoch * seq_len)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens seen in an epoch: all but fewer than two windows."""
        return self.windows_per_epoch * self.seq_len

    def batch(self, t: int, rank: int = 0, world: int = 1) -> tuple[Ids, Ids]:
        """Inputs and targets [batch_size / world, seq_len] of process `rank` at step `t`."""
        self._check(world)
        return self._read(self._starts(t, 1)[0], rank, world)

    def _check(self, world: int) -> None:
        if self.batch_size % world:
            raise UserError(
                f"batch_size {self.batch_size} cannot be shared equally by {world} processes"
            )

    def _starts(self, t: int, steps: int) -> Ids:
        """Where the windows of `steps` batches begin [steps, batch_size]: as cheap for many as for one."""
        samples = np.arange(t * self.batch_size, (t + steps) * self.batch_size, dtype=np.uint64)
        return self.starts(samples).reshape(steps, self.batch_size)

    def _read(self, starts: Ids, rank: int, world: int) -> tuple[Ids, Ids]:
        share = self.batch_size // world
        mine = starts[rank * share : (rank + 1) * share]
        windows = self.tokens[mine[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])

    def starts(self, samples: Words) -> Ids:
        """Where in the tokens the windows number `samples`, counted over all epochs, begin."""
        n = self.windows_per_epoch
        epochs, places = samples // np.uint64(n), samples % np.uint64(n)
        keys = _mix(_mix(epochs) ^ np.uint64(self.data_seed & (2**64 - 1)))
        windows = _permute(places, n, keys)
        phases = _mix(~keys) % np.uint64(self._phases)
        return (phases + windows * np.uint64(self.seq_len)).astype(np.int64)

    def prefetch(
        self, start: int, stop: int, rank: int = 0, world: int = 1, depth: int = 4
    ) -> Iterator[tuple[Ids, Ids]]:
        """Batches `start` … `stop - 1`, read ahead by a thread."""
        self._check(world)
        pool = ThreadPoolExecutor(1, "oelm-batches")
        waiting: deque[Future[tuple[Ids, Ids]]] = deque()
        try:
            for t in range(start, stop, STRIDE):
                for starts in self._starts(t, min(STRIDE, stop - t)):
                    waiting.append(pool.submit(self._read, starts, rank, world))
                    if len(waiting) > depth:
                        yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def evaluation_windows(
    tokens: npt.NDArray[Any], seq_len: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[tuple[Ids, Ids, int]]:
    """Inputs, targets and the number of targets, in order; each token but the first is a target once.

    The last window is padded with targets of -100; the last batch may have fewer rows.
    """
    if len(tokens) < 2:
        raise UserError("the evaluated split has fewer than two tokens; prepare more text")
    total = len(tokens) - 1 if max_tokens is None else min(max_tokens, len(tokens) - 1)
    for begin in range(0, total, seq_len * batch_size):
        count = min(seq_len * batch_size, total - begin)
        shape = (-(-count // seq_len), seq_len)
        x, y = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        x.reshape(-1)[:count] = tokens[begin : begin + count]
        y.reshape(-1)[:count] = tokens[begin + 1 : begin + 1 + count]
        yield x, y, count


def _permute(places: Words, n: int, keys: Words) -> Words:
    """A permutation of range(n) under each key, at the given places.

    Places are pairs (left, right) in an a × b grid that just covers n, and each half round moves one
    coordinate by a hash of the other. Cells beyond n are walked through until a cell inside comes.
    """
    a = math.isqrt(n - 1) + 1 if n > 1 else 1
    wide, high = np.uint64(a), np.uint64(-(-n // a))
    cells = places.copy()
    outside = np.ones(len(cells), bool)
    round_keys = [_mix(keys + np.uint64(r)) for r in range(2 * ROUNDS)]
    while outside.any():
        left, right = cells[outside] % wide, cells[outside] // wide
        for r in range(0, 2 * ROUNDS, 2):
            left = (left + _mix(right ^ round_keys[r][outside]) % wide) % wide
            right = (right + _mix(left ^ round_keys[r + 1][outside]) % high) % high
        cells[outside] = right * wide + left
        outside = cells >= np.uint64(n)
    return cells


def _mix(words: Words) -> Words:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of the word."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
