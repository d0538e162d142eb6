"""How far a study's runs are, read off the folders alone: no torch, no YAML, and quick."""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.errors import UserError, nearest
from oelm.study.folders import attempts, final_failure, read_json, read_state
from oelm.study.squeue import job_of, jobs
from oelm.train.lock import holder

TAIL_BYTES = 16384
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run as `oelm status` shows it."""

    study: str
    arm: str
    point: str
    seed: int
    state: str
    """waiting · queued (by Slurm) · running · finished · stopped · failed · interrupted"""
    step: int
    max_steps: int
    loss: float | None
    val_ppl: float | None
    tokens_per_second: float | None
    eta: float | None
    """Seconds until it is finished, at the pace so far."""
    where: str
    attempts: int
    error: str | None
    folder: Path


def find_folder(text: str, root: Path) -> Path:
    """A study's or run's folder by path, by name below `root`, or by the study's YAML file."""
    name = Path(text).stem if text.endswith((".yaml", ".yml")) else text
    for folder in (root / name, Path(name)):
        if any((folder / mark).exists() for mark in ("plan.json", "state.json", "planned.yaml")):
            return folder
    known = [p.parent.name for p in root.glob("*/plan.json")]
    hint = nearest(name, known) if known else f"; there is none in {root}/"
    raise UserError(f"no study or run '{text}'{hint}")


def run_folders(folder: Path) -> list[Path]:
    """The folders of a study's runs; a run's own folder stands for itself."""
    plan = read_json(folder / "plan.json")
    return [folder] if plan is None else [folder / row["folder"] for row in plan]


def rows(folder: Path, slurm: dict[str, str] | None = None) -> list[Row]:
    """A row for each run of a study."""
    plan = read_json(folder / "plan.json")
    if plan is None:
        raise UserError(f"{folder} holds no study; give a study's folder or name")
    return [_row(folder, entry, slurm or {}) for entry in plan]


def studies(root: Path) -> list[Path]:
    """The studies that have a folder below `root`, the one touched last at the end."""
    plans = sorted(root.glob("*/plan.json"), key=lambda p: p.stat().st_mtime)
    return [p.parent for p in plans]


def slurm_states(folders: Iterable[Path]) -> dict[str, str]:
    """Slurm's word on jobs, asked for only where some run was submitted to it."""
    submitted = any((run / "slurm.json").exists() for f in folders for run in run_folders(f))
    return (jobs() or {}) if submitted else {}


def loss_curve(folder: Path, width: int = 24) -> str:
    """The run's training loss as a small bar for each stretch of its steps."""
    lines = _tail(folder / "metrics.jsonl", 1 << 20)
    losses = [line["loss"] for line in lines if line.get("kind") == "train" and line.get("loss")]
    if len(losses) < 2:
        return ""
    places = [losses[i * (len(losses) - 1) // (width - 1)] for i in range(width)]
    low, high = min(places), max(places)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    return "".join(BARS[round((loss - low) * scale)] for loss in places)


def _row(folder: Path, entry: dict[str, Any], slurm: dict[str, str]) -> Row:
    run = folder / entry["folder"]
    state, config = read_state(run), entry["config"]
    last = state.get("last") or {}
    word = _word(run, state, slurm)
    step, steps = state.get("step", 0), config["max_steps"]
    evaluated = last.get("val_ppl") or _last_evaluation(run) if state else None
    tried = attempts(run) if (run / "attempts.jsonl").exists() else []
    return Row(
        study=folder.name,
        arm=entry["arm"],
        point=entry["point"],
        seed=entry["seed"],
        state=word,
        step=step,
        max_steps=steps,
        loss=last.get("loss"),
        val_ppl=evaluated,
        tokens_per_second=last.get("tokens_per_second"),
        eta=_eta(run, step, steps) if word == "running" else None,
        where=state.get("where") or "",
        attempts=len(tried),
        error=state.get("error") or (tried[-1]["error"] if tried and word == "failed" else None),
        folder=run,
    )


def _word(run: Path, state: dict[str, Any], slurm: dict[str, str]) -> str:
    said = state.get("state", "waiting")
    if said == "finished":
        return "finished"
    if (run / "lock").exists() and holder(run):
        return "running"
    if (run / "attempts.jsonl").exists() and final_failure(run):
        return "failed"
    if (run / "slurm.json").exists() and (job := slurm.get(job_of(run) or "")):
        return "queued" if job == "PENDING" else job.lower()
    return "interrupted" if said == "running" else str(said)


def _last_evaluation(run: Path) -> Any:
    for line in reversed(_tail(run / "metrics.jsonl", TAIL_BYTES)):
        if line.get("kind") == "eval" and line.get("split") == "val":
            return line.get("ppl")
    return None


def _eta(run: Path, step: int, steps: int) -> float | None:
    """Training time left, at the pace of the last lines."""
    timed = [x for x in _tail(run / "metrics.jsonl", TAIL_BYTES) if x.get("kind") == "train"]
    if len(timed) < 2 or timed[-1]["step"] <= timed[0]["step"]:
        return None
    pace = (timed[-1]["seconds"] - timed[0]["seconds"]) / (timed[-1]["step"] - timed[0]["step"])
    return float(pace * (steps - step))


def _tail(path: Path, size: int) -> list[dict[str, Any]]:
    """The last lines of a file of JSON lines, whole ones only."""
    lines = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - size)
        file.seek(start)
        for text in file.read().split(b"\n")[bool(start) :]:
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def follow(path: Path, *, poll: float = 0.3) -> Iterable[str]:
    """A file's text as it grows, for ever; starts anew when the file does."""
    position = 0
    while True:
        size = path.stat().st_size if path.exists() else 0
        if size < position:
            position = 0
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                block = file.read()
            position += len(block)
            yield block.decode(errors="replace")
        else:
            time.sleep(poll)
