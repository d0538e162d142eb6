import pytest

from oelm import ModelConfig, method
from oelm.bench import Ratio, compare, explain
from oelm.errors import UserError
from oelm.roofline import step_parts

TINY = ModelConfig.preset(
    "nano", n_layers=2, d_model=32, n_heads=4, d_ff=64, seq_len=16, vocab_size=50
)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    """The machine's limits by small products and few readings: no value here rests on them."""
    monkeypatch.setattr("oelm.train.timing.CPU_SHAPES", ((64, 64, 64),))
    monkeypatch.setattr("oelm.bench.PEAK_SECONDS", 0.0)
    monkeypatch.setattr("oelm.bench.READINGS", 1)


def test_a_ratio_and_its_interval_forget_a_busy_moment():
    quiet = [1.0 + i / 1000 for i in range(20)]
    busy = [*quiet[:-1], 50.0]
    ratio = Ratio.of(busy, [1.0] * 20)
    assert ratio.median == pytest.approx(1.0095)
    # Of 20 fair coins, 5 or fewer heads fall with probability 0.021: the sixth from either end bounds it.
    assert (ratio.low, ratio.high) == pytest.approx((1.005, 1.014))


@pytest.mark.parametrize("by_layer", [False, True])
def test_methods_take_turns_and_are_held_against_the_first(by_layer):
    both = [method("baseline"), method("identity_q")]
    result = compare(both, TINY, 2, 3, "cpu", by_layer=by_layer)
    first, second = result["rows"]
    assert (first["saved"], first["possible"]) == (0, 0)
    q = step_parts(TINY, method("baseline"), 2)[0]
    assert second["possible"] == pytest.approx(
        q.total / sum(p.total for p in step_parts(TINY, method("baseline"), 2))
    )
    assert second["saved_low"] <= second["saved"] <= second["saved_high"]
    assert second["tokens_per_second"] == pytest.approx(2 * 16 / second["seconds"])
    peak = result["peak_gflops"] * 1e9
    assert second["predicted_seconds"] == pytest.approx(q.total / peak)
    assert second["saved_seconds"] == pytest.approx(first["seconds"] - second["seconds"])


def test_what_one_layer_saves_counts_for_every_layer(monkeypatch):
    """With a clock of our own: 1 ms a layer, 0.25 less without Q, and 2 ms for all the rest."""
    monkeypatch.setattr("oelm.bench._step", lambda own: own.model)
    monkeypatch.setattr("oelm.bench.WARMUP", 0)

    def timed(model, device):
        without_q = model.blocks[0].attention.q.weight is None
        return (1 - 0.25 * without_q) * len(model.blocks) + 2.0 * (len(model.blocks) > 1)

    monkeypatch.setattr("oelm.bench.timed", timed)
    both = [method("baseline"), method("identity_q")]
    rows = {by: compare(both, TINY, 2, 6, "cpu", by_layer=by)["rows"] for by in (False, True)}
    for first, second in rows.values():
        assert first["seconds"] == 4.0
        assert second["seconds"] == pytest.approx(3.5)
        assert second["saved"] == pytest.approx(0.5 / 4)


@pytest.mark.parametrize("spec", ["oelm_v2", "identity_lowrank", "oelm_layers"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_step_taken_apart(spec, activation):
    shape = ModelConfig.from_spec(TINY, activation=activation)
    rows = {row["part"]: row for row in explain(method(spec), shape, 2, 2, "cpu")["rows"]}
    whole = rows.pop("step")
    assert [*rows] == ["q", "k", "v", "o", "attention", "up", "down", "head", "the rest"]
    for sum_of in ("gflops", "megabytes", "predicted", "measured"):
        assert sum(row[sum_of] for row in rows.values()) == pytest.approx(whole[sum_of])
    assert rows["the rest"]["gflops"] == 0 < rows["the rest"]["predicted"]
    assert all(row["measured"] > 0 for name, row in rows.items() if name != "the rest")


def test_a_method_that_changes_has_no_one_step():
    with pytest.raises(UserError, match="changes in the course of training"):
        compare([method("oelm_thaw")], TINY, 2, 1, "cpu")


def test_one_layer_does_not_stand_for_layers_that_differ():
    with pytest.raises(UserError, match="oelm_layers freezes q in some layers only"):
        compare([method("oelm_layers")], TINY, 2, 6, "cpu", by_layer=True)
