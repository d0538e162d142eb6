import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.model import loss as loss_module
from oelm.model.loss import linear_cross_entropy


@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 24),
    classes=st.integers(2, 60),
    chunk=st.integers(1, 5000),
    ignored=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_value_and_gradients_equal_the_plain_form(rows, width, classes, chunk, ignored, seed):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, width, generator=g).requires_grad_()
    w = torch.randn(classes, width, generator=g).requires_grad_()
    y = torch.randint(classes, (rows,), generator=g)
    y[torch.rand(rows, generator=g) < ignored] = -100
    if (y == -100).all():
        y[0] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
        ours = linear_cross_entropy(h, w, y)
        found = torch.autograd.grad(3 * ours, (h, w))
    plain = F.cross_entropy(h @ w.T, y)
    expected = torch.autograd.grad(3 * plain, (h, w))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_frozen_side_gets_no_gradient():
    h, w, y = torch.randn(5, 4), torch.randn(7, 4), torch.arange(5)
    h.requires_grad_()
    linear_cross_entropy(h, w, y).backward()
    assert h.grad is not None
    assert w.grad is None


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
