import json
import shutil
from pathlib import Path

import pytest
import yaml

from oelm.config import to_mapping
from oelm.data.dataset import Dataset, data_home
from oelm.errors import UserError
from oelm.study.folders import ask_to_stop, attempts, final_failure, read_json, write_json
from oelm.study.plan import Run
from oelm.study.queue import Queue, keep_results
from oelm.train.lock import FolderLock


def finish(run: Run, state: str = "finished") -> None:
    """Make the folder that a trainer would leave, as far as the queue looks at it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    config = {"schema": 1, **to_mapping(run.config)}
    config["resolved"] = {"method": to_mapping(run.config.resolved_method())}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    (run.folder / "last.pt").write_bytes(b"weights")
    write_json(run.folder / "state.json", {"state": state, "step": 40, "max_steps": 40})


def opened(path: Path, **options) -> Queue:
    queue = Queue(path, **options)
    queue.open()
    return queue


def test_opening_writes_down_what_will_run(make_study, place) -> None:
    path = make_study(defaults={"max_steps": 4000})
    opened(path)
    folder = place / "runs/tiny"
    plan = json.loads((folder / "plan.json").read_text())
    assert [(r["arm"], r["point"], r["seed"], r["folder"]) for r in plan] == [
        ("baseline", "", 0, "baseline/seed-0"),
        ("frozen", "", 0, "frozen/seed-0"),
        ("baseline", "", 1, "baseline/seed-1"),
        ("frozen", "", 1, "frozen/seed-1"),
    ]
    assert plan[1]["config"]["method"] == "oelm_v2"
    assert (folder / "study.yaml").read_bytes() == path.read_bytes()
    assert json.loads((folder / "origin.json").read_text())["source"] == str(path)
    kinds = {c["kind"] for c in json.loads((folder / "confounds.json").read_text())}
    assert kinds == {"seeds", "init_scale", "epochs"}


def test_next_skips_what_is_finished_held_or_failed(make_study) -> None:
    queue = opened(make_study())
    first, second, third, fourth = queue.runs
    finish(first)
    second.folder.mkdir(parents=True)
    with FolderLock(second.folder):
        assert queue.next() == third
        assert queue.next(besides=[third.name]) == fourth
        assert [r.name for r in queue.wait_for()] == [second.name]
    assert queue.next() == second
    queue.ended(second, 4, "here")  # a loss that is not finite will not become finite
    assert queue.next() == third
    assert len(queue.unfinished()) == 3


def test_a_crash_is_retried_twice(make_study) -> None:
    queue = opened(make_study())
    run = queue.runs[0]
    finish(run, state="running")
    said = [queue.ended(run, -9, "here") for _ in range(3)]
    assert ["trying again" in text for text in said] == [True, True, False]
    assert "signal 9" in said[2]
    assert final_failure(run.folder)
    assert len(attempts(run.folder)) == 3
    assert json.loads((run.folder / "state.json").read_text())["state"] == "failed"
    assert queue.next() != run
    again = Queue(queue.source)
    again.open()
    assert again.next() != run
    again.open(retry_failed=True)
    assert again.next() == run
    assert attempts(run.folder) == []


def test_wrong_input_is_not_retried(make_study) -> None:
    queue = opened(make_study())
    run = queue.runs[0]
    run.folder.mkdir(parents=True)
    (run.folder / "console.log").write_text("oelm: no dataset 'x'\n")
    assert queue.ended(run, 2, "here") == "failed: oelm: no dataset 'x'"
    assert final_failure(run.folder)


def test_a_changed_study_runs_what_changed(make_study, place) -> None:
    queue = opened(make_study())
    for run in queue.runs:
        finish(run)
    arms = {"baseline": {"method": "baseline"}, "frozen": {"method": "oelm_v2", "max_lr": 1e-3}}
    changed = Queue(make_study(arms=arms))
    notes = changed.open()
    assert [r.name for r in changed.unfinished()] == ["frozen/seed-0", "frozen/seed-1"]
    assert len(notes) == 2
    assert all("finished with another configuration" in note for note in notes)
    kept = list((place / "runs/tiny/.outdated").glob("frozen+seed-0-*/last.pt"))
    assert [k.read_bytes() for k in kept] == [b"weights"]
    smaller = Queue(make_study(arms={"baseline": {"method": "baseline"}}, claims={}))
    assert smaller.open() == []
    assert smaller.unfinished() == []


def test_an_arm_that_left_the_study_is_named(make_study) -> None:
    queue = opened(make_study())
    for run in queue.runs:
        finish(run)
    notes = Queue(make_study(arms={"baseline": {"method": "baseline"}}, claims={})).open()
    assert [n.split()[0] for n in notes] == ["frozen/seed-0", "frozen/seed-1"]


def test_changing_how_a_run_is_carried_out_repeats_nothing(make_study) -> None:
    queue = opened(make_study())
    for run in queue.runs:
        finish(run)
    changed = Queue(make_study(defaults={"save_interval": 3, "log_interval": 2, "device": "cpu"}))
    assert changed.open() == []
    assert changed.unfinished() == []


def test_another_dataset_makes_other_runs(make_study, dataset) -> None:
    queue = opened(make_study())
    for run in queue.runs:
        finish(run)
    moved = Queue(make_study(defaults={"dataset": f"/elsewhere/{dataset.name}"}))
    assert moved.unfinished() == []
    changed = Queue(make_study(defaults={"dataset": "another"}))
    changed.open()
    assert len(changed.unfinished()) == 4


def test_changed_claims_are_taken_and_said(make_study, place) -> None:
    queue = opened(make_study())
    finish(queue.runs[0])
    claims = {"less": {"metric": "ppl", "arm": "frozen", "vs": "baseline", "less": True}}
    path = make_study(claims=claims)
    assert Queue(path).open() == ["the claims were changed when 1 runs had finished"]
    assert (place / "runs/tiny/study.yaml").read_bytes() == path.read_bytes()
    assert Queue(path).open() == []


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [
        ("stopped", None, 3),
        ("failed", "UserError: no dataset 'x'", 2),
        ("failed", "NonFiniteError: the loss is not finite", 4),
        ("failed", "RuntimeError: boom", 1),
    ],
)
def test_what_torchrun_hides_is_read_from_the_run(make_study, state, error, code) -> None:
    queue = opened(make_study())
    run = queue.runs[0]
    run.folder.mkdir(parents=True)
    write_json(run.folder / "state.json", {"state": state, "error": error, "started": 100.0})
    assert queue.meant(run, 1, began=99.0) == code
    assert queue.meant(run, 1, began=101.0) == 1  # left by an earlier attempt
    assert queue.meant(run, -9, began=99.0) == -9


def test_a_run_in_progress_is_not_moved(make_study) -> None:
    queue = opened(make_study())
    run = queue.runs[0]
    finish(run, state="running")
    with FolderLock(run.folder), pytest.raises(UserError, match="another configuration"):
        Queue(make_study(defaults={"max_steps": 7})).open()
    assert (run.folder / "last.pt").exists()


def test_a_runner_notices_that_the_study_was_changed(make_study) -> None:
    queue = opened(make_study())
    opened(make_study(defaults={"max_steps": 7}))
    with pytest.raises(UserError, match="another plan"):
        queue.next()


def test_kept_results_do_not_say_where_the_study_lay(make_study, place, tmp_path_factory) -> None:
    queue = opened(make_study().rename(tmp_path_factory.mktemp("elsewhere") / "tiny.yaml"))
    keep_results(queue, place / "results")
    assert read_json(place / "results/tiny/origin.json")["source"] == "tiny.yaml"


def test_kept_results_count_as_finished(make_study, place) -> None:
    queue = opened(make_study())
    finish(queue.runs[0])
    finish(queue.runs[1], state="failed")
    state = {"state": "finished", "dataset": f"{data_home().resolve()}/datasets/d"}
    write_json(queue.runs[0].folder / "state.json", state)
    keep_results(queue, place / "results")
    kept = place / "results/tiny/baseline/seed-0"
    assert {f.name for f in kept.iterdir()} == {"config.yaml", "state.json"}
    assert read_json(kept / "state.json")["dataset"] == "datasets/d"
    assert read_json(place / "results/tiny/origin.json")["source"] == queue.source.name
    assert not (place / "results/tiny/frozen/seed-0").exists()
    shutil.rmtree(place / "runs")
    again = Queue(queue.source)
    assert again.open(results=None) == []
    assert len(again.unfinished()) == 4
    taken = "1 finished runs taken from results/tiny; --fresh would train them here"
    assert again.open() == [taken]
    assert again.done(again.runs[0])
    assert len(again.unfinished()) == 3
    other = Queue(make_study(defaults={"max_steps": 7}))
    shutil.rmtree(place / "runs")
    assert other.open() == []  # the results are of another study by now


@pytest.mark.parametrize("same", [True, False])
def test_kept_results_of_other_data_are_not_taken(make_study, place, dataset, same) -> None:
    queue = opened(make_study())
    finish(queue.runs[0])
    splits = Dataset.open(dataset).meta["splits"]
    config = queue.runs[0].folder / "config.yaml"
    there = yaml.safe_load(config.read_text())
    there["resolved"]["dataset"] = {"sha256": {s: a["sha256"] for s, a in splits.items()}}
    if not same:
        there["resolved"]["dataset"]["sha256"]["val"] = "0"
    config.write_text(yaml.safe_dump(there))
    keep_results(queue, place / "results")
    shutil.rmtree(place / "runs")
    again = Queue(queue.source)
    taken = "1 finished runs taken from results/tiny; --fresh would train them here"
    other = "1 runs in results/tiny are of other data than is prepared here"
    assert again.open() == [taken if same else other]
    assert len(again.unfinished()) == (3 if same else 4)


def test_folders_of_others_are_left_alone(make_study, place) -> None:
    path = make_study()
    opened(path)
    twin = place / "elsewhere.yaml"
    twin.write_text(path.read_text() + "\n# another\n")
    with pytest.raises(UserError, match="made by another study"):
        Queue(twin).open()
    path.rename(place / "moved.yaml")
    Queue(place / "moved.yaml").open()


def test_runs_that_no_study_made_are_left_alone(make_study, place) -> None:
    queue = Queue(make_study())
    finish(queue.runs[0])
    with pytest.raises(UserError, match="no study made"):
        queue.open()


def test_stop_marks_bind_runners_that_were_there(make_study) -> None:
    queue = opened(make_study())
    run = queue.runs[0]
    run.folder.mkdir(parents=True)
    assert not queue.stop_wanted()
    ask_to_stop(run.folder)
    assert queue.stop_wanted(run)
    assert not queue.stop_wanted()
    assert queue.next() == queue.runs[1]
    later = Queue(queue.source)
    assert not later.stop_wanted(run)
    assert later.next() == run
    ask_to_stop(queue.folder)
    assert queue.stop_wanted()
    assert later.stop_wanted()


def test_only_one_arm(make_study) -> None:
    queue = Queue(make_study(), only="frozen")
    assert {r.arm for r in queue.runs} == {"frozen"}
    assert len(queue.all_runs) == 4
    with pytest.raises(UserError, match="baseline, frozen"):
        Queue(queue.source, only="x")
