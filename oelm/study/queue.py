"""What a study still has to do, read off its folders, which are the truth. No torch.

Any number of runners share a study: each trainer locks its folder, so a runner that comes second
finds the folder held and takes another. A runner keeps nothing that is not in the folders.
"""

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from oelm.config import from_mapping, to_mapping
from oelm.data.dataset import Dataset, data_home
from oelm.errors import UserError
from oelm.methods import Method
from oelm.study.confounds import confounds, from_datasets
from oelm.study.folders import (
    attempts,
    final_failure,
    note_attempt,
    read_json,
    read_state,
    stop_token,
    write_json,
    write_text,
)
from oelm.study.plan import HINTS, Run, Study, essence, load_study
from oelm.train.config import TrainConfig
from oelm.train.errors import InUseError
from oelm.train.lock import FolderLock, describe, holder
from oelm.train.record import commit
from oelm.version import __version__

RETRIES = 2
FINISHED, FAILED, USER_ERROR, STOPPED, NOT_FINITE, LOCKED = 0, 1, 2, 3, 4, 5
# Trying again with the same input ends the same way.
HOPELESS = (USER_ERROR, NOT_FINITE)
COMPACT = ("config.yaml", "metrics.jsonl", "*.json")
OUTDATED = ".outdated"


class Queue:
    """The runs of one study in one folder, as one runner sees them."""

    def __init__(self, source: Path, root: Path = Path("runs"), *, only: str | None = None) -> None:
        self.source = source
        self.study: Study = load_study(source)
        self.folder = root / self.study.name
        self.all_runs = self.study.runs(root)
        if only is not None and only not in self.study.arms:
            raise UserError(f"--only {only}: the study's arms are {', '.join(self.study.arms)}")
        self.runs = [r for r in self.all_runs if only in (None, r.arm)]
        self._done: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._plan = json.dumps([r.row() for r in self.all_runs], indent=1) + "\n"
        self._seen_stops = {folder: stop_token(folder) for folder in self._stop_folders()}

    def open(
        self, *, results: Path | None = Path("results"), retry_failed: bool = False
    ) -> list[str]:
        """Make the folder hold this study and nothing that contradicts it; returns what to tell.

        What `results` holds of the study counts as done; None lets everything run here.
        """
        self._refuse_foreign_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        with _alone(self.folder):
            notes = self._put_outdated_aside()
            if results is not None:
                notes += self._take_over_results(results / self.study.name)
            notes += self._write_plan()
        if retry_failed:
            for run in self.runs:
                if final_failure(run.folder):
                    note_attempt(run.folder, {"reset": True})
        return notes

    def next(self, besides: Iterable[str] = ()) -> Run | None:
        """A run that can start now, `besides` those that this runner has just started."""
        if (self.folder / "plan.json").read_text(encoding="utf-8") != self._plan:
            raise UserError(
                f"{self.folder} was given another plan meanwhile; start again to follow it"
            )
        started, now = set(besides), time.monotonic()
        for run in self.runs:
            waits = run.name in started or self._not_before.get(run.name, 0) > now
            if not waits and self._startable(run):
                return run
        return None

    def startable(self) -> list[Run]:
        """Every run that could start now."""
        return [r for r in self.runs if self._startable(r)]

    def wait_for(self) -> list[Run]:
        """Unfinished runs that somebody else works on, or that are to start again in a moment."""
        return [
            r
            for r in self.runs
            if not self.done(r)
            and (holder(r.folder) or (self._startable(r) and r.name in self._not_before))
        ]

    def done(self, run: Run) -> bool:
        """Whether it is finished; that never changes back."""
        if run.name not in self._done and read_state(run.folder).get("state") == "finished":
            self._done.add(run.name)
        return run.name in self._done

    def unfinished(self) -> list[Run]:
        """The runs that are not finished."""
        return [r for r in self.runs if not self.done(r)]

    def stop_wanted(self, run: Run | None = None) -> bool:
        """Whether `oelm stop` has named the study, or this run, since this runner started."""
        folder = self.folder if run is None else run.folder
        return stop_token(folder) not in (None, self._seen_stops.get(folder))

    @staticmethod
    def meant(run: Run, code: int, began: float) -> int:
        """The exit code of a trainer that torchrun may have turned into 1, from what it left behind."""
        state = read_state(run.folder)
        if code != FAILED or float(state.get("started") or 0) < began:
            return code
        if state.get("state") == "stopped":
            return STOPPED
        kind = str(state.get("error") or "").partition(":")[0]
        return {"UserError": USER_ERROR, "NonFiniteError": NOT_FINITE}.get(kind, code)

    def ended(self, run: Run, code: int, where: str, *, asked: bool = False) -> str:
        """Note how a trainer ended; returns that in words. `asked`: it was told to stop."""
        if self.done(run):
            return "finished"
        if code == LOCKED or holder(run.folder):
            # Another runner was quicker, or we only lost sight of our own trainer.
            self._not_before[run.name] = time.monotonic() + 1
            return "left to the trainer that holds its folder"
        state = read_state(run.folder)
        if asked or code == STOPPED:
            return f"stopped at step {state.get('step', 0)}"
        error = state.get("error") if state.get("state") == "failed" else None
        error = error or _meaning(code, run.folder)
        crashes = 1 + len(attempts(run.folder))
        final = code in HOPELESS or crashes > RETRIES
        entry = {"exit": code, "error": error, "step": state.get("step", 0), "where": where}
        note_attempt(run.folder, {**entry, "time": time.time(), "final": final})
        if not final:
            return f"failed ({error}); trying again from its last checkpoint"
        with contextlib.suppress(InUseError), FolderLock(run.folder):
            failed = {"schema": 1, "step": 0, "max_steps": run.config.max_steps, "where": where}
            write_json(
                run.folder / "state.json", {**failed, **state, "state": "failed", "error": error}
            )
        return f"failed: {error}"

    def _startable(self, run: Run) -> bool:
        return not (
            self.done(run)
            or holder(run.folder)
            or final_failure(run.folder)
            or self.stop_wanted(run)
        )

    def _stop_folders(self) -> Iterable[Path]:
        return [self.folder, *(r.folder for r in self.all_runs)]

    def _refuse_foreign_folder(self) -> None:
        """A folder that another study, or a single run, made is not ours to continue."""
        if not self.folder.exists():
            return
        origin = read_json(self.folder / "origin.json")
        if not origin:
            if any(self.folder.glob("**/config.yaml")):
                raise UserError(
                    f"{self.folder} holds runs that no study made; rename it, or the study"
                )
            return
        theirs = Path(origin["source"])
        if theirs.resolve() == self.source.resolve() or not theirs.exists():
            return
        if theirs.read_bytes() != self.source.read_bytes():
            raise UserError(
                f"{self.folder} was made by another study of that name, {theirs}; rename one of them"
            )

    def _put_outdated_aside(self) -> list[str]:
        """Move runs made with another configuration to `.outdated`, where nothing is lost."""
        changed = []
        for run in self.all_runs:
            if not (run.folder / "config.yaml").exists() or _matches(run.folder, run.config):
                continue
            if held := holder(run.folder):
                raise UserError(
                    f"{run.folder} is being trained with another configuration ({describe(held)}); "
                    "`oelm stop` it first, or undo the change"
                )
            changed.append((run, read_state(run.folder).get("state") == "finished"))
        notes = []
        for run, finished in changed:
            aside = self.folder / OUTDATED / f"{run.name.replace('/', '+')}-{uuid.uuid4().hex[:6]}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            run.folder.rename(aside)
            what = "finished with another configuration" if finished else "was begun otherwise"
            notes.append(f"{run.name} {what}; runs anew (the old one is in {aside})")
        planned = {r.name for r in self.all_runs}
        for row in read_json(self.folder / "plan.json") or []:
            state = read_state(self.folder / row["folder"]).get("state")
            if row["folder"] not in planned and state == "finished":
                notes.append(f"{row['folder']} is finished and no longer part of the study")
        return notes

    def _take_over_results(self, results: Path) -> list[str]:
        """Compact results that were kept count as finished: they become run folders here."""
        taken = strange = 0
        for run in self.all_runs:
            kept = results / run.name
            if (run.folder / "state.json").exists() or not _is_finished(kept, run.config):
                continue
            if not _of_the_same_data(kept, run.config):
                strange += 1
                continue
            arriving = run.folder.with_name(f".{run.folder.name}.{uuid.uuid4().hex}")
            shutil.copytree(kept, arriving)
            shutil.rmtree(run.folder, ignore_errors=True)  # at most a stop mark or a plan
            arriving.rename(run.folder)
            taken += 1
        notes = []
        if taken:
            notes.append(
                f"{taken} finished runs taken from {results}; --fresh would train them here"
            )
        if strange:
            notes.append(f"{strange} runs in {results} are of other data than is prepared here")
        return notes

    def _write_plan(self) -> list[str]:
        plan, kept, notes = self.folder / "plan.json", self.folder / "study.yaml", []
        before = None
        with contextlib.suppress(UserError):
            before = load_study(kept)
        if plan.exists() and plan.read_text(encoding="utf-8") == self._plan:
            if before == self.study:
                return []
            if before and before.claims != self.study.claims:
                done = sum(self.done(run) for run in self.all_runs)
                notes.append(f"the claims were changed when {done} runs had finished")
        shutil.copyfile(self.source, kept)
        origin = {"source": str(self.source.resolve()), "oelm": __version__, "code": commit()}
        write_json(self.folder / "origin.json", {**origin, "time": time.time()})
        found = confounds(self.study, from_datasets(self.study))
        write_json(self.folder / "confounds.json", [to_mapping(c) for c in found])
        write_text(plan, self._plan)
        return notes


def write_config(run: Run) -> Path:
    """The run's configuration as the trainer will read it, fixed before it starts."""
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / "planned.yaml"
    write_text(path, yaml.safe_dump(to_mapping(run.config), sort_keys=False, allow_unicode=True))
    return path


def keep_results(queue: Queue, results: Path) -> Path:
    """Copy the finished runs, without weights, logs and this machine's paths, to `results/<study>`."""
    target = results / queue.study.name
    here = (data_home(), Path.cwd(), queue.source.parent)
    folders = [(queue.folder, target)]
    folders += [(r.folder, target / r.name) for r in queue.all_runs if queue.done(r)]
    for source, destination in folders:
        destination.mkdir(parents=True, exist_ok=True)
        for pattern in (*COMPACT, "study.yaml"):
            for file in source.glob(pattern):
                text = file.read_text(encoding="utf-8")
                for folder in here:
                    text = text.replace(f"{folder.resolve()}{os.sep}", "")
                write_text(destination / file.name, text)
    return target


def _matches(folder: Path, config: TrainConfig) -> bool:
    """Whether the run in `folder` computes what `config` says."""
    try:
        there = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        fields = {k: v for k, v in there.items() if k in HINTS}
        theirs = essence(from_mapping(TrainConfig, fields, what="run"))
        # The method as it was then: its name may stand for something else by now.
        method = to_mapping(from_mapping(Method, there["resolved"]["method"], what="method"))
        theirs["method"] = {k: v for k, v in method.items() if k in theirs["method"]}
    except (OSError, yaml.YAMLError, UserError, KeyError, TypeError, AttributeError):
        return False
    return theirs == essence(config)


def _is_finished(folder: Path, config: TrainConfig) -> bool:
    return read_state(folder).get("state") == "finished" and _matches(folder, config)


def _of_the_same_data(folder: Path, config: TrainConfig) -> bool:
    """Whether the dataset of that name here, if there is one, is what the run was trained on."""
    there = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    theirs = there["resolved"].get("dataset", {}).get("sha256")
    if config.task != "language" or not theirs:
        return True
    with contextlib.suppress(UserError):  # not prepared here
        splits = Dataset.open(config.dataset).meta["splits"]
        return bool(theirs == {split: about["sha256"] for split, about in splits.items()})
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Any:
    """Hold the study's folder while it is put in order; runners that start together take turns."""
    while True:
        try:
            lock = FolderLock(folder)
            lock.__enter__()
            break
        except InUseError:
            time.sleep(0.1)
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _meaning(code: int, folder: Path) -> str:
    """Why a trainer ended that could not say it itself: its last line, or the signal."""
    if code < 0:
        return f"killed by signal {-code}"
    with contextlib.suppress(OSError):
        lines = (folder / "console.log").read_text(encoding="utf-8", errors="replace").split("\n")
        if words := [line.strip() for line in lines if line.strip()]:
            return words[-1][:300]
    return f"exit code {code}"
