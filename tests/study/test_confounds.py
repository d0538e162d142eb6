from pathlib import Path

from oelm.study.confounds import Measured, confounds
from oelm.study.plan import find_study, load_study


def lines(path: Path, **measured: Measured) -> dict[str, str]:
    return {c.kind: c.line for c in confounds(load_study(path), measured)}


def test_the_source_ablation() -> None:
    found = confounds(load_study(find_study("tinystories-ablation")))
    by_kind = {c.kind: c for c in reversed(found)}
    assert "0.001 in oelm_v2 and 0.0003 in baseline" in by_kind["max_lr"].line
    assert "0.044 in oelm_v2 and 0.02 in baseline" in by_kind["init_scale"].line
    assert by_kind["seeds"].line.startswith("one seed")
    assert by_kind["max_lr"].arms == ("oelm_v2", "baseline")
    assert by_kind["max_lr"].claim == "success"
    assert all("; " in c.line and "\n" not in c.line for c in found)  # why; what mends it


def test_the_fair_design_has_no_such_confound() -> None:
    kinds = {c.kind for c in confounds(load_study(find_study("fair-controls")))}
    assert kinds == {"init_scale", "selection"}  # the arms that are there to show scale do show it


def test_every_difference_beside_the_method(make_study) -> None:
    arms = {
        "baseline": {"method": "baseline", "batch_size": 4, "schedule": "linear", "data_seed": 1},
        "frozen": {
            "method": "oelm_v2",
            "warmup": 0.25,
            "max_steps": 80,
            "model": "nano,n_layers=2",
        },
    }
    found = lines(make_study(arms=arms, seeds=[0, 1, 2]))
    assert set(found) == {
        "batch_size", "schedule", "data_seed", "warmup", "max_steps", "init_scale",
        "model.n_layers", "model.d_model", "model.n_heads", "model.d_ff", "model.seq_len",
    }  # fmt: skip
    assert "20 in frozen and 5 in baseline" in found["warmup"]


def test_the_same_value_written_otherwise_is_no_difference(make_study) -> None:
    arms = {
        "baseline": {"method": "oelm_no_freeze", "warmup": 5, "min_lr": 3e-4},
        "frozen": {"method": "oelm_v2", "warmup": 0.125},
    }
    assert lines(make_study(arms=arms, seeds=[0, 1, 2])) == {}


def test_tuning_budgets_and_selection(make_study) -> None:
    arms = {
        "baseline": {"method": "oelm_no_freeze"},
        "frozen": {"method": "oelm_v2", "max_lr": [1e-3, 3e-3]},
    }
    found = lines(make_study(arms=arms, seeds=[0, 1, 2]))
    assert set(found) == {"tuning", "max_lr", "selection"}
    assert "frozen is tuned over 2 points, baseline over 1 point" in found["tuning"]
    both = {a: {**arms[a], "max_lr": [1e-3, 3e-3]} for a in arms}
    found = lines(make_study(arms=both, seeds=[0, 1, 2]))
    assert set(found) == {"selection"}
    assert "confirm the claim on test_ppl or on fresh seeds" in found["selection"]
    claim = {"arm": "frozen", "vs": "baseline", "at_most": "+5%"}
    claims = {"val": {"metric": "ppl", **claim}, "test": {"metric": "test_ppl", **claim}}
    assert lines(make_study(arms=both, seeds=[0, 1, 2], claims=claims)) == {}


def test_exact_metrics_need_no_seeds(make_study) -> None:
    claims = {"h1": {"metric": "frozen", "arm": "frozen", "min": 1}}
    assert lines(make_study(claims=claims, seeds=[0])) == {}


def test_timing_claims(make_study) -> None:
    claims = {
        "h3": {"metric": "steps_per_hour", "arm": "frozen", "vs": "baseline", "greater": True}
    }
    assert "--slots 1" in lines(make_study(claims=claims))["timing"]


def test_arms_of_ours_and_of_hugging_face(make_study) -> None:
    task = {"task": "classification", "dataset": "movie-reviews"}
    arms = {"frozen": {"method": "oelm_v2"}, "baseline": {"method": "baseline", "model": "hf:bert"}}
    claims = {"h": {"metric": "accuracy", "arm": "frozen", "vs": "baseline", "at_least": "-1pt"}}
    path = make_study(arms=arms, claims=claims, seeds=[0, 1, 2], defaults=task)
    assert "model is OELM's own in frozen" in str(lines(path))


def test_what_only_measuring_shows(make_study) -> None:
    path = make_study(seeds=[0, 1, 2])
    known = Measured(epochs=6.3, validation_share=0.45, validation_tokens=2_000)
    found = lines(path, baseline=known, frozen=Measured())
    assert "6.3 times" in found["epochs"]
    assert "45%" in found["validation_time"]
    assert "±5.7%" in found["evaluation_noise"]  # e^(2.5/√2000) − 1, above the margin of 5 %
    fine = Measured(epochs=1.0, validation_share=0.05, validation_tokens=100_000)
    assert set(lines(path, baseline=fine, frozen=fine)) == {"init_scale"}
    claims = {"h": {"metric": "ppl", "arm": "frozen", "vs": "baseline", "at_most": "0%"}}
    path = make_study(seeds=[0, 1, 2], claims=claims)
    assert "evaluation_noise" not in lines(path, baseline=fine, frozen=fine)
