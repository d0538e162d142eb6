"""Read run folders: whatever state they are in, from any engine, without torch.

What cannot be read becomes a problem that the report shows; reading itself never fails.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from oelm.analysis.words import Text, text

SILENT_AFTER = 300
"""Seconds without a heartbeat after which a run that says it is running is probably dead."""

Curve = dict[str, np.ndarray]
"""Columns of equal length, `step` among them; nan where a line lacked the field."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser in C where it is built in: ten times faster, same result."""
TIMING = {
    "steps_per_hour": "steps_per_hour",
    "step_time": "median_step_time",
    "tokens_per_second": "tokens_per_second",
    "wall_time": "total_wall_time",
    "peak_memory": "peak_memory_bytes",
    "checkpoint_bytes": "checkpoint_bytes",
    "best_ppl": "best_perplexity",
}
QUALITY = ("loss", "ppl", "bpb", "accuracy", "macro_f1")


@dataclass
class Run:
    """One run folder, as far as it could be read."""

    arm: str
    seed: int
    point: str = ""
    folder: Path | None = None
    state: str = "missing"
    error: str | None = None
    step: int = 0
    max_steps: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    train: Curve = field(default_factory=dict)
    val: Curve = field(default_factory=dict)
    probes: dict[str, Curve] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    confusion: list[list[int]] | None = None
    classes: list[str] = field(default_factory=list)
    """The names of the classes, in the order of the confusion matrix."""
    audit: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, str]] = field(default_factory=list)
    problems: list[Text] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it ran to its end, so that its numbers may decide something."""
        return self.state == "finished"

    @property
    def where(self) -> str:
        """How the report names it."""
        return "/".join(part for part in (self.arm, self.point, f"seed-{self.seed}") if part)

    def curve(self, kind: str) -> Curve:
        """What was recorded step by step: train, val or a probe (`probe:copy`)."""
        if kind.startswith("probe:"):
            return self.probes.get(kind.removeprefix("probe:"), {})
        return self.train if kind == "train" else self.val

    def value(self, name: str) -> float | None:
        """A metric by the name that claims use; None if the run did not record it."""
        kind, _, argument = name.partition(":")
        if kind == "probe" and argument in self.probes:
            return float(self.probes[argument]["value"][-1])
        if kind == "time_to_ppl":
            return self.time_to(float(argument))
        found = self.values.get(name)
        return found if found is not None and math.isfinite(found) else None

    def time_to(self, target: float) -> float | None:
        """Seconds of training until validation perplexity first reached `target`."""
        ppl = self.val.get("ppl", np.array([]))
        reached = np.flatnonzero(ppl <= target)
        if not len(reached) or "seconds" not in self.train:
            return None
        steps, i = self.val["step"], int(reached[0])
        at = steps[i]
        if i and ppl[i - 1] > target > 0:  # between two evaluations, on the line of log perplexity
            share = math.log(ppl[i - 1] / target) / math.log(ppl[i - 1] / ppl[i])
            at = steps[i - 1] + share * (steps[i] - steps[i - 1])
        return float(np.interp(at, self.train["step"], self.train["seconds"]))


def read_run(folder: Path, *, arm: str = "", point: str = "", seed: int | None = None) -> Run:
    """The run in `folder`; what is missing or broken is noted in `problems`."""
    run = Run(arm=arm or folder.name, seed=seed or 0, point=point, folder=folder)
    if not folder.is_dir():
        return run
    config = _load(run, "config.yaml")
    resolved = _mapping(config.pop("resolved", None))
    run.config, run.method, run.model = config, _mapping(resolved.get("method")), {}
    run.model = _mapping(resolved.get("model"))
    classes = _mapping(resolved.get("dataset")).get("classes")
    run.classes = [str(name) for name in classes] if isinstance(classes, list) else []
    if seed is None:
        run.seed = _integer(config.get("seed"))
    if not arm:
        run.arm = _method_name(run)
    run.max_steps = _integer(config.get("max_steps"))
    run.environment = _load(run, "environment.json")
    run.audit = _load(run, "freeze_audit.json")
    samples = _load(run, "samples.json", kind=list)
    run.samples = [
        {"prompt": str(s.get("prompt", "")), "text": str(s.get("text", ""))}
        for s in samples
        if isinstance(s, Mapping)
    ]
    _read_metrics(run)
    _read_numbers(run)
    _read_state(run)
    return run


def _method_name(run: Run) -> str:
    name = run.method.get("name") or run.config.get("method")
    return str(name) if isinstance(name, str) else str(run.folder.name if run.folder else "run")


def _load(run: Run, name: str, kind: type = dict) -> Any:
    """A file of the folder; empty if it is absent, and a problem if it cannot be read."""
    assert run.folder
    path = run.folder / name
    try:
        content = path.read_text(encoding="utf-8")
        data = yaml.load(content, LOADER) if path.suffix == ".yaml" else json.loads(content)
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, yaml.YAMLError) as error:
        run.problems.append(text("file_broken", run=run.where, file=name, why=_line(error)))
        return kind()
    if not isinstance(data, kind):
        run.problems.append(text("file_odd", run=run.where, file=name))
        return kind()
    return data


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    """A recorded number as float; nan for what is none."""
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    )


def _integer(value: Any) -> int:
    number = _number(value)
    return int(number) if math.isfinite(number) else 0


def _lines(run: Run, path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that was cut and broken lines are noted."""
    try:
        rows = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        run.problems.append(text("file_broken", run=run.where, file=path.name, why=_line(error)))
        return []
    numbered = [(i, row) for i, row in enumerate(rows, 1) if row.strip()]
    try:  # all at once is several times faster than line by line
        parsed = json.loads(b"[" + b",".join(row for _, row in numbered) + b"]")
        if all(isinstance(row, dict) for row in parsed) and len(parsed) == len(numbered):
            return list(parsed)
    except ValueError:
        pass
    good: list[dict[str, Any]] = []
    for i, row in numbered:
        try:
            one = json.loads(row)
        except ValueError:
            one = None
        if isinstance(one, dict):
            good.append(one)
        elif i == numbered[-1][0]:
            run.problems.append(text("line_cut", run=run.where, file=path.name, line=i))
        else:
            run.problems.append(text("line_broken", run=run.where, file=path.name, line=i))
    return good


def _curve(rows: list[dict[str, Any]], names: tuple[str, ...]) -> Curve:
    """Columns from rows, in order of their steps; names that no row has are left out."""
    if not rows:
        return {}
    columns = {
        name: np.array([_number(row.get(name)) for row in rows])
        for name in ("step", *names)
        if any(name in row for row in rows)
    }
    if "step" not in columns:
        return {}
    known = np.flatnonzero(np.isfinite(columns["step"]))
    order = known[np.argsort(columns["step"][known], kind="stable")]
    return {name: column[order] for name, column in columns.items()}


def _read_metrics(run: Run) -> None:
    assert run.folder
    rows = _lines(run, run.folder / "metrics.jsonl")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(str(row.get("kind")), []).append(row)
    run.train = _curve(kinds.get("train", []), ("loss", "lr", "grad_norm", "tokens", "seconds"))
    evals = kinds.get("eval", [])
    # While training, a fixed stretch of the split is evaluated; the whole of it at the end is other
    # text, and as the curve's last point it would look like a jump.
    val = [r for r in evals if r.get("split", "val") == "val"]
    run.val = _curve([r for r in val if r.get("full") is not True] or val, QUALITY)
    probes: dict[str, list[dict[str, Any]]] = {}
    for row in kinds.get("probe", []):
        probes.setdefault(str(row.get("name")), []).append(row)
    run.probes = {
        n: c for n, r in probes.items() if len((c := _curve(r, ("value",))).get("value", ()))
    }
    for split, prefix in (("val", ""), ("test", "test_")):
        full = [r for r in evals if r.get("full") is True and r.get("split") == split]
        for name in QUALITY:
            if full and name in full[-1]:
                run.values[prefix + name] = _number(full[-1][name])
        if full and split == "val":
            confusion = full[-1].get("confusion")
            run.confusion = confusion if isinstance(confusion, list) else None
            # The scores' names say what a label means; the configuration's are the labels.
            run.classes = list(_mapping(full[-1].get("classes"))) or run.classes
    for name in ("train", "val"):
        losses = getattr(run, name).get("loss", np.array([]))
        if bad := int(np.sum(~np.isfinite(losses))):
            run.problems.append(text("not_finite", run=run.where, kind=name, n=bad))


def _read_numbers(run: Run) -> None:
    """Speed and size from the timing file, counts from the audit."""
    timing = _load(run, "timing_stats.json")
    for name, key in TIMING.items():
        if key in timing:
            run.values[name] = _number(timing[key])
    if "best_ppl" not in run.values and len(run.val.get("ppl", ())):
        run.values["best_ppl"] = float(np.nanmin(run.val["ppl"]))
    for name in ("trainable", "frozen", "total"):
        if name in run.audit:
            run.values[name] = _number(run.audit[name])
    if run.values.get("total"):
        run.values["frozen_share"] = run.values.get("frozen", 0.0) / run.values["total"]


def _read_state(run: Run) -> None:
    state = _load(run, "state.json")
    run.state = str(state.get("state", "unknown" if run.config or run.values else "missing"))
    run.step, run.error = _integer(state.get("step")), state.get("error")
    run.max_steps = _integer(state.get("max_steps")) or run.max_steps
    if not run.step and len(run.train.get("step", ())):
        run.step = int(run.train["step"][-1])
    recorded = any(name in run.values for name in ("loss", "accuracy"))
    if run.finished and not recorded:
        run.state = "incomplete"
        run.problems.append(text("no_final", run=run.where))
    if run.state == "unknown" and recorded:
        run.state = "finished"  # a folder from elsewhere that has all the numbers
    heartbeat = _number(state.get("heartbeat"))
    if run.state == "running" and time.time() - heartbeat > SILENT_AFTER:
        hours = (time.time() - heartbeat) / 3600
        run.problems.append(text("silent", run=run.where, hours=f"{hours:.1f}"))
    if run.state == "failed":
        why = str(run.error or "no reason recorded")
        run.problems.append(text("failed", run=run.where, step=run.step, why=why))
