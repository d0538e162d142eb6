import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm import GPT, ModelConfig, method
from oelm.model import causal
from oelm.model.causal import causal_attention, worthwhile


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(1, 200),
    width=st.integers(1, 16),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_value_and_gradients_equal_torchs(batch, heads, length, width, seed):
    g = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(batch, length, heads, width, generator=g).transpose(1, 2) for _ in range(3)]
    seen = torch.randn(batch, heads, length, width, generator=g)
    results = []
    for attend in (causal_attention, lambda *t: F.scaled_dot_product_attention(*t, is_causal=True)):
        inputs = [t.detach().requires_grad_() for t in qkv]
        y = attend(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, seen)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_the_model_is_the_same_either_way(monkeypatch):
    config = ModelConfig.preset("nano", n_layers=2)
    x = torch.randint(2048, (2, 129), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for kept in (causal.KEPT_BYTES, 0):
        monkeypatch.setattr(causal, "KEPT_BYTES", kept)
        model = GPT(config, method("oelm_v2"))
        assert worthwhile(torch.empty(2, 4, 128, 32)) == (kept > 0)
        loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_a_long_sequence_goes_to_torchs_kernel():
    assert not worthwhile(torch.empty(1, 12, 8192, 64, device="meta"))
    assert not worthwhile(torch.empty(1, 12, 8192, 64))
    assert not worthwhile(torch.empty(1, 4, 32, 8))
