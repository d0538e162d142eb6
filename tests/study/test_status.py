import json
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.errors import UserError
from oelm.study.folders import note_attempt, write_json
from oelm.study.queue import Queue
from oelm.study.status import find_folder, follow, loss_curve, rows, studies
from oelm.train.lock import FolderLock

from .conftest import oelm


def put(folder: Path, word: str, step: int, losses: list[float] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    last = {"loss": 3.2, "ppl": 24.5, "tokens_per_second": 1000.0}
    place = {"where": "local slot 0", "max_steps": 40, "error": None}
    write_json(folder / "state.json", {"state": word, "step": step, "last": last, **place})
    lines = [
        {"kind": "train", "step": 10 * (i + 1), "loss": x, "seconds": 2.0 * (i + 1)}
        for i, x in enumerate(losses)
    ]
    lines.append({"kind": "eval", "split": "val", "step": step, "ppl": 33.0})
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + '\n{"kind": "eval", "spl')  # a line cut in half


@pytest.fixture
def study(make_study) -> Path:
    queue = Queue(make_study())
    queue.open()
    a, b, c, d = (r.folder for r in queue.runs)
    put(a, "finished", 40)
    put(b, "running", 20, [5.0, 4.0])
    put(c, "running", 10)
    note_attempt(d, {"exit": 1, "error": "boom", "final": True})
    return queue.folder


def test_rows(study: Path) -> None:
    with FolderLock(study / "frozen/seed-0"):
        found = {f"{r.arm} {r.seed}": r for r in rows(study)}
    states = {name: row.state for name, row in found.items()}
    assert states == {
        "baseline 0": "finished",
        "frozen 0": "running",
        "baseline 1": "interrupted",  # says that it runs, and nobody does
        "frozen 1": "failed",
    }
    running = found["frozen 0"]
    assert (running.step, running.max_steps, running.val_ppl, running.where) == (
        20,
        40,
        33.0,
        "local slot 0",
    )
    assert running.eta == pytest.approx(4.0)  # 20 steps at 0.2 s
    assert found["frozen 1"].error == "boom"


def test_loss_curve(study: Path) -> None:
    put(study / "baseline/seed-1", "running", 30, [8.0, 4.5, 1.0])
    assert loss_curve(study / "baseline/seed-1", width=3) == "█▅▁"
    assert loss_curve(study / "frozen/seed-1") == ""


def test_what_is_found(study: Path, place: Path) -> None:
    root = place / "runs"
    assert studies(root) == [study.resolve()]
    assert find_folder("tiny", root) == root / "tiny"
    assert find_folder(str(study), Path("elsewhere")) == study
    assert find_folder("tiny.yaml", root) == root / "tiny"
    assert find_folder("tiny/frozen/seed-0", root) == root / "tiny/frozen/seed-0"
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        find_folder("tny", root)
    with pytest.raises(UserError, match="holds no study"):
        rows(root / "tiny/frozen/seed-0")


def test_following_a_log(tmp_path: Path) -> None:
    log = tmp_path / "training.log"
    log.write_text("one\n")
    lines = iter(follow(log, poll=0.01))
    assert next(lines) == "one\n"
    log.write_text("one\ntwo\n")
    assert next(lines) == "two\n"
    log.write_text("anew\n")
    assert next(lines) == "anew\n"


def test_many_runs_without_torch(make_study, place: Path) -> None:
    queue = Queue(make_study(seeds=list(range(250))))
    queue.open()
    for run in queue.runs:
        put(run.folder, "running", 20, [5.0, 4.0])
    code = (
        "import sys; from oelm.cli.status import status; status(['tiny', '--json']);"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 500


def test_commands(study: Path) -> None:
    shown = oelm("status", "tiny").stdout
    assert "1 of 4 runs finished" in shown
    assert "boom" in shown
    brief = oelm("status").stdout
    assert brief.split()[-6:] == ["tiny", "4", "1", "0", "1", "2"]
    (study / "frozen/seed-0/training.log").write_text("a line\n")
    assert oelm("logs", "tiny/frozen/seed-0").stdout == "a line\n"
    for argv, words in (
        (("logs", "tiny"), "name one of its runs"),
        (("logs", "tiny/baseline/seed-0"), "has no log yet"),
        (("status", "other"), "no study or run 'other'"),
        (("stop", "other"), "no study or run 'other'"),
        (("status", "--runs", "nowhere"), "no study has been run in nowhere/"),
    ):
        done = oelm(*argv, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
