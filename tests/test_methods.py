import pytest

from oelm.errors import UserError
from oelm.methods import METHODS, Treatment, freeze_qk, method


def test_the_named_methods_are_all_there():
    assert set(METHODS) == {
        "baseline", "oelm_v2", "oelm_random", "oelm", "oelm_no_freeze", "oelm_v1_no_freeze",
        "random_matched", "oelm_hadamard", "oelm_q_only", "oelm_k_only", "identity_q", "identity_qk",
        "identity_lowrank", "oelm_temperature", "oelm_gain", "oelm_bias", "oelm_lowrank", "oelm_thaw",
        "oelm_layers", "qk_ffn", "oelm_kernel", "identity_kernel", "identity_q_kernel",
        "baseline_kernel",
    }  # fmt: skip
    assert method("gpt") is METHODS["baseline"]


def test_a_method_can_be_changed_in_place():
    changed = method("oelm_v2,qk.rank=4,k.scale=2,temperature=true")
    assert changed.q == Treatment(init="headwise", trains="never", rank=4)
    assert changed.k == Treatment(init="headwise", trains="never", rank=4, scale=2.0)
    assert changed.temperature
    assert changed.v == METHODS["baseline"].v
    same = method({"base": "oelm_v2", "qk": {"rank": 4}, "k": {"scale": 2}, "temperature": True})
    assert (same.q, same.k) == (changed.q, changed.k)


def test_saying_when_anew_replaces_what_the_base_said():
    assert method("oelm_thaw,qk.trains=never").q == Treatment(init="headwise", trains="never")


def test_the_source_scripts_switch_finds_the_twin():
    assert freeze_qk("oelm", False) == "oelm_v1_no_freeze"
    assert freeze_qk("oelm", True) == "oelm"
    assert freeze_qk("oelm_v2", False) == "oelm_no_freeze"
    assert freeze_qk("baseline", True) == "oelm_random"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("oelm_v3", "unknown method 'oelm_v3'; did you mean 'oelm_v2'?"),
        ("oelm_v2,q.init=headwize", "did you mean 'headwise'?"),
        ("oelm_v2,q.thaw_at=0.5", "write trains: late or drop `thaw_at`"),
        ("oelm_v2,q.trains=late", "trains: late needs `thaw_at`"),
        ("baseline,q.rank=2", "low-rank update on a matrix that trains anyway"),
        ("baseline,q.init=identity", "has nothing to train"),
        ("baseline,v.init=identity,v.trains=never", "for q and k only"),
        ("baseline,q.trains=ratio,q.freeze_ratio=1.5", "freeze_ratio must be above 0"),
        ("baseline,q.trains=every,q.every=1", "every must be 2 or more"),
        ("baseline,q.scale=0", "scale must be above 0"),
        ("oelm_v2 q.rank=4", "unknown method"),
        ("oelm_v2,rank", "write name,field=value"),
        ("oelm_v2,qk=headwise", "qk has fields, as in qk.init=headwise"),
        ("baseline,lr_by_layer=[0, 1]", "lr_by_layer must hold numbers above 0"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(spec, message):
    with pytest.raises(UserError) as error:
        method(spec)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("baseline,q.trains=layers,q.layers=[9]", "match nothing; the model has layers 0 to 3"),
        ("baseline,q.trains=ratio,q.freeze_ratio=0.05", "freezes nothing"),
        (
            "baseline,o.trains=ratio,o.freeze_ratio=0.5,o.ratio_of=heads",
            "only q, k and v have heads",
        ),
        ("baseline,lr_by_layer=[1, 2]", "2 entries for 4 layers"),
    ],
)
def test_a_method_that_matches_nothing_in_a_shape_is_refused(spec, message):
    with pytest.raises(UserError) as error:
        method(spec).check(n_layers=4, n_heads=4)
    assert message in str(error.value)


def test_when_it_trains():
    by_layer = Treatment(trains="late", thaw_at=0.8, thaw_by_layer=True)
    assert [by_layer.trains_from(i, 4) for i in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    ratio = Treatment(trains="ratio", freeze_ratio=0.5)
    assert [ratio.frozen_in(i, 4) for i in range(4)] == [True, True, False, False]
    listed = Treatment(trains="layers", layers=(0, 3))
    assert [listed.frozen_in(i, 4) for i in range(4)] == [False, True, True, False]
    heads = Treatment(trains="ratio", freeze_ratio=0.25, ratio_of="heads")
    assert heads.frozen_heads(8) == 2
    assert not heads.frozen_in(0, 4)
