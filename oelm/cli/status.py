"""`oelm status` and `oelm logs`: how far runs are, from their folders alone."""

import dataclasses
import json as jsonlib
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.cli.options import parse
from oelm.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from oelm.study.status import Row

FULL_WIDTH = 130
COLOURS = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "interrupted": "yellow",
    "stopped": "yellow",
}


def status(argv: list[str]) -> int:
    """Entry point of `oelm status`."""
    return parse(_status, argv, prog="oelm status")


def logs(argv: list[str]) -> int:
    """Entry point of `oelm logs`."""
    return parse(_logs, ["--follow" if a == "-f" else a for a in argv], prog="oelm logs")


def _status(
    study: str | None = None,
    /,
    *,
    watch: bool = False,
    json: bool = False,
    runs: Path = Path("runs"),
) -> int:
    """How far a study's runs are: state, step, loss, speed, what is left, and who holds the GPUs.

    Args:
        study: A study's name or folder; all studies, in brief, if not given.
        watch: Stay and refresh, with small curves of the loss; Ctrl-C ends it.
        json: Print JSON instead of a table.
        runs: Where the studies' folders are.
    """
    from oelm.study.status import find_folder, studies

    folders = [find_folder(study, runs)] if study else studies(runs)
    if not folders:
        raise UserError(f"no study has been run in {runs}/; `oelm run quickstart` starts one")
    if json:
        print(jsonlib.dumps(_data(folders), indent=1))
    elif watch:
        _watch(folders, brief=study is None)
    else:
        show(_view(folders, brief=study is None, curves=False))
    return 0


def _data(folders: list[Path]) -> dict[str, Any]:
    from oelm.study.gpus import gpus
    from oelm.study.status import rows, slurm_states

    slurm = slurm_states(folders)
    found = [dataclasses.asdict(r) for f in folders for r in rows(f, slurm)]
    for row in found:
        row["folder"] = str(row["folder"])
    return {"runs": found, "gpus": [dataclasses.asdict(g) for g in gpus()], "slurm": slurm}


def _view(folders: list[Path], *, brief: bool, curves: bool) -> "RenderableType":
    from rich.console import Group

    from oelm.study.status import rows, slurm_states

    slurm = slurm_states(folders)
    found = {f: rows(f, slurm) for f in folders}
    table = _brief(found) if brief else _table(next(iter(found.values())), curves)
    return Group(table, *_gpu_lines())


def _brief(found: "dict[Path, list[Row]]") -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("study", "runs", "finished", "running", "failed", "other"):
        table.add_column(name, justify="left" if name == "study" else "right")
    for folder, rows in found.items():
        states = [r.state for r in rows]
        numbers = [states.count(s) for s in ("finished", "running", "failed")]
        table.add_row(
            folder.name, *(str(n) for n in (len(rows), *numbers, len(rows) - sum(numbers)))
        )
    return table


def _table(rows: "list[Row]", curves: bool) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    from oelm.study.status import loss_curve

    done = sum(r.state == "finished" for r in rows)
    title = f"{rows[0].study}: {done} of {len(rows)} runs finished"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    right = ("seed", "step", "loss", "val ppl", "tokens/s", "left")
    for name in ("arm", "seed", "state", "step", "loss", "val ppl", "tokens/s", "left", "where"):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    if curves:
        table.add_column("loss", no_wrap=True)
    for row in rows:
        arm = f"{row.arm} {row.point}".strip()
        state = Text(row.state, COLOURS.get(row.state, ""))
        if row.attempts:
            state.append(f" ({row.attempts} failed)")
        cells: list[Any] = [arm, str(row.seed), state, f"{row.step:,}/{row.max_steps:,}"]
        cells += [_number(row.loss, ".3f"), _number(row.val_ppl, ".2f")]
        cells += [_number(row.tokens_per_second, ",.0f"), duration(row.eta), row.where]
        table.add_row(*cells, *([loss_curve(row.folder)] if curves else []))
        if row.error:
            table.add_row("", "", Text(row.error, "red", no_wrap=False))
    return table


def _gpu_lines() -> list[str]:
    from oelm.study.gpus import gpus

    lines = []
    for gpu in gpus():
        holders = ", ".join(f"{h.user} ({h.pid}, {h.memory / 2**30:.1f} GiB)" for h in gpu.holders)
        used, total = gpu.memory_used / 2**30, gpu.memory_total / 2**30
        held = holders or ("idle" if gpu.idle else "somebody we cannot see")
        lines.append(
            f"GPU {gpu.index} {gpu.name}: {used:.1f} of {total:.1f} GiB, {gpu.utilisation} %: {held}"
        )
    return lines


def _watch(folders: list[Path], *, brief: bool) -> None:
    from rich.live import Live

    with Live(_view(folders, brief=brief, curves=True), refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(1)
                live.update(_view(folders, brief=brief, curves=True))
        except KeyboardInterrupt:
            return


def show(table: "RenderableType") -> None:
    """Print a table at its full width: a narrow terminal may wrap it, but nothing is cut."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, FULL_WIDTH)
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _logs(run: str, /, *, follow: bool = False, runs: Path = Path("runs")) -> int:
    """Show a run's log, and with -f what comes next.

    Args:
        run: A run's folder, or its name below runs/ (`quickstart/oelm_v2/seed-0`).
        follow: Stay and print new lines as they come (also -f); Ctrl-C ends it.
        runs: Where the studies' folders are.
    """
    from oelm.study.status import find_folder
    from oelm.study.status import follow as following

    folder = find_folder(run, runs)
    if (folder / "plan.json").exists():
        raise UserError(f"{run} is a study; name one of its runs, as in {run}/ARM/seed-0")
    # The trainer's own log; where it died before it had one, what it printed.
    found = [p for n in ("training.log", "console.log") if (p := folder / n).exists()]
    if not found:
        raise UserError(f"{folder} has no log yet")
    if follow:
        try:
            for text in following(found[0]):
                sys.stdout.write(text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            return 0
    with found[0].open(encoding="utf-8", errors="replace") as file:
        shutil.copyfileobj(file, sys.stdout)
    return 0
