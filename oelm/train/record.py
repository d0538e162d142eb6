"""What a run leaves behind: a folder that explains itself, and whose metrics survive anything. No torch."""

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from oelm.config import load_yaml, to_mapping
from oelm.errors import UserError
from oelm.train.config import TrainConfig
from oelm.train.errors import StoppedError
from oelm.train.track import Tracker
from oelm.version import __version__

SCHEMA = 1
log = logging.getLogger(__name__)

# What may differ between the command that started a run and the one that continues it: where and
# how it is computed and watched, not what is computed.
FREE = {
    "out_dir", "device", "compile", "parallel", "activation_checkpointing", "deterministic",
    "threads", "keep", "log_interval", "save_interval", "skip_bad_steps", "resume", "track", "test",
    "max_memory", "grad_accumulation",
    # Compared in their resolved form.
    "method", "model", "dataset", "seed", "init_seed", "data_seed", "frozen_seed",
}  # fmt: skip


class Record:
    """The run's folder while it is written. On ranks other than 0 it writes nothing."""

    def __init__(self, config: TrainConfig, *, writes: bool = True) -> None:
        self._config, self.folder, self.writes = config, config.out_dir, writes
        self._active = False
        self._tracker: Tracker | None = None
        self.state: dict[str, Any] = {
            "schema": SCHEMA,
            "state": "running",
            "step": 0,
            "max_steps": config.max_steps,
            "attempt": 1,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
            "finished": None,
            "error": None,
            "where": _where(),
            "last": {},
        }
        self._metrics = _Lines(self.folder / "metrics.jsonl")
        self._written = 0.0
        self._mutex = threading.Lock()

    def __enter__(self) -> "Record":
        if self.writes:
            self.state["attempt"] = int(self._earlier().get("attempt") or 0) + 1
            self._active = True
            self._tracker = Tracker(self._config) if self._config.track else None
            self._write_state()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.state |= {"state": "finished", "finished": time.time()}
        elif issubclass(kind, StoppedError):
            self.state |= {"state": "stopped", "error": None}
        else:
            self.state |= {"state": "failed", "error": f"{kind.__name__}: {error}"}
        if self.writes:
            self._active = False
            self._metrics.close()
            if self._tracker:
                self._tracker.close()
            self._write_state()

    def finished(self) -> bool:
        """Whether the folder's run is finished."""
        return bool(self._earlier().get("state") == "finished")

    def _earlier(self) -> dict[str, Any]:
        try:
            state = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def metrics(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to `metrics.jsonl`."""
        if self.writes:
            self._metrics.append({"kind": kind, "step": step, **values})
            if self._tracker:
                self._tracker.log(kind, step, values)

    def rewind(self, step: int) -> None:
        """Drop the lines that a run continued from `step` will write again."""
        if self.writes:
            self._metrics.keep(lambda line: line["step"] <= step and not line.get("full"))

    def update(self, step: int, **last: Any) -> None:
        """Note where the run is; reaches `state.json` about once a second."""
        self.state["step"] = step
        self.state["last"] = {**self.state["last"], **last}
        if self.writes and time.time() - self._written > 1:
            self._write_state()

    def beat(self) -> None:
        """Renew the heartbeat (from the lock's thread, so that a long step is no silence)."""
        if self._active:
            self._write_state()

    def json(self, name: str, data: Any) -> None:
        """Write one JSON file of the folder, all or nothing."""
        if self.writes:
            _replace(self.folder / name, json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    def config(self, resolved: Mapping[str, Any]) -> None:
        """Write `config.yaml`, or check that a run being continued is the same run."""
        path = self.folder / "config.yaml"
        content = {"schema": SCHEMA, **to_mapping(self._config), "resolved": dict(resolved)}
        if path.exists():
            _compare(load_yaml(path), content, self.folder)
        if self.writes and not self.finished():
            _replace(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))

    def _write_state(self) -> None:
        with self._mutex, contextlib.suppress(OSError):  # a full disk must not end a run
            self._written = self.state["heartbeat"] = time.time()
            _replace(self.folder / "state.json", json.dumps(self.state) + "\n", sync=False)


class _Lines:
    """An append-only file of JSON lines; while the disk is full, lines wait in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []

    def append(self, line: Mapping[str, Any]) -> None:
        self._waiting.append(json.dumps(line) + "\n")
        self._drain()

    def _drain(self) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write("".join(self._waiting).encode())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # half a line may have made it
            log.warning("could not write %s (%s); its lines wait", self.path.name, error.strerror)
        else:
            self._waiting.clear()

    def keep(self, wanted: Any) -> None:
        """Rewrite the file without the unwanted lines, and without a last line cut in half."""
        if not self.path.exists():
            return
        lines = []
        for text in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                if text.endswith("\n") and wanted(json.loads(text)):
                    lines.append(text)
        _replace(self.path, "".join(lines))

    def close(self) -> None:
        if self._waiting:
            self._drain()


def environment(device: str, precision: str, threads: int, world: int) -> dict[str, Any]:
    """What the numbers were made with."""
    names = ("torch", "numpy", "scipy", "tokenizers", "tiktoken", "transformers", "datasets")
    packages = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "schema": SCHEMA,
        "oelm": __version__,
        "code": commit(),
        "python": platform.python_version(),
        "packages": packages,
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "device": device,
        "precision": precision,
        "threads": threads,
        "processes": world,
        "command": sys.argv,
    }


def _where() -> str:
    """The place that a study's engine gave the run, or what can be seen from here."""
    job = os.environ.get("SLURM_JOB_ID")
    return os.environ.get("OELM_WHERE") or (f"slurm {job}" if job else "local")


def commit() -> str | None:
    """The commit of the code, with `+` where files were changed since; None outside a checkout."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        # Only a checkout of this very package counts, not one that merely contains its venv.
        subprocess.run(
            [*git, "ls-files", "--error-unmatch", __file__], check=True, capture_output=True
        )
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(here.parent)])
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.returncode else "")


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _replace(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def _compare(there: Mapping[str, Any], here: Mapping[str, Any], folder: Path) -> None:
    """Refuse to continue a run as another one, and name what differs; its method first."""
    methods = [config["resolved"]["method"] for config in (there, here)]
    names = [method.get("name") for method in methods]
    if names[0] != names[1] and not _same(*({**m, "name": "", "about": ""} for m in methods)):
        raise UserError(
            f"{folder} holds a run of {names[0]}, not of {names[1]}; choose another --out_dir"
        )
    there, here = (_anywhere(config) for config in (there, here))
    for key in here.keys() - FREE - {"schema"}:
        if key in there and not _same(there[key], here[key]):
            shown = _difference(there[key], here[key], key)
            raise UserError(f"{folder} holds a run with {shown}; choose another --out_dir")


def _anywhere(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the place of its dataset, whose hash says all."""
    resolved = dict(config["resolved"])
    if isinstance(dataset := resolved.get("dataset"), Mapping):
        resolved["dataset"] = {k: v for k, v in dataset.items() if k != "path"}
    return {**config, "resolved": resolved}


def _same(there: Any, here: Any) -> bool:
    """Equal in all that both name: versions add and drop fields, whose default is to change nothing."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        return all(_same(there[key], here[key]) for key in there.keys() & here.keys())
    return bool(there == here)


def _difference(there: Any, here: Any, name: str) -> str:
    """`max_lr 0.001, not 0.003`, descending to where two mappings differ."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in there.keys() & here.keys():
            if not _same(there[key], here[key]):
                return _difference(there[key], here[key], f"{name}.{key}")
    return f"{name} {there!r}, not {here!r}"
