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
    from oelm.study.status import Row

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
        print(_view(folders, brief=study is None))
    return 0


def _data(folders: list[Path]) -> dict[str, Any]:
    from oelm.study.gpus import gpus
    from oelm.study.status import rows, slurm_states

    slurm = slurm_states(folders)
    found = [dataclasses.asdict(r) for f in folders for r in rows(f, slurm)]
    for row in found:
        row["folder"] = str(row["folder"])
    return {"runs": found, "gpus": [dataclasses.asdict(g) for g in gpus()], "slurm": slurm}


def _view(folders: list[Path], *, brief: bool, curves: bool = False) -> str:
    from oelm.study.status import rows, slurm_states

    slurm = slurm_states(folders)
    found = {f: rows(f, slurm) for f in folders}
    lines = _brief(found) if brief else _table(next(iter(found.values())), curves)
    return "\n".join([*lines, *_gpu_lines()])


def _brief(found: "dict[Path, list[Row]]") -> list[str]:
    cells = [["study", "runs", "finished", "running", "failed", "other"]]
    for folder, rows in found.items():
        states = [r.state for r in rows]
        numbers = [states.count(s) for s in ("finished", "running", "failed")]
        counts = (len(rows), *numbers, len(rows) - sum(numbers))
        cells.append([folder.name, *(str(n) for n in counts)])
    return aligned(cells, left=("study",))


def _table(rows: "list[Row]", curves: bool) -> list[str]:
    from oelm.study.status import loss_curve

    head = ["arm", "seed", "state", "step", "loss", "val ppl", "tokens/s", "left", "where"]
    cells = [[*head, "loss curve"] if curves else head]
    if curves:  # what moves stays in sight
        rows = sorted(rows, key=lambda r: (r.state != "running", r.state == "finished"))
    for row in rows:
        failures = f" ({row.attempts} failed)" if row.attempts else ""
        line = [f"{row.arm} {row.point}".strip(), str(row.seed), row.state + failures]
        line += [f"{row.step:,}/{row.max_steps:,}", _number(row.loss, ".3f")]
        line += [_number(row.val_ppl, ".2f"), _number(row.tokens_per_second, ",.0f")]
        line += [duration(row.eta), row.where]
        cells.append([*line, loss_curve(row.folder)] if curves else line)
    done = sum(r.state == "finished" for r in rows)
    lines = [f"{rows[0].study}: {done} of {len(rows)} runs finished"]
    lines += aligned(cells, left=("arm", "state", "where", "loss curve"))
    return lines + [f"{r.arm} seed {r.seed}: {r.error}" for r in rows if r.error]


def aligned(cells: list[list[str]], left: tuple[str, ...]) -> list[str]:
    """Rows as lines in columns, the first row naming them. (rich takes seconds for 500 rows.)"""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    forms = [
        f"{{:{'<' if name in left else '>'}{w}}}" for name, w in zip(cells[0], widths, strict=True)
    ]
    return [
        "  ".join(f.format(c) for f, c in zip(forms, row, strict=True)).rstrip() for row in cells
    ]


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
    from rich.text import Text

    def view() -> Text:
        text = Text(_view(folders, brief=brief, curves=True), no_wrap=True)
        for state, colour in COLOURS.items():
            text.highlight_words([state], colour)
        return text

    with Live(view(), refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(1)
                live.update(view())
        except KeyboardInterrupt:
            return


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
