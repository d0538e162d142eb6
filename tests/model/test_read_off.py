import pytest
import torch

from oelm import Encoder, ModelConfig, method


@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
@pytest.mark.parametrize("causal", [False, True])
def test_computing_one_position_in_the_last_block_changes_nothing(positions, causal):
    shape = ModelConfig.preset(
        "nano",
        n_layers=2,
        d_model=32,
        d_ff=64,
        seq_len=24,
        vocab_size=97,
        positions=positions,
        qk_norm=True,
    )
    model = Encoder(shape, method("oelm_gain"), 3, causal=causal)
    for block in model.blocks:
        if block.attention.relative_bias is not None:
            torch.nn.init.normal_(block.attention.relative_bias)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(97, (5, 20), generator=generator)
    lengths = torch.tensor([20, 3, 11, 1, 8])
    mask = torch.arange(20) < lengths[:, None]

    found = model(tokens, mask)
    every = model.hidden(tokens, mask=None if causal else mask)
    read = every[torch.arange(5), lengths - 1] if causal else every[:, 0]
    expected = model.classifier(torch.tanh(model.pooler(read)))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)

    parameters = list(model.parameters())
    ours, theirs = (
        torch.autograd.grad(logits.square().sum(), parameters, materialize_grads=True)
        for logits in (found, expected)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_activation_checkpointing_gives_the_same_gradients():
    shape = ModelConfig.preset("nano", n_layers=2, d_model=32, d_ff=64, seq_len=24, vocab_size=97)
    model = Encoder(shape, method("oelm_v2"), 3).train()
    tokens, labels = torch.arange(40).view(2, 20), torch.tensor([0, 2])
    mask = torch.ones(2, 20, dtype=torch.bool)
    grads = []
    for on in (False, True):
        model.checkpoint_activations(on)
        model.zero_grad()
        model(tokens, mask, labels).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *grads))
