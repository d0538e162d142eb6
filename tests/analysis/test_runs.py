import json
import math
import subprocess
import sys

import numpy as np
import pytest
from synthetic import write, write_run, write_study

from oelm.analysis.runs import read_run
from oelm.analysis.series import MOST_POINTS, arm_series, gap_series
from oelm.analysis.sources import load, read_reference, read_study, reference_names
from oelm.analysis.study import chain
from oelm.errors import UserError


def said(problems):
    return "\n".join(str(p) for p in problems)


def test_a_finished_run_gives_its_numbers(tmp_path):
    run = read_run(write_run(tmp_path / "a", method="oelm_v2", seed=3), arm="frozen", seed=3)
    assert run.finished
    assert not run.problems
    assert run.value("ppl") == pytest.approx(math.exp(run.value("loss")))
    assert run.value("test_ppl") == pytest.approx(math.exp(run.value("test_loss")))
    assert run.value("test_ppl") > run.value("ppl")
    assert run.value("frozen") == 131_072
    assert run.value("frozen_share") == pytest.approx(131_072 / 1_064_960)
    assert run.value("steps_per_hour") == pytest.approx(3600 / run.value("step_time"))
    assert run.value("probe:copy") == pytest.approx(1 - math.exp(-1))
    assert run.value("probe:absent") is None
    assert run.value("accuracy") is None
    assert run.method["q"]["trains"] == "never"


def test_the_curve_stays_on_the_stretch_that_is_evaluated_during_training(tmp_path):
    folder = write_run(tmp_path / "a", evals=12)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row.get("full"):
            row["ppl"] = 99.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    assert len(run.val["step"]) == 12
    assert run.val["ppl"][-1] < 60
    assert run.value("ppl") == 99.0


def test_time_to_a_perplexity_is_interpolated_between_evaluations(tmp_path):
    folder = write_run(tmp_path / "a", steps=100)
    rows = [{"kind": "train", "step": s, "loss": 1.0, "seconds": s / 10} for s in (10, 20, 30)]
    rows += [
        {"kind": "eval", "split": "val", "step": s, "ppl": p} for s, p in ((10, 400), (30, 100))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = read_run(folder)
    assert run.value("time_to_ppl:200") == pytest.approx(2.0)
    assert run.value("time_to_ppl:400") == pytest.approx(1.0)
    assert run.value("time_to_ppl:50") is None


def test_a_cut_last_line_is_noted_and_the_rest_is_read(tmp_path):
    folder = write_run(tmp_path / "a", evals=10)
    whole = read_run(folder)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind":"train","step":301,"lo')
    run = read_run(folder, arm="a", seed=0)
    assert "a/seed-0: the last line of metrics.jsonl" in said(run.problems)
    assert np.array_equal(run.val["ppl"], whole.val["ppl"])
    assert run.finished


def test_what_cannot_be_read_is_noted_and_never_raises(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[3] = "not json"
    lines[5] = '{"kind": "train", "step": 5, "loss": NaN}'
    lines[7] = "[1, 2]"
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "timing_stats.json").write_text("{")
    (folder / "freeze_audit.json").write_text("[]")
    (folder / "environment.json").write_bytes(b"\xff\xfe{")
    text = said(read_run(folder, arm="a", seed=0).problems)
    for part in ("line 4", "line 8", "not finite", "timing_stats.json", "freeze_audit.json"):
        assert part in text
    assert "environment.json" in text


def test_states_are_told_apart(tmp_path):
    assert read_run(tmp_path / "none").state == "missing"
    assert read_run(write_run(tmp_path / "r", state="running")).state == "running"
    failed = read_run(write_run(tmp_path / "f", state="failed", error="NonFinite: loss is nan"))
    assert "failed at step 150: NonFinite" in said(failed.problems)
    empty = write_run(tmp_path / "e")
    (empty / "metrics.jsonl").write_text("")
    assert read_run(empty).state == "incomplete"
    silent = write_run(tmp_path / "s", state="running")
    write(silent / "state.json", {"state": "running", "heartbeat": 0})
    assert "gave no sign of life" in said(read_run(silent).problems)


def test_a_study_is_read_with_its_claims_and_confounds(study_folder):
    study = read_study(study_folder)
    assert list(study.arms) == ["baseline", "orthogonal", "frozen", "matched", "random", "lowrank"]
    assert study.seeds == (0, 1, 2, 3, 4)
    assert [c.name for c in study.claims] == ["success", "low-rank", "same", "counts", "speed"]
    assert study.reference.name == "baseline"
    assert not study.all_problems()
    assert [a.name for a in chain(study)] == [
        "baseline",
        "orthogonal",
        "frozen",
        "matched",
        "random",
    ]
    assert len(study.confounds) == 2


def test_missing_extra_and_unequal_seeds_are_noted(tmp_path):
    folder = write_study(tmp_path, arms={"a": ("baseline", 42), "b": ("oelm_v2", 45)}, seeds=(0, 1))
    write_run(folder / "b" / "seed-7", method="oelm_v2", seed=7)
    write_run(folder / "b" / "seed-1", method="oelm_v2", seed=1, state="running")
    text = said(read_study(folder).all_problems())
    assert "seeds 7 were not planned" in text
    assert "1 running (b/seed-1)" in text
    assert "different seeds (a: 0, 1; b: 0)" in text


def test_runs_that_left_the_plan_decide_nothing(tmp_path):
    folder = write_study(tmp_path, arms={"a": ("baseline", 42), "b": ("oelm_v2", 45)}, seeds=(0, 1))
    for seed in (0, 1):
        write_run(
            folder / "b" / "max_lr=0.1" / f"seed-{seed}", method="oelm_v2", final=20, seed=seed
        )
        write_run(folder / "c" / f"seed-{seed}", final=20, seed=seed)
    study = read_study(folder)
    assert list(study.arms) == ["a", "b"]
    assert list(study.arms["b"].points) == [""]
    assert "b/max_lr=0.1, c are no longer in the study's plan" in said(study.all_problems())


def test_the_chain_has_one_change_at_a_time(tmp_path):
    arms = {
        "baseline": ("baseline", 42),
        "kernel": ("oelm_kernel", 41),
        "small": ("oelm_v2,qk.scale=0.2", 47),
        "orthogonal": ("oelm_v2", 46),
        "random": ("oelm_random", 48),
    }
    study = read_study(write_study(tmp_path, arms=arms, seeds=(0, 1)))
    assert [arm.name for arm in chain(study)] == ["baseline", "orthogonal", "random"]


def test_a_wrong_claim_costs_no_other_its_verdict(tmp_path):
    claims = {
        "wrong": {"metric": "pppl", "arm": "a", "min": 1},
        "right": {"metric": "ppl", "arm": "a", "max": 50},
    }
    folder = write_study(tmp_path, arms={"a": ("baseline", 42)}, seeds=(0, 1), claims=claims)
    study = read_study(folder)
    assert [c.name for c in study.claims] == ["right"]
    assert "did you mean 'ppl'" in said(study.problems)


def test_an_arm_with_a_grid_is_tuned_on_the_mean_over_planned_seeds(tmp_path):
    for point, final in (("max_lr=0.001", 45.0), ("max_lr=0.003", 42.0)):
        for seed in (0, 1):
            write_run(tmp_path / "g" / "a" / point / f"seed-{seed}", seed=seed, final=final)
    write_run(tmp_path / "g" / "a" / "max_lr=0.001" / "seed-9", seed=9, final=1.5)
    (tmp_path / "g" / "study.yaml").write_text("{name: g, seeds: [0, 1]}")
    arm = read_study(tmp_path / "g").arms["a"]
    assert arm.chosen == "max_lr=0.003"
    assert arm.label == "a (max_lr=0.003)"
    assert len(arm.values("ppl", (0, 1))) == 2


def test_a_point_that_lost_seeds_is_not_chosen_for_its_lucky_ones(tmp_path):
    for point, final in (("max_lr=0.003", 42.0), ("max_lr=0.006", 40.0)):
        for seed in (0, 1, 2):
            bad = point == "max_lr=0.006" and seed > 0
            place = tmp_path / "g" / "a" / point / f"seed-{seed}"
            write_run(place, seed=seed, final=final, state="failed" if bad else "finished")
    (tmp_path / "g" / "study.yaml").write_text("{name: g, seeds: [0, 1, 2]}")
    assert read_study(tmp_path / "g").arms["a"].chosen == "max_lr=0.003"


def test_single_runs_become_one_comparison(tmp_path):
    places = [
        write_run(tmp_path / f"{m}-{s}", method=m, seed=s)
        for m in ("baseline", "oelm_v2")
        for s in (0, 1)
    ]
    places.append(write_run(tmp_path / "again", method="oelm_v2", seed=1))
    (study,) = load([str(p) for p in places])
    assert {a.name: len(a.runs) for a in study.arms.values()} == {
        "baseline": 2,
        "oelm_v2": 2,
        f"{tmp_path.name}/again": 1,
    }
    assert study.reference.name == "baseline"


@pytest.mark.parametrize("place", ["nowhere", "reference:tinystory", "nowhere.json"])
def test_a_place_without_a_study_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"nowhere|did you mean 'tinystories'"):
        load([place])


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no runs"):
        load([str(tmp_path)])


def test_every_reference_is_readable_in_both_languages():
    assert {"tinystories", "openwebtext", "wikitext103", "xnli-bert"} <= set(reference_names())
    for name in reference_names():
        for language in ("en", "zh"):
            study = read_reference(f"reference:{name}", language)
            assert study.source
            assert study.question
    counts = read_reference("reference:xnli-bert").arms["frozen"].runs[0].values
    assert counts["total"] == 109_484_547


def test_curves_are_aligned_and_thinned(tmp_path):
    folder = write_study(
        tmp_path,
        arms={"a": ("baseline", 42), "b": ("oelm_v2", 46)},
        seeds=(0, 1),
        steps=1000,
        evals=500,
    )
    study = read_study(folder)
    a, b = study.arms["a"], study.arms["b"]
    val = arm_series(a, study.seeds, "val", "ppl", log=True)
    assert len(val.step) == MOST_POINTS
    assert (val.step[0], val.step[-1]) == (2, 1000)
    finals = [r.value("ppl") for r in a.runs]
    assert val.mean[-1] == pytest.approx(math.exp(np.mean(np.log(finals))))
    assert (val.low[-1], val.high[-1]) == pytest.approx((min(finals), max(finals)))
    gap = gap_series(b, a, study.seeds, "ppl", log=True)
    logs = [math.log(y.value("ppl") / x.value("ppl")) for x, y in zip(a.runs, b.runs, strict=True)]
    assert gap.mean[-1] == pytest.approx(np.mean(logs))
    assert gap.low[-1] < min(logs)  # two seeds: the t-interval is far wider than their range


def test_a_training_loss_is_averaged_not_sampled(tmp_path):
    folder = write_run(tmp_path / "x" / "a" / "seed-0", steps=4000)
    rows = [{"kind": "train", "step": s, "loss": float(s % 2)} for s in range(4000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    study = read_study(tmp_path / "x")
    curve = arm_series(study.arms["a"], study.seeds, "train", "loss", log=False)
    assert len(curve.step) == MOST_POINTS
    assert curve.mean == pytest.approx(0.5, abs=0.03)


def test_the_analysis_needs_no_torch():
    code = "import sys, oelm.analysis.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_classes_are_named_as_the_run_recorded_them(tmp_path):
    folder = write_run(tmp_path / "a", task="classification", final=0.8, classes=("no", "yes"))
    assert read_run(folder).classes == ["no", "yes"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("classes", None)  # then the labels of the data set are all there is
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(folder).classes == ["0", "1"]
