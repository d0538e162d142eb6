"""Checkpoints that are whole or absent: written in the background, hashed, renamed into place.

A file is what `torch.save` writes, with its SHA-256 as the comment of the zip archive that it is:
`torch.load` reads it as ever, and a damaged file is known before anything of it is used.
"""

import hashlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from oelm.errors import UserError

log = logging.getLogger(__name__)
LAST, PREVIOUS, BEST = "last.pt", "last.prev.pt", "best.pt"
MARK = b"sha256:"
PATIENCE_SECONDS = 600.0  # at the end of a run, for a full disk to be cleared


class DamagedError(Exception):
    """A checkpoint that is cut, altered or not one of ours."""


class _Hashing:
    """A file that is hashed while it is written; the last two bytes wait, for they will change."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha, self.held = file, hashlib.sha256(), b""
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= 2:
            self._through(self.held)
            self._through(view[:-2])
            self.held = bytes(view[-2:])
        else:
            joined = self.held + bytes(view)
            self._through(joined[:-2])
            self.held = joined[-2:]
        return len(view)

    def flush(self) -> None:
        self.file.flush()

    def _through(self, data: "bytes | memoryview") -> None:
        self.sha.update(data)
        try:
            self.file.write(data)
        except OSError as error:  # torch would turn it into a complaint about positions
            self.error = error
            raise


def write(content: dict[str, Any], path: Path, *, previous: Path | None = None) -> int:
    """Save `content` as `path`, all or nothing; what was there becomes `previous`. Returns bytes."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            hashing = _Hashing(file)
            try:
                torch.save(content, hashing)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise hashing.error or error from None
            # A zip archive ends with the length of its comment, 0 so far.
            file.write(_trailer(hashing.sha.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if previous is not None and path.exists():
        os.replace(path, previous)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the renaming survives a power cut too
    finally:
        os.close(folder)
    return size


def _trailer(sha256: str) -> bytes:
    """The last bytes of the archive: the length of its comment, and the comment."""
    comment = MARK + sha256.encode()
    return len(comment).to_bytes(2, "little") + comment


def read(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU; raises `DamagedError` unless its hash is right."""
    with path.open("rb") as file:
        sha = hashlib.sha256()
        left = os.fstat(file.fileno()).st_size - len(_trailer("0" * 64))
        while left > 0 and (block := file.read(min(left, 1 << 22))):
            sha.update(block)
            left -= len(block)
        trailer = file.read()
    if trailer != _trailer(sha.hexdigest()):
        raise DamagedError(f"{path} is cut or altered: its SHA-256 does not match")
    content = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(content, dict)
    return content


def read_last(folder: Path) -> dict[str, Any] | None:
    """The newest whole checkpoint of a run, or None if it has none yet."""
    found = [folder / name for name in (LAST, PREVIOUS) if (folder / name).exists()]
    for path in found:
        try:
            return read(path)
        except DamagedError as damage:
            log.warning("%s; trying the one before it", damage)
    if found:
        raise UserError(
            f"no checkpoint in {folder} is whole; restore one, or remove them to start anew"
        )
    return None


class Writer:
    """Writes checkpoints from a thread, in the order given; a write that fails is retried.

    Only the newest content of each name waits, so a slow disk costs one copy, not a queue.
    """

    def __init__(self, folder: Path, *, keep: int = 0, retry_seconds: float = 10.0) -> None:
        self.folder, self.keep, self.retry_seconds = folder, keep, retry_seconds
        self.bytes_written: dict[str, int] = {}
        self.trouble: str | None = None
        self._waiting: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._busy = self._closed = False
        for leftover in folder.glob("*.pt.tmp"):  # of a process that was killed while writing
            leftover.unlink()
        self._thread = threading.Thread(target=self._work, name="checkpoint writer", daemon=True)
        self._thread.start()

    def submit(self, name: str, content: dict[str, Any]) -> None:
        """Take over `content` (the caller must not change it again) and write it soon."""
        with self._changed:
            # A retried write of an older state gives way to the newer one, at its place in line.
            self._waiting[name] = content
            self._changed.notify_all()

    def flush(self, patience: float = PATIENCE_SECONDS) -> None:
        """Wait until everything is on disk; raises if the disk refuses for too long."""
        until = time.monotonic() + patience
        with self._changed:
            while self._waiting or self._busy:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    raise OSError(
                        f"cannot save in {self.folder}: {self.trouble or 'disk too slow'}"
                    )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                content = self._waiting.pop(name)
                self._busy = True
            failed = self._try(name, content)
            with self._changed:
                self._busy = False
                if failed:
                    # First in line again, so that `last.pt` never names a best that is not there.
                    self._waiting = {name: self._waiting.get(name, content)} | self._waiting
                    if self._closed:
                        return
                    self._changed.wait(self.retry_seconds)
                self._changed.notify_all()

    def _try(self, name: str, content: dict[str, Any]) -> bool:
        """Write once; on failure say so, once per kind of trouble."""
        previous = self.folder / PREVIOUS if name == LAST else None
        try:
            self.bytes_written[name] = write(content, self.folder / name, previous=previous)
            if name == LAST and self.keep:
                self._keep_copy(int(content["step"]))
        except OSError as error:
            if self.trouble != str(error):
                log.error(
                    "could not save %s (%s); training goes on, trying again every %g s",
                    name,
                    error.strerror,
                    self.retry_seconds,
                )
            self.trouble = str(error)
            return True
        if self.trouble:
            log.warning("saved %s after all", name)
            self.trouble = None
        return False

    def _keep_copy(self, step: int) -> None:
        """Give the checkpoint a second name that stays, and drop the oldest beyond `keep`."""
        copy = self.folder / f"step-{step:08d}.pt"
        copy.unlink(missing_ok=True)
        try:
            os.link(self.folder / LAST, copy)
        except OSError:  # a file system without hard links
            shutil.copyfile(self.folder / LAST, copy)
        # Two of the names are those of `last.pt` and `last.prev.pt`, and cost nothing.
        for old in sorted(self.folder.glob("step-*.pt"))[: -(self.keep + 2)]:
            old.unlink()
