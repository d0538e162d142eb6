import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.kernels import functions, library
from oelm.model import loss as loss_module
from oelm.model.loss import linear_cross_entropy
from tests.kernels import needs_compiler


@pytest.fixture(
    autouse=True, scope="module", params=["ours", "blas"] if library.blas() else ["ours"]
)
def products(request):
    """By the kernels on any processor, and so the kernel for small heads; by BLAS too, if it is in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "products_pay", lambda: True)
        if library.library() and request.param == "ours":
            functions.kernels().multiply_by(None)
        yield
        if library.library():
            functions.kernels().multiply_by(library.blas())


@given(
    rows=st.one_of(st.integers(1, 70), st.integers(1, 500)),
    width=st.integers(1, 40),
    classes=st.integers(2, 100),
    chunk=st.one_of(st.none(), st.integers(1, 5000)),
    ignored=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_value_and_gradients_equal_the_plain_form(rows, width, classes, chunk, ignored, seed):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, width, generator=g).requires_grad_()
    w = torch.randn(classes, width, generator=g).requires_grad_()
    y = torch.randint(classes, (rows,), generator=g)
    y[torch.rand(rows, generator=g) < ignored] = -100
    if (y == -100).all():
        y[0] = 0
    with pytest.MonkeyPatch.context() as patch:
        if chunk is not None:  # else by the kernel, if there is one
            patch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
            patch.setattr(loss_module, "SMALL_CLASSES", 0)
        ours = linear_cross_entropy(h, w, y)
        found = torch.autograd.grad(3 * ours, (h, w))
    plain = F.cross_entropy(h @ w.T, y)
    expected = torch.autograd.grad(3 * plain, (h, w))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def fixed(rows, width, classes):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(rows, width, generator=g).requires_grad_()
    w = torch.randn(classes, width, generator=g).requires_grad_()
    return h, w, torch.randint(classes, (rows,), generator=g)


def test_a_chunk_has_as_many_rows_as_fit_in_whole_passes_of_a_product(monkeypatch):
    h, w, y = fixed(1200, 8, 50)
    rows, inner = [], loss_module.cross_entropy_
    monkeypatch.setattr(loss_module, "SMALL_CLASSES", 0)
    monkeypatch.setattr(
        loss_module, "cross_entropy_", lambda x, *a, **k: rows.append(len(x)) or inner(x, *a, **k)
    )
    cases = {600: [512, 512, 176], 500: [500, 500, 200], 1100: [1024, 176], 1200: [1200]}
    for fit, expected in cases.items():
        rows.clear()
        monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", fit * 50)
        torch.testing.assert_close(linear_cross_entropy(h, w, y), F.cross_entropy(h @ w.T, y))
        assert rows == expected


@needs_compiler
@pytest.mark.parametrize("shape", [(500, 40, 100), (1200, 300, 600), (7, 5, 8000)])
def test_a_small_heads_bits_do_not_depend_on_the_threads(shape, monkeypatch):
    h, w, y = fixed(*shape)
    before, found, calls = torch.get_num_threads(), [], []
    monkeypatch.setattr(loss_module, "SMALL_WIDTH", shape[1])
    monkeypatch.setattr(
        loss_module, "head_loss", lambda *a, **k: calls.append(a) or functions.head_loss(*a, **k)
    )
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            loss = linear_cross_entropy(h, w, y)
            found.append(torch.autograd.grad(loss, (h, w)))
    finally:
        torch.set_num_threads(before)
    assert len(calls) == 3
    exact = F.cross_entropy(h.double() @ w.double().T, y)
    expected = torch.autograd.grad(exact, (h, w))
    for grads in found:
        for a, first, b in zip(grads, found[0], expected, strict=True):
            assert torch.equal(a, first)
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_number_is_seen_in_the_loss_and_both_gradients(bad, side):
    h, w, y = fixed(30, 4, 7)
    with torch.no_grad():
        (h, w)[side][3, 2] = bad
    loss = linear_cross_entropy(h, w, y)
    assert not loss.isfinite()
    assert not any(g.isfinite().all() for g in torch.autograd.grad(loss, (h, w)))


@needs_compiler
def test_a_target_that_is_no_class_is_refused():
    h, w, y = fixed(30, 4, 7)
    y[20] = 7
    with pytest.raises(IndexError, match="not one of the 7 classes"):
        linear_cross_entropy(h, w, y)


@needs_compiler
@pytest.mark.parametrize("small", [True, False])
def test_of_the_targets_below_0_only_one_is_ignored(small, monkeypatch):
    h, w, y = fixed(30, 4, 7)
    monkeypatch.setattr(loss_module, "is_small", lambda *size: small)
    y[3] = -100
    expected = F.cross_entropy(h @ w.T, y)
    torch.testing.assert_close(linear_cross_entropy(h, w, y), expected)
    y[4] = -5
    with pytest.raises(IndexError, match="not one of the 7 classes"):
        linear_cross_entropy(h, w, y)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen):
    h, w, y = fixed(50, 4, 7)
    both = torch.autograd.grad(linear_cross_entropy(h, w, y), (h, w))
    (h, w)[frozen].requires_grad_(False)
    linear_cross_entropy(h, w, y).backward()
    assert (h, w)[frozen].grad is None
    assert torch.equal((h, w)[1 - frozen].grad, both[1 - frozen])


def test_evaluation_gives_the_same_value():
    h, w, y = torch.randn(50, 4), torch.randn(7, 4), torch.randint(7, (50,))
    with torch.inference_mode():
        assert linear_cross_entropy(h, w, y).item() == pytest.approx(
            F.cross_entropy(h @ w.T, y).item(), abs=1e-6
        )


def test_nothing_to_predict_is_a_loss_of_zero():
    h = torch.randn(3, 4, requires_grad=True)
    loss = linear_cross_entropy(h, torch.randn(7, 4), torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(h.grad, torch.zeros(3, 4))


def test_large_logits_do_not_overflow():
    h, w = torch.full((2, 1), 1000.0), torch.tensor([[1.0], [-1.0]])
    assert linear_cross_entropy(h, w, torch.tensor([0, 1])).item() == pytest.approx(1000.0)


def test_under_autocast_it_stays_close():
    torch.manual_seed(0)
    h, w, y = (
        torch.randn(40, 16, requires_grad=True),
        torch.randn(30, 16, requires_grad=True),
        torch.randint(30, (40,)),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = linear_cross_entropy(h, w, y)
    low.backward()
    plain = F.cross_entropy(h @ w.T, y)
    expected = torch.autograd.grad(plain, (h, w))
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(plain.item(), rel=0.02)
    assert torch.allclose(h.grad, expected[0], atol=0.01)
    assert torch.allclose(w.grad, expected[1], atol=0.03)


def test_a_second_backward_is_refused_rather_than_wrong():
    h = torch.randn(3, 4, requires_grad=True)
    loss = linear_cross_entropy(h, torch.randn(7, 4), torch.arange(3))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass only"):
        loss.backward()
