import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from oelm import GPT, ModelConfig, method
from oelm.methods import METHODS
from oelm.roofline import step_flops, step_parts

TINY = ModelConfig.preset(
    "nano", n_layers=2, d_model=32, n_heads=4, d_ff=64, seq_len=16, vocab_size=50
)


def torchs_count(config, spec):
    """What torch's counter sees of a step."""
    model = GPT(config, method(spec))
    x = torch.randint(50, (3, 16))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, x).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "spec", [*METHODS, "oelm_v2,qk.trains=ratio,qk.freeze_ratio=0.5,qk.ratio_of=heads"]
)
def test_the_count_is_torchs_own(spec):
    # torch counts the keys that a causal query may not see as well.
    assert step_flops(TINY, method(spec), 3, causal=False) == torchs_count(TINY, spec)


def test_swiglu_has_a_third_matrix():
    config = ModelConfig.from_spec(TINY, activation="swiglu")
    assert step_flops(config, method("baseline"), 3, causal=False) == torchs_count(
        config, "baseline"
    )


@pytest.mark.parametrize(
    ("model", "batch", "identity", "frozen"),
    [("medium-512", 8, 3.4, 2.3), ("nano", 16, 5.9, 3.9), ("gpt2-124m", 1, 5.3, 3.5)],
)
def test_what_freezing_can_save(model, batch, identity, frozen):
    config = ModelConfig.preset(model)
    base = step_flops(config, method("baseline"), batch)
    for spec, percent in (("identity_q", identity), ("oelm_v2", frozen)):
        saved = 100 * (1 - step_flops(config, method(spec), batch) / base)
        assert saved == pytest.approx(percent, abs=0.06)


def test_a_frozen_matrix_has_no_weight_gradient():
    parts = {p.name: p for p in step_parts(TINY, method("oelm_q_only"), 1)}
    assert parts["q"].weight_grad == 0
    assert parts["q"].forward == parts["k"].forward == 2 * 16 * 32 * 32 * 2
    assert parts["k"].weight_grad == parts["k"].forward
