"""What a person with a CUDA device runs (`make test-gpu`) to check the paths that need one."""

import pytest
import torch

from oelm import GPT, ModelConfig, method
from oelm.methods import METHODS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
X = torch.randint(2048, (2, 65), generator=torch.Generator().manual_seed(0))


def loss_and_gradients(model, device):
    model = model.to(device)
    x = X.to(device)
    loss = model(x[:, :-1], x[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad.cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
def test_a_gpu_computes_what_the_processor_does(spec, positions):
    config = ModelConfig.preset("nano", n_layers=2, positions=positions)
    here, gradients = loss_and_gradients(GPT(config, method(spec)), "cpu")
    there, others = loss_and_gradients(GPT(config, method(spec)), "cuda")
    assert there == pytest.approx(here, rel=1e-3)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=2e-4, rtol=2e-2)


def test_mixed_precision_stays_close():
    model = GPT(ModelConfig.preset("nano"), method("oelm_v2")).cuda()
    x = X.cuda()
    exact = model(x[:, :-1], x[:, 1:]).item()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x[:, :-1], x[:, 1:])
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=1e-2)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_generation_on_a_gpu_equals_that_on_the_processor():
    model = GPT(ModelConfig.preset("nano"), method("oelm_v2")).eval()
    prompt = X[:, :8]
    here = torch.stack(list(model.generate(prompt, 8, temperature=0)))
    there = torch.stack(list(model.cuda().generate(prompt.cuda(), 8, temperature=0))).cpu()
    assert torch.equal(here, there)
