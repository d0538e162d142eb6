"""Two halves of a batch at once, each on its own half of the CPU's cores.

When all cores share every operation, they wait for each other after each one; with a half of the batch
each, they meet once per step. On two cores this made a step 1.2× as fast at nano and 1.07× at
medium-512. Two lanes and not more: both add to the same gradients, and a + b = b + a, so the sum does
not depend on which comes first. That of three would.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")

PAUSE = getattr(ctypes.pythonapi, "omp_pause_resource_all", lambda kind: None)
SOFT = 1


class Lanes:
    """Two threads of this process, with half of its cores each."""

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        both = threading.Barrier(3)

        def start() -> None:
            # torch sets up a thread when it is first asked, from what any thread set last: ask first.
            torch.get_num_threads()
            torch.set_num_threads(threads // 2)
            both.wait()

        self._pool = ThreadPoolExecutor(2, "lane", start)
        for _ in range(2):
            self._pool.submit(int)
        both.wait()
        torch.set_num_threads(threads)

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
        """`work` on every piece, two at a time; the results in order, or the first error."""
        # Else this thread's OpenMP helpers wait for more work, awake, for milliseconds of a lane's time.
        PAUSE(SOFT)
        return list(self._pool.map(work, pieces))
