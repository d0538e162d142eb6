"""A folder appears whole or not at all, and an earlier one stays until its successor is complete."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oelm.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `out` when the block ends well, and else is gone.

    It lies hidden beside `out` and is locked: what a killed process left there is cleared by the next one,
    what a living one is filling is not touched.
    """
    folder, old = (out.with_name(f".{out.name}.{what}") for what in ("partial", "old"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write to {folder.parent}: {error.strerror}") from None
    try:
        _lock(lock, folder, out)
        if old.exists() and not out.exists():  # killed between the two renames below
            old.rename(out)
        for left in folder.iterdir():
            left.unlink()
        try:
            yield folder
            shutil.rmtree(old, ignore_errors=True)
            if out.exists():
                out.rename(old)
            folder.rename(out)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in FULL:
                raise UserError(
                    f"no room to write {out} ({error.strerror}); free some space, or choose --out DIR or "
                    "--max-tokens; nothing of this attempt was kept, nothing earlier was lost"
                ) from None
            raise
    finally:
        os.close(lock)


def _lock(lock: int, folder: Path, out: Path) -> None:
    """Hold the folder itself, unless it was taken, or published by its owner meanwhile."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == folder.stat().st_ino:
            return
    except OSError:
        pass
    raise UserError(f"{out} is being prepared by another process; wait for it to finish")
