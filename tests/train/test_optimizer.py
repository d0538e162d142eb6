import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import UserError
from oelm.freezing import Gates
from oelm.methods import method
from oelm.model.config import ModelConfig
from oelm.model.gpt import GPT
from oelm.train import precision
from oelm.train.config import TrainConfig
from oelm.train.errors import NonFiniteError
from oelm.train.optimizer import (
    AdamW,
    Guard,
    build_optimizer,
    learning_rate,
    set_learning_rates,
    total_norm,
)

SHAPE = ModelConfig.preset("nano", n_layers=2, d_model=16, n_heads=2, d_ff=32, vocab_size=11)
CONFIG = TrainConfig(model="nano", max_steps=101, warmup=10, max_lr=1.0, min_lr=0.1)


@pytest.mark.parametrize(
    ("schedule", "middle", "late"),
    [
        ("cosine", 0.55, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 80 / 90))),
        ("linear", 0.55, 1 - 0.9 * 80 / 90),
        ("constant", 1.0, 1.0),
        ("wsd", 1.0, 0.55),
    ],
)
def test_schedules_at_known_steps(schedule, middle, late):
    config = replace(CONFIG, schedule=schedule)
    assert learning_rate(config, 0) == pytest.approx(0.1)
    assert learning_rate(config, 4) == pytest.approx(0.5)
    assert learning_rate(config, 10) == pytest.approx(1.0)
    assert learning_rate(config, 55) == pytest.approx(middle)
    assert learning_rate(config, 90) == pytest.approx(late)
    assert learning_rate(config, 100) == pytest.approx(1.0 if schedule == "constant" else 0.1)


@given(
    steps=st.integers(1, 400),
    warmup=st.floats(0, 500),
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
)
def test_rates_rise_to_the_top_and_never_rise_again(steps, warmup, schedule):
    config = TrainConfig(
        model="nano", max_steps=steps, warmup=warmup, schedule=schedule, max_lr=1.0, min_lr=0.1
    )
    rates = [learning_rate(config, step) for step in range(steps)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) <= 1.0 + 1e-12
    assert top <= config.warmup_steps


def groups_by_name(model, spec, config=CONFIG):
    gates = Gates(model, config.max_steps)
    optimizer = build_optimizer(model, method(spec), gates, config)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: g for g in optimizer.param_groups for p in g["params"]}
    assert found.keys() == dict(model.named_parameters()).keys()
    return optimizer, found


def test_matrices_decay_and_nothing_else_does():
    spec = "oelm_bias,qk.gain=true,temperature=true"
    model = GPT(replace(SHAPE, positions="relative"), method(spec))
    _, groups = groups_by_name(model, spec)
    decayed = {name for name, g in groups.items() if g["weight_decay"]}
    layers = ("attention.v.weight", "attention.o.weight", "mlp.up.weight", "mlp.down.weight")
    expected = {f"blocks.{i}.{name}" for i in range(2) for name in layers}
    assert decayed == {"token_embedding.weight", *expected}


def test_the_vectors_that_stand_in_for_a_matrix_have_their_own_rate():
    spec = "oelm_gain,qk.bias=true,qk.input_gain=true,kernel=true,small_lr=10"
    optimizer, groups = groups_by_name(GPT(SHAPE, method(spec)), spec)
    set_learning_rates(optimizer, CONFIG, 55)
    for name in ("q.gain", "k.input_gain", "q.bias", "temperature", "kernel_k"):
        assert groups[f"blocks.0.attention.{name}"]["lr"] == pytest.approx(5.5)
    for name in ("token_embedding.weight", "blocks.0.attention.v.weight", "blocks.1.mlp.up.bias"):
        assert groups[name]["lr"] == pytest.approx(0.55)


def test_each_layer_has_its_multiplier():
    spec = {"base": "baseline", "lr_by_layer": [0.5, 2.0]}
    optimizer, groups = groups_by_name(GPT(SHAPE, method(spec)), spec)
    set_learning_rates(optimizer, CONFIG, 55)
    assert groups["token_embedding.weight"]["lr"] == pytest.approx(0.55)
    assert groups["blocks.0.attention.q.weight"]["lr"] == pytest.approx(0.275)
    assert groups["blocks.1.mlp.up.bias"]["lr"] == pytest.approx(1.1)


def test_what_thaws_is_known_from_the_start_and_warmed_up_alone():
    spec = "oelm_thaw"  # at half: step 51
    optimizer, groups = groups_by_name(GPT(SHAPE, method(spec)), spec)
    config = replace(CONFIG, thaw_warmup=10, schedule="constant")
    seen = []
    for step in (50, 51, 55, 60, 61):
        set_learning_rates(optimizer, config, step)
        seen.append(groups["blocks.0.attention.q.weight"]["lr"])
        assert groups["blocks.0.attention.v.weight"]["lr"] == 1.0
    assert seen == pytest.approx([0.0, 0.1, 0.5, 1.0, 1.0])
    set_learning_rates(optimizer, replace(config, thaw_warmup=0), 51)
    assert groups["blocks.0.attention.q.weight"]["lr"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # our kernel's step, torch's
def test_clipping_scales_the_whole_gradient_for_one_step(dtype):
    a, b = (torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in range(2))
    optimizer = AdamW([a, b], fused=True)
    a.grad = torch.tensor([3.0, 0.0], dtype=dtype)
    assert optimizer.clip(0) == 3.0
    b.grad = torch.tensor([0.0, 4.0], dtype=dtype)
    assert optimizer.clip(1.0) == 5.0
    optimizer.step()  # the averages begin with a tenth of the gradient
    means = torch.cat([optimizer.state[p]["exp_avg"] for p in (a, b)])
    assert means.tolist() == pytest.approx([0.06, 0, 0, 0.08], rel=1e-5)
    a.grad, b.grad = torch.tensor([3.0, 0.0], dtype=dtype), None
    optimizer.step()  # which nobody clipped
    assert optimizer.state[a]["exp_avg"][0] == pytest.approx(0.9 * 0.06 + 0.1 * 3, rel=1e-5)


def test_a_bad_step_changes_nothing_and_is_named():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], lr=0.1, fused=True)
    guard = Guard(optimizer, 1, torch.device("cpu"))
    for step, value in enumerate([1.0, float("nan"), 1.0, float("inf")]):
        before = weight.detach().clone()
        weight.grad = torch.full((3,), value)
        good = guard.watch(step, optimizer.clip(1.0))
        optimizer.step()
        assert bool(good) == math.isfinite(value)
        assert weight.equal(before) == (not good)
        if step < 3:
            guard.check("batch {step}")
    assert optimizer.state[weight]["step"] == 2
    with pytest.raises(
        NonFiniteError, match=r"step 4 is not finite \(2 such steps, 1 allowed\).*batch 3"
    ):
        guard.check("batch {step}")


def test_with_a_scaler_only_a_long_row_of_bad_steps_is_an_error():
    weight = torch.nn.Parameter(torch.ones(3))
    guard = Guard(torch.optim.AdamW([weight]), 0, torch.device("cpu"), scaled=True)
    good, bad = torch.tensor(1.0), torch.tensor(float("inf"))
    for step in range(60):
        guard.watch(step, bad if step % 20 else good)
        guard.check("batch {step}")
    for step in range(60, 62):
        guard.watch(step, bad)
    with pytest.raises(NonFiniteError):
        guard.check("batch {step}")


def test_precision_follows_the_device(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert precision.choose("auto", cpu).name == "fp32"
    assert "slow" in precision.choose("bf16", cpu).reason
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert precision.choose("auto", cpu).name == "fp32"
    assert precision.choose("bf16", cpu).reason == "as asked"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert precision.choose("auto", cpu).name == "bf16"
    assert precision.choose("fp32", cpu).name == "fp32"
    with pytest.raises(UserError, match="fp16 needs a CUDA device, not cpu"):
        precision.choose("fp16", cpu)
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "P100")
    for supported, name in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s
        )
        assert precision.choose("auto", cuda).name == name
    assert precision.choose("auto", cuda, "fsdp").name == "fp32"


@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    decay=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=40, deadline=None)
def test_steps_are_those_of_torchs_adamw_in_float64(sizes, seed, decay):
    draw = torch.Generator().manual_seed(seed)
    ours = [torch.randn(n, generator=draw).requires_grad_() for n in sizes]
    exact = [p.detach().double().requires_grad_() for p in ours]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": decay}
    own, reference = AdamW(ours, fused=True, **options), torch.optim.AdamW(exact, **options)
    for step in range(4):
        for p, q in zip(ours, exact, strict=True):
            p.grad = None if step == 1 and p is ours[0] else torch.randn(len(p), generator=draw)
            q.grad = None if p.grad is None else p.grad.double()
        own.step()
        reference.step()
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)
        assert own.state[p]["step"] == reference.state[q]["step"]


def test_the_norm_of_all_gradients_does_not_depend_on_the_threads():
    draw, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    tensors = [torch.randn(n, generator=draw) for n in (1, 4095, 4096, 4097, 100_000)]
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(total_norm(tensors).item())
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    exact = sum(t.double().square().sum().item() for t in tensors) ** 0.5
    assert found[0] == pytest.approx(exact, rel=1e-6)
    assert math.isnan(total_norm([torch.tensor([1.0, math.nan])]))
    assert total_norm([]) == 0
