"""Each way freezing goes wrong is done to a real model, and must flip the verdict."""

import copy

import pytest
import torch
from torch import nn

from oelm import GPT, ModelConfig, method
from oelm.freezing import Gates, Plan, audit, count, hashes, plain_name, roles
from oelm.methods import METHODS
from oelm.train.config import TrainConfig
from oelm.train.optimizer import build_optimizer

TINY = ModelConfig.preset(
    "nano", n_layers=2, d_model=32, n_heads=4, d_ff=64, seq_len=16, vocab_size=50
)


def build(spec="oelm_v2", seed=0, **overrides):
    return GPT(ModelConfig.from_spec(TINY, **overrides), method(spec), seed=seed)


def optimizer_for(model, steps=20, decay=0.1):
    config = TrainConfig(weight_decay=decay, max_lr=1e-3, max_steps=steps)
    return build_optimizer(model, model.method, Gates(model, steps), config)


def train(model, optimizer, steps=3, forward=None):
    """Real steps; returns the gated parameters that thawed on the way."""
    gates = Gates(model, steps)
    g = torch.Generator().manual_seed(0)
    for step in range(steps):
        gates.apply(step)
        x = torch.randint(50, (4, 17), generator=g)
        (forward or model)(x[:, :-1], x[:, 1:]).backward()
        gates.drop_closed(step)
        optimizer.step()
        optimizer.zero_grad()
    return gates.thawed_by(steps)


def audited(
    spec="oelm_v2", break_model=lambda model: None, break_optimizer=lambda model, o: o, steps=3
):
    """Build by configuration, break something, train for real, audit against a fresh plan."""
    plan = Plan.of(build(spec), method(spec))
    model = build(spec)
    break_model(model)
    optimizer = break_optimizer(model, optimizer_for(model, steps))
    before = hashes(model)
    thawed = train(model, optimizer, steps)
    return audit(model, plan, optimizer=optimizer, before=before, thawed=thawed)


IN_PART = [
    "oelm_v2,qk.trains=every,qk.every=4",
    "oelm_v2,qk.trains=late,qk.thaw_at=0.5,qk.thaw_by_layer=true",
    "oelm_v2,qk.trains=ratio,qk.freeze_ratio=0.5,qk.ratio_of=heads",
]


@pytest.mark.parametrize("spec", [*METHODS, *IN_PART])
def test_twenty_steps_with_decay_move_what_trains_and_nothing_else(spec):
    plan = Plan.of(build(spec), method(spec))
    model = build(spec)
    optimizer = optimizer_for(model)
    before = hashes(model)
    thawed = train(model, optimizer, steps=20)
    result = audit(model, plan, optimizer=optimizer, before=before, thawed=thawed)
    assert result["problems"] == []
    assert result["verdict"] == "pass"
    role = roles(model)
    for row in result["tensors"]:
        assert row["moved"] == (role[row["name"]] != "frozen"), row["name"]
    state = {id(p) for p in optimizer.state}
    assert all(id(b) not in state for b in model.buffers())


def test_the_counts_see_buffers():
    counts = count(build())
    assert counts["frozen"] == 2 * 2 * 32 * 32
    assert counts["frozen_bytes"] == 4 * counts["frozen"]
    assert counts["total"] == count(build("baseline"))["total"]
    assert counts["by_layer"]["layer 1"]["frozen"] == 2 * 32 * 32
    assert sum(sum(c.values()) for c in counts["by_layer"].values()) == counts["total"]


def unstore(model):
    """The frozen matrix is no longer saved, nor counted."""
    q = model.blocks[0].attention.q
    q._non_persistent_buffers_set.add("weight")


def as_parameter(model, requires_grad=False):
    q = model.blocks[0].attention.q
    value = q.weight
    del q._buffers["weight"]
    q.weight = nn.Parameter(value, requires_grad=requires_grad)


def decayed(model, optimizer):
    """AdamW decays whatever it is given a gradient for, be it zero."""
    as_parameter(model)
    weight = model.blocks[0].attention.q.weight
    weight.grad = torch.zeros_like(weight)
    optimizer.add_param_group(
        {"params": [weight], "weight_decay": 0.1, "first_step": 0, "multiplier": 1.0}
    )
    step = optimizer.step

    def step_with_zero_gradient(*args, **kwargs):
        weight.grad = torch.zeros_like(weight)
        return step(*args, **kwargs)

    optimizer.step = step_with_zero_gradient
    return optimizer


def overwrite(model):
    """A checkpoint of another seed is loaded over it."""
    model.load_state_dict(build(seed=1).state_dict())


def unfreeze_by_loading(model):
    """A checkpoint of the trained twin, assigned: its parameters come along."""
    twin = build("oelm_no_freeze")
    for ours, theirs in zip(model.blocks, twin.blocks, strict=True):
        ours.attention.q = theirs.attention.q


def require_gradients(model):
    """What a careless wrapper does to everything it holds."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.requires_grad_()


FAULTS = [
    (unstore, "left out", "counts and checkpoints leave it out"),
    (overwrite, "overwritten", "does not hold the value that its seed gives"),
    (unfreeze_by_loading, "unfrozen by loading", "is frozen but moved"),
    (require_gradients, "gradients on again", "is frozen but requires a gradient"),
]


@pytest.mark.parametrize(("fault", "name", "message"), FAULTS, ids=[f[1] for f in FAULTS])
def test_a_broken_model_fails(fault, name, message):
    result = audited(break_model=fault)
    assert result["verdict"] == "fail"
    assert any(message in problem for problem in result["problems"]), result["problems"]


def test_a_decayed_frozen_weight_fails():
    result = audited(break_optimizer=decayed)
    assert result["verdict"] == "fail"
    assert "blocks.0.attention.q.weight is frozen but moved" in result["problems"]
    assert any("the optimizer holds it" in problem for problem in result["problems"])


def test_a_thawed_parameter_missing_from_the_optimizer_fails():
    def without_gated(model, optimizer):
        gated = {id(p) for _, p, _, _ in Gates(model, 3).entries}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in gated]
        return optimizer

    result = audited("oelm_thaw", break_optimizer=without_gated)
    assert (
        "blocks.0.attention.q.weight should train but the optimizer does not know it"
        in result["problems"]
    )
    assert "blocks.0.attention.q.weight should train but did not move" in result["problems"]


def test_a_model_of_another_configuration_fails():
    plan = Plan.of(build(), method("oelm_v2"))
    assert any("another model was built" in p for p in audit(build(d_ff=48), plan)["problems"])
    assert any("is missing" in p for p in audit(build(n_layers=1), plan)["problems"])
    assert any("not part of" in p for p in audit(build(n_layers=3), plan)["problems"])
    # The baseline has the same names and shapes, but its Q and K train.
    result = audit(build("baseline"), plan)
    assert any("q.weight is frozen but requires a gradient" in p for p in result["problems"])


def test_a_pattern_that_matched_nothing_fails():
    unmatched = Plan.of(build("baseline"), method("oelm_v2"))
    result = audit(build("baseline"), unmatched)
    assert (
        "the method freezes, but no tensor of this model is frozen or gated" in result["problems"]
    )


def test_a_gate_left_open_fails():
    plan, model = Plan.of(build("oelm_thaw"), method("oelm_thaw")), build("oelm_thaw")
    optimizer, before = optimizer_for(model), hashes(model)
    model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    optimizer.step()  # nobody closed the gates for step 0
    result = audit(model, plan, optimizer=optimizer, before=before, thawed=())
    assert "blocks.0.attention.q.weight moved before its thaw" in result["problems"]


def test_compiling_and_wrapping_change_no_verdict():
    plan, model = Plan.of(build(), method("oelm_v2")), build()
    wrapped = nn.DataParallel(model)
    assert {plain_name(n) for n, _ in wrapped.named_parameters()} == {
        n for n, _ in model.named_parameters()
    }
    optimizer, before = optimizer_for(model), hashes(wrapped)
    train(model, optimizer)
    assert audit(wrapped, plan, optimizer=optimizer, before=before)["verdict"] == "pass"
    require_gradients(wrapped)
    assert audit(wrapped, plan, optimizer=optimizer, before=before)["verdict"] == "fail"
    assert plain_name("_orig_mod.module.blocks.0.mlp.up.weight") == "blocks.0.mlp.up.weight"


def test_gates_open_when_they_should():
    model = build("oelm_v2,q.trains=late,q.thaw_at=0.5,k.trains=every,k.every=4")
    gates = Gates(model, max_steps=9)
    assert gates.thaw_steps() == [5]
    q, k = "blocks.0.attention.q.weight", "blocks.0.attention.k.weight"
    opened = [(q in gates.open_at(s), k in gates.open_at(s)) for s in range(9)]
    assert opened == [(s >= 5, s % 4 == 0) for s in range(9)]
    assert (gates.first_step(q), gates.first_step(k)) == (5, 0)
    assert gates.thawed_by(5) == {k, k.replace("0", "1")}
    gates.apply(3)
    assert not model.blocks[0].attention.k.weight.requires_grad
    gates.apply(3, keep_every=True)
    assert model.blocks[0].attention.k.weight.requires_grad
    assert not model.blocks[0].attention.q.weight.requires_grad


def test_adam_starts_counting_at_the_thaw():
    model = build("oelm_thaw")
    optimizer = optimizer_for(model, steps=4)
    train(model, optimizer, steps=4)
    q, v = model.blocks[0].attention.q.weight, model.blocks[0].attention.v.weight
    assert (optimizer.state[q]["step"].item(), optimizer.state[v]["step"].item()) == (2, 4)


def test_orthogonality_is_reported_per_head():
    rows = {r["name"]: r for r in audit(build(), Plan.of(build(), method("oelm_v2")))["tensors"]}
    errors = rows["blocks.0.attention.q.weight"]["orthogonality_error"]
    assert len(errors) == 4
    assert max(errors) < 1e-6
    assert rows["blocks.0.attention.v.weight"]["orthogonality_error"] is None


def test_rounding_of_another_lapack_is_a_note_not_a_fault():
    plan, model = Plan.of(build(), method("oelm_v2")), copy.deepcopy(build())
    with torch.no_grad():
        weight = model.blocks[0].attention.q.weight
        weight.mul_(1 + 1e-7)
    result = audit(model, plan)
    assert result["verdict"] == "pass"
    assert "up to rounding" in result["notes"][0]
