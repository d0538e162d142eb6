"""One trainer per folder: a lock that also holds on network file systems. No torch.

`link()` is atomic on NFS where `O_EXCL` and `flock` have not always been, and the age of a lock is
read off the file server's own clock, so hosts whose clocks disagree still judge it alike.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from oelm.train.errors import InUseError

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0  # of silence, after which a holder on another host is taken for dead


class FolderLock:
    """`with FolderLock(folder):` holds `folder/lock`, renewing its heartbeat from a thread."""

    def __init__(
        self,
        folder: Path,
        *,
        stale: float = STALE_SECONDS,
        on_beat: Callable[[], None] | None = None,
    ) -> None:
        self.path = folder / "lock"
        self.stale, self.on_beat = stale, on_beat
        self.token = uuid.uuid4().hex
        self.lost = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock heartbeat", daemon=True)

    def __enter__(self) -> "FolderLock":
        self._take(self.path)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        if _read(self.path).get("token") == self.token:
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise if another process has taken the folder over, thinking this one dead."""
        if self.lost:
            raise InUseError(f"{self.path.parent} was taken over: {describe(_read(self.path))}")

    def _write_own(self) -> Path:
        own = self.path.with_name(f"lock.own.{uuid.uuid4().hex}")
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "heartbeat": time.time(),
            "token": self.token,
        }
        own.write_text(json.dumps(content), encoding="utf-8")
        return own

    def _take(self, path: Path) -> None:
        """Make `path` ours if it is free or its holder is dead; raise `InUseError` if that lives.

        Only who holds the claim to a dead holder's lock may replace it. A claim is a lock like any
        other, named after the dead holder, so one whose claimant died in turn is taken the same way.
        """
        own = self._write_own()
        try:
            while not _linked(own, path):
                seen = _read(path)
                if not _dead(path, seen, self.stale):
                    raise InUseError(f"{self.path.parent} is in use: {describe(seen)}")
                if not path.exists():
                    continue
                claim = path.with_name(f"{path.name}.of.{seen.get('token')}")
                self._take(claim)
                try:
                    # Since we looked, a rival may have claimed, replaced, and given up its claim.
                    if _read(path).get("token") == seen.get("token"):
                        os.replace(own, path)
                        return
                finally:
                    claim.unlink()
        finally:
            own.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            # A full disk, or a file server that is away for a while: try again at the next beat.
            with contextlib.suppress(OSError):
                holds = json.loads(self.path.read_text(encoding="utf-8"))["token"] == self.token
                self.lost = self.lost or not holds
                if holds:
                    os.replace(self._write_own(), self.path)
            if self.on_beat:
                self.on_beat()


def holder(folder: Path, *, stale: float = STALE_SECONDS) -> dict[str, Any] | None:
    """Who holds the folder (host, pid, heartbeat), or None."""
    path = folder / "lock"
    content = _read(path)
    return None if not path.exists() or _dead(path, content, stale) else content


def describe(content: dict[str, Any]) -> str:
    """`host node1, process 123, heartbeat 4 s ago`."""
    if not content:
        return "its lock cannot be read"
    age = max(0.0, time.time() - content["heartbeat"])
    return f"host {content['host']}, process {content['pid']}, heartbeat {age:.0f} s ago"


def _linked(source: Path, target: Path) -> bool:
    """Make `target` a second name of `source`, if it is not taken."""
    with contextlib.suppress(FileExistsError):
        os.link(source, target)
    # Over NFS the answer to a link() that succeeded can be lost: the link count tells the truth.
    return source.stat().st_nlink == 2


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _dead(path: Path, content: dict[str, Any], stale: float) -> bool:
    if content.get("host") == socket.gethostname():
        try:
            process = psutil.Process(content["pid"])
            same = abs(process.create_time() - content["started"]) < 1
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
    try:
        return _server_time(path.parent) - path.stat().st_mtime > stale
    except FileNotFoundError:  # released meanwhile
        return True


def _server_time(folder: Path) -> float:
    """Now, by the clock that also stamps the files of this folder."""
    probe = folder / f"lock.now.{uuid.uuid4().hex}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:  # a folder that may only be read
        return time.time()
    return now
