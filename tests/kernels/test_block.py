"""A block in one call against its modules one by one, in float64."""

import copy
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm import GPT, ModelConfig
from oelm.kernels import block as in_one
from oelm.kernels import functions
from oelm.methods import METHODS, method
from oelm.train.lanes import Lanes
from tests.kernels import needs_compiler

pytestmark = needs_compiler

SIMPLE = sorted(METHODS.keys() - {"oelm_temperature", "oelm_gain"})
WIDTH = 32


@pytest.fixture(autouse=True, scope="module")
def products_of_our_own():
    """On any processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "products_pay", lambda: True)
        yield


def model_of(name, seed=0, **options):
    """With values that no training starts from, so that every part shows."""
    small = {
        "n_layers": 2,
        "d_model": WIDTH,
        "n_heads": 2,
        "d_ff": 80,
        "seq_len": 70,
        "vocab_size": 7,
    }
    shape = ModelConfig(**{**small, **options})
    model = GPT(shape, method(name), seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


@contextmanager
def threads_of(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(before)


def through(model, x, rotation=None):
    """The first block's output and the gradients of what it trains."""
    block = model.blocks[0]
    if model.turns:
        rotation = tuple(table[: x.shape[1]].to(x.dtype) for table in (model.cos, model.sin))
    names, trained = zip(*block.named_parameters(), strict=True)
    x = x.requires_grad_()
    y = block(x, rotation)
    grads = torch.autograd.grad(y, [x, *trained], torch.sin(torch.arange(y.numel())).view_as(y))
    return y, dict(zip(["x", *names], grads, strict=True))


def inputs(*shape, seed=0):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(SIMPLE), B=st.integers(1, 4), T=st.integers(1, 70), seed=st.integers(0, 10**6),
    positions=st.sampled_from(["learned", "rope"]), norm=st.sampled_from(["layernorm", "rmsnorm"]),
    activation=st.sampled_from(["gelu", "gelu_tanh"]), attention_bias=st.booleans(),
    mlp_bias=st.booleans(), small=st.sampled_from([0, 2**21]), threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_a_block_and_its_gradients_are_those_of_its_modules(
    name, B, T, seed, small, threads, **options
):
    model = model_of(name, seed, **options)
    exact = copy.deepcopy(model).double()
    x = inputs(B, T, seed=seed)
    # With one thread, sequences may go one after the other.
    with threads_of(threads), pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_one, "SMALL", small)
        y, grads = through(model, x.clone())
    assert "_Function" in type(y.grad_fn).__name__
    expected, exact_grads = through(exact, x.double())
    assert "_Function" not in type(expected.grad_fn).__name__
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    assert grads.keys() == exact_grads.keys()
    largest = max(grad.abs().max().item() for grad in exact_grads.values())
    for part in model.blocks[0].modules():  # whoever listens gets the modules, here in float32
        part.register_forward_hook(lambda *_: None)
    y, their_grads = through(model, x.clone())
    assert "_Function" not in type(y.grad_fn).__name__
    for key, grad in exact_grads.items():
        theirs = (their_grads[key].double() - grad).abs().max().item()  # large where logits are
        atol = 2e-6 * largest + 5 * theirs
        torch.testing.assert_close(grads[key].double(), grad, rtol=1e-3, atol=atol)


def through_all(model, tokens):
    """The hidden states and the gradients of all that is trained."""
    model.zero_grad()
    h = model.hidden(tokens)
    h.backward(torch.sin(torch.arange(h.numel())).view_as(h))
    return h, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("name", SIMPLE)
def test_all_blocks_in_one_call_are_one_after_the_other(two_threads, name, positions, monkeypatch):
    model = model_of(name, positions=positions)
    tokens = torch.arange(4 * 13).view(4, 13) % 7
    alone, lanes = [], Lanes()
    for few in (0, in_one.FEW):
        monkeypatch.setattr(in_one, "FEW", few)
        model.lanes = None
        alone.append(through_all(model, tokens))
        model.lanes = lanes
        alone.append(through_all(model, tokens))
    (h, grads), by_lanes, in_one_call, in_both = alone
    assert torch.equal(h, by_lanes[0])
    assert torch.equal(in_one_call[0], in_both[0])
    torch.testing.assert_close(in_one_call[0], h)  # whose last norm is torch's
    largest = max(grad.abs().max().item() for grad in grads.values())
    for _, other in (by_lanes, in_one_call, in_both):
        for key, grad in grads.items():
            torch.testing.assert_close(other[key], grad, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("name", SIMPLE)
def test_blocks_in_one_call_have_the_bits_of_blocks_by_themselves(two_threads, name, positions):
    """Without the last norm, which is torch's there."""
    model = model_of(name, positions=positions)
    rotation = (model.cos[:13], model.sin[:13]) if model.turns else None
    rope = rotation if positions == "rope" else None

    def in_turn(x):
        for block in model.blocks:
            x = block(x, rotation)
        return x

    def together(x, lanes=1):
        return in_one.blocks(x, [block.part(13, rotation) for block in model.blocks], rope, lanes)

    def found(work):
        model.zero_grad()
        x = inputs(4, 13).requires_grad_()
        y = work(x)
        y.backward(torch.sin(torch.arange(y.numel())).view_as(y))
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        return {"y": y, "x": x.grad, **grads}

    lanes = Lanes()
    alone, in_one_call = found(in_turn), found(together)
    by_lanes, in_both = found(lambda x: lanes(in_turn, x)), found(lambda x: together(x, lanes=2))
    assert alone.keys() == in_one_call.keys() == by_lanes.keys() == in_both.keys()
    for key in alone:
        assert torch.equal(alone[key], in_one_call[key])
        # A kernel's gradient is a sum over positions, of both lanes' sums or the other way round.
        assert "kernel_" in key or torch.equal(by_lanes[key], in_both[key])


def test_all_blocks_are_one_function_only_if_they_are_small(monkeypatch):
    def calls(model):
        found = []
        monkeypatch.setattr(in_one._Function, "apply", lambda *a: found.append(len(a[1])) or a[0])
        model.hidden(torch.zeros(2, 5, dtype=torch.long))
        return found

    assert calls(model_of("baseline")) == [2]
    model = model_of("baseline")
    model.checkpoint_activations(True)
    assert calls(model.train()) == [1, 1]
    with torch.no_grad():
        assert calls(model_of("baseline")) == [1, 1]
    weights = 4 * WIDTH**2 + 2 * WIDTH * 80
    monkeypatch.setattr(in_one, "FEW", 4 * 2 * (2 * 5 * 80 + 2 * weights) - 1)
    assert calls(model_of("baseline")) == [1, 1]


@pytest.mark.parametrize("name", ["oelm_temperature", "oelm_gain"])
def test_what_the_kernel_does_not_know_goes_through_the_modules(name):
    y, _ = through(model_of(name), inputs(1, 5))
    assert "_Function" not in type(y.grad_fn).__name__


def test_dropout_and_whoever_listens_to_a_part_are_served_by_the_modules():
    model = model_of("baseline", dropout=0.5)
    y, _ = through(model.train(), inputs(1, 5))
    assert "_Function" not in type(y.grad_fn).__name__
    y, _ = through(model.eval(), inputs(1, 5))
    assert "_Function" in type(y.grad_fn).__name__
    heard = []
    listener = model.blocks[0].attention.register_forward_pre_hook(lambda m, args: heard.append(1))
    through(model, inputs(1, 5))
    listener.remove()
    assert heard == [1]
    listener = model.blocks[0].register_full_backward_hook(lambda *_: heard.append(2))
    model.hidden(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    listener.remove()
    listener = model.token_embedding.register_forward_hook(lambda *_: heard.append(3))
    model.hidden(torch.zeros(2, 5, dtype=torch.long))
    listener.remove()
    assert heard == [1, 2, 3]
    y, _ = through(model, inputs(1, 5))
    assert "_Function" in type(y.grad_fn).__name__


def test_a_part_that_somebody_changed_is_asked_itself():
    model = model_of("baseline")
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.up)
    y, _ = through(model, inputs(1, 5))
    assert "_Function" not in type(y.grad_fn).__name__


def test_a_gradient_that_lies_otherwise_in_memory():
    block, x = model_of("baseline").blocks[0], inputs(3, 5)
    weights = torch.sin(torch.arange(x.numel())).view(3, 5, WIDTH)
    found = []
    for turned in (lambda y: y, lambda y: y.transpose(0, 1)):
        x.grad = None
        (turned(block(x.requires_grad_())) * turned(weights).contiguous()).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def kept(name, part):
    """Whether a block keeps that part of attention for backward."""
    y, _ = through(model_of(name), inputs(2, 9))
    return in_one._PLACE[f"{part}.y"] in dict(y.grad_fn.plans[0].kept)


def test_an_identity_is_read_where_it_lies_with_no_copy():
    assert [kept("baseline", part) for part in "qkv"] == [True, True, True]
    assert [kept("identity_q", part) for part in "qkv"] == [False, True, True]
    assert [kept("identity_qk", part) for part in "qkv"] == [False, False, True]


def by_threads(T):
    """The output and the gradients of a block with one, two and three threads."""
    found = []
    for threads in (1, 2, 3):
        with threads_of(threads):
            y, grads = through(model_of("oelm_kernel", positions="rope"), inputs(3, T))
        found.append([y, *grads.values()])
    return found


def test_the_bits_do_not_depend_on_the_threads():
    first, *others = by_threads(20)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_long_sequences_one_after_the_other_have_the_same_output_and_nearly_the_same_gradients():
    """With one thread, a small block may take them so; their gradients are added up in another order then."""
    one, two, three = by_threads(64)
    assert all(torch.equal(a, b) for a, b in zip(two, three, strict=True))
    assert torch.equal(one[0], two[0])
    torch.testing.assert_close(one[1:], two[1:], rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_stays_visible():
    x = inputs(2, 6)
    x[1, 3, 0] = float("nan")
    y, _ = through(model_of("baseline"), x)
    assert y[0].isfinite().all()
    assert not y[1, 3:].isfinite().any()
