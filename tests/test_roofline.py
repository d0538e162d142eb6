import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from oelm import GPT, ModelConfig, method
from oelm.methods import METHODS
from oelm.roofline import Part, rest_of_step, step_flops, step_parts

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


def test_every_operand_moves_once_for_every_product():
    rows = 3 * 16
    matrix = rows * 32 + 32 * 32 + rows * 32
    update = (rows * 32 + 32 * 8 + rows * 8) + (rows * 8 + 8 * 32 + rows * 32)

    def moved(spec, name, **rest):
        parts = {p.name: p for p in step_parts(TINY, method(spec), 3, **rest)}
        return parts[name].bytes / 2  # layers

    assert moved("baseline", "q") == 3 * 4 * matrix
    assert moved("baseline", "q", number_bytes=2) == 3 * 2 * matrix
    assert moved("oelm_v2", "q") == 2 * 4 * matrix  # no weight gradient
    assert moved("identity_q", "q") == 0
    assert moved("identity_lowrank", "q") == 3 * 4 * update
    assert moved("baseline", "attention") == 4 * 12 * rows * 32
    assert moved("baseline", "head") == 4 * (rows + 50) * 32
    wide = rows * 32 + 32 * 64 + rows * 64
    assert moved("baseline", "up") == moved("baseline", "down") == 3 * 4 * wide


def test_what_is_no_product_costs_bytes():
    rows, trainable = 3 * 16, 1000
    streams = 5 * 5 * 32 + 4 * 6 * 32 + 2 * 5 * 64  # five norms, four sums, two activations
    part = rest_of_step(TINY, 3, trainable)
    assert (part.total, part.bytes) == (0, 4 * rows * streams + 32 * trainable)
    gated = rest_of_step(ModelConfig.from_spec(TINY, activation="swiglu"), 3, trainable)
    assert gated.bytes - part.bytes == 4 * rows * 2 * 3 * 64


def test_a_part_takes_as_long_as_its_slower_limit():
    part = Part("any", forward=6e9, input_grad=2e9, weight_grad=2e9, bytes=1e9)
    assert part.seconds(peak=1e10, bandwidth=1e10) == 1.0
    assert part.seconds(peak=1e10, bandwidth=5e8) == 2.0
