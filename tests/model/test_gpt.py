import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm import GPT, ModelConfig, method
from oelm.errors import UserError
from oelm.freezing import count
from oelm.methods import METHODS
from oelm.model import transformer
from oelm.model.attention import rotate, rotation_table
from oelm.model.config import PRESETS
from oelm.model.transformer import MLP
from oelm.projections import make

TINY = ModelConfig.preset(
    "nano", n_layers=2, d_model=32, n_heads=4, d_ff=64, seq_len=16, vocab_size=50
)
OPTIONS = [
    {},
    {"positions": "rope"},
    {"positions": "relative"},
    {"norm": "rmsnorm", "qk_norm": True},
    {"activation": "swiglu", "tie_embeddings": False},
    {"attention_bias": True, "mlp_bias": False, "activation": "gelu_tanh"},
]


def tiny(spec="baseline", seed=0, **overrides):
    return GPT(ModelConfig.from_spec(TINY, **overrides), method(spec), seed=seed).eval()


def stir(model):
    """Give gains, low-rank updates and kernels something to do: most start as if they were not there."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)


def tokens(*shape, vocab=50, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "spec", "trainable", "frozen"),
    [
        ("medium-512", "baseline", 44_896_768, 0),
        ("medium-512", "oelm_v2", 41_751_040, 3_145_728),
        ("medium-512", "identity_q", 44_896_768 - 1_572_864, 0),
        ("medium-512", "identity_qk", 44_896_768 - 3_145_728, 0),
        ("gpt2-124m", "baseline", 124_439_808, 0),
    ],
)
def test_exact_counts(name, spec, trainable, frozen):
    with torch.device("meta"):
        counts = count(GPT(ModelConfig.preset(name), method(spec), seed=None))
    assert (counts["trainable"], counts["frozen"]) == (trainable, frozen)
    assert counts["total"] == trainable + frozen


@pytest.mark.parametrize("name", PRESETS)
def test_the_first_loss_is_that_of_guessing(name):
    config = ModelConfig.preset(name)
    model = GPT(config, method("oelm_v2")).eval()
    x = tokens(2, 64, vocab=config.vocab_size)
    with torch.no_grad():
        assert abs(model(x, x.roll(1)).item() - math.log(config.vocab_size)) < 0.2


@pytest.mark.parametrize("spec", METHODS)
def test_every_method_starts_from_guessing(spec):
    x = tokens(4, 16)
    with torch.no_grad():
        assert abs(tiny(spec)(x, x.roll(1)).item() - math.log(50)) < 0.2


@pytest.mark.parametrize("options", OPTIONS)
def test_the_loss_is_the_cross_entropy_of_the_logits(options):
    model, x, y = tiny("oelm_v2", **options), tokens(3, 16), tokens(3, 16, seed=1)
    y[0, :5] = -100
    logits = model(x)
    assert logits.shape == (3, 16, 50)
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert model(x, y).item() == pytest.approx(plain.item(), abs=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "spec",
    ["baseline", "identity_lowrank", "oelm_gain", "oelm_v2,kernel=true"],
)
def test_no_token_sees_the_future(options, spec):
    model, x = tiny(spec, **options), tokens(2, 16)
    stir(model)
    changed = x.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 50
    a, b = model(x), model(changed)
    assert torch.allclose(a[:, :10], b[:, :10], atol=1e-5)
    assert not torch.allclose(a[:, 10:], b[:, 10:], atol=1e-3)


@given(st.sampled_from(sorted(METHODS)), st.sampled_from(sorted(METHODS)), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_two_methods_share_every_tensor_they_do_not_treat(one, other, seed):
    a, b = tiny(one, seed), tiny(other, seed)
    first, second = a.state_dict(), b.state_dict()
    for name in first.keys() & second.keys():
        projection = name.rsplit(".", 2)[-2]
        if projection in ("q", "k", "up", "down") and (
            method(one).treatment(projection).init != method(other).treatment(projection).init
        ):
            continue
        assert torch.equal(first[name], second[name]), name


def test_the_trained_twin_starts_where_the_frozen_one_stays():
    frozen, trained = tiny("oelm_v2"), tiny("oelm_no_freeze")
    assert torch.equal(frozen(tokens(1, 8)), trained(tokens(1, 8)))
    heads = tiny("oelm_v2,qk.trains=ratio,qk.freeze_ratio=0.5,qk.ratio_of=heads")
    assert torch.allclose(frozen(tokens(1, 8)), heads(tokens(1, 8)), atol=1e-5)
    assert heads.blocks[0].attention.q.frozen_weight.shape == (16, 32)


def test_the_frozen_seed_moves_the_frozen_tensors_only():
    config = ModelConfig.from_spec(TINY)
    a, b = (GPT(config, method("oelm_v2"), seed=0, frozen_seed=s).state_dict() for s in (0, 1))
    different = {name for name in a if not torch.equal(a[name], b[name])}
    assert different == {f"blocks.{i}.attention.{p}.weight" for i in range(2) for p in "qk"}


@pytest.mark.parametrize("init", ["identity", "identity_shift", "identity_shuffle"])
def test_an_identity_equals_the_product_with_its_matrix(init):
    projection = tiny(f"identity_qk,k.init={init}").blocks[1].attention.k
    x = torch.randn(2, 5, 32)
    name = "blocks.1.attention.k.weight"
    matrix = make(init, (32, 32), heads=4, seed=0, name=name)
    assert projection.weight is None
    assert torch.equal(projection(x), x @ matrix.T)


def test_extras_start_as_if_they_were_not_there():
    x = tokens(2, 16)
    plain = tiny("oelm_v2", positions="rope")(x)
    for spec in ("oelm_temperature", "oelm_gain", "oelm_bias", "oelm_lowrank"):
        assert torch.allclose(tiny(spec, positions="rope")(x), plain, atol=1e-5), spec


def test_a_kernel_is_a_function_of_distance():
    attention = tiny("oelm_v2,kernel=true").blocks[0].attention
    with torch.no_grad():
        attention.kernel_q.normal_()
        attention.kernel_k.normal_()
    rotation = rotation_table(12, attention.kernel_q.numel() // attention.n_heads, 10000.0)
    nothing = torch.zeros(1, 12, attention.kernel_q.numel())
    q, k = attention.queries_and_keys(nothing, rotation)
    logits = (q @ k.transpose(-1, -2))[0]
    assert torch.allclose(logits[:, 1:, 1:], logits[:, :-1, :-1], atol=1e-5)
    assert logits[:, 5].std() > 0.1


def test_a_kernel_is_a_bias_where_everything_turns():
    kernel = tiny("oelm_v2,kernel=true", positions="rope")
    bias = tiny("oelm_bias", positions="rope")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one, other in zip(kernel.blocks, bias.blocks, strict=True):
            for name in "qk":
                value = torch.randn(getattr(other.attention, name).bias.shape, generator=draw)
                getattr(one.attention, f"kernel_{name}").copy_(value)
                getattr(other.attention, name).bias.copy_(value)
    x = tokens(2, 16)
    assert torch.allclose(kernel(x), bias(x), atol=1e-5)


def test_rope_sees_distance_only():
    q, k = torch.randn(2, 1, 1, 6, 8)
    cos, sin = rotation_table(16, 8, 1e4)
    near, far = (
        rotate(q, (cos[at], sin[at])) @ rotate(k, (cos[at], sin[at])).transpose(-1, -2)
        for at in (slice(0, 6), slice(5, 11))
    )
    assert torch.allclose(near, far, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "spec",
    [
        "baseline",
        "oelm_v2",
        "identity_lowrank",
        "oelm_v2,kernel=true",
        "oelm_gain,qk.bias=true,qk.input_gain=true",
        "oelm_v2,qk.trains=ratio,qk.freeze_ratio=0.5,qk.ratio_of=heads",
    ],
)
@pytest.mark.parametrize("few_rows", [0, 16])
def test_generation_with_cache_equals_that_without(options, spec, few_rows, monkeypatch):
    monkeypatch.setattr("oelm.model.gpt.FEW_ROWS", few_rows)  # 0: without the decoder for a few
    model = tiny(spec, **options)
    stir(model)
    prompt = tokens(2, 5)
    cached = torch.stack(list(model.generate(prompt, 24, temperature=0)), dim=1)
    window, plain = prompt, []
    for _ in range(24):
        if window.shape[1] > 16:
            window = window[:, -8:]
        chosen = model(window)[:, -1].argmax(-1)
        plain.append(chosen)
        window = torch.cat([window, chosen[:, None]], dim=1)
    assert torch.equal(cached, torch.stack(plain, dim=1))


def test_sampling_respects_its_cuts():
    model, prompt = tiny(), tokens(64, 4)
    best = next(model.generate(prompt, 1, temperature=0))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(next(model.generate(prompt, 1, temperature=5.0, **cut)), best)
    draws = [
        torch.stack(list(model.generate(prompt, 3, generator=torch.Generator().manual_seed(s))))
        for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_the_gradient_of_a_rotation_is_the_rotation_back():
    x = torch.randn(2, 3, 5, 8, dtype=torch.double, requires_grad=True)
    cos, sin = (t[2:7].double() for t in rotation_table(16, 8, 1e4))
    assert torch.autograd.gradcheck(lambda x: rotate(x, (cos, sin)), x)
    half = rotate(x.half(), (cos.float(), sin.float()))
    assert half.dtype == torch.half
    assert torch.allclose(half.double(), rotate(x, (cos, sin)), atol=1e-2)


@pytest.mark.parametrize("method", ["baseline", "baseline,down.trains=never,down.rank=4"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_a_large_hidden_layer_is_computed_again_in_backward(method, activation, monkeypatch):
    calls = []
    plain = MLP.activate
    monkeypatch.setattr(MLP, "activate", lambda self, x: calls.append(1) or plain(self, x))
    found = {}
    for small in (0, transformer.SMALL):
        monkeypatch.setattr(transformer, "SMALL", small)
        model = tiny(method, activation=activation).train()
        stir(model)
        calls.clear()
        model(tokens(2, 16), tokens(2, 16, seed=1)).backward()
        found[small] = len(calls), [p.grad for p in model.parameters()]
    (twice, again), (once, held) = found.values()
    assert once == 2
    assert twice >= 4
    assert all(torch.equal(a, b) for a, b in zip(again, held, strict=True))


def test_activation_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = tiny("oelm_v2", positions="rope").train()
        model.checkpoint_activations(checkpointing)
        model(tokens(2, 16), tokens(2, 16, seed=1)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_heads": 3}, "not divisible by n_heads 3"),
        ({"positions": "alibi"}, "unknown value for model: positions 'alibi'"),
        ({"n_layer": 3}, "unknown field of model 'n_layer'; did you mean 'n_layers'?"),
        ({"d_model": 12, "n_heads": 4, "positions": "rope"}, "even head width"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"n_layers": 0}, "n_layers must be at least 1"),
    ],
)
def test_an_impossible_shape_is_refused_when_it_is_made(overrides, message):
    with pytest.raises(UserError) as error:
        ModelConfig.preset("nano", **overrides)
    assert message in str(error.value)


def test_an_unknown_preset_is_refused():
    with pytest.raises(UserError, match="did you mean 'nano'"):
        ModelConfig.preset("nanno")


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(UserError, match="longer than the model's seq_len 16"):
        tiny()(tokens(1, 17))
