import pytest
import torch

from oelm import Encoder, ModelConfig, method
from oelm.freezing import count
from oelm.model.attention import Attention

TINY = ModelConfig.preset(
    "nano", n_layers=2, d_model=32, n_heads=4, d_ff=64, seq_len=16, vocab_size=50
)


def batch():
    tokens = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12) < torch.tensor([12, 7, 1])[:, None]
    return tokens, mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
def test_padding_changes_nothing(causal, positions):
    config = ModelConfig.from_spec(TINY, positions=positions)
    model = Encoder(config, method("oelm_v2"), n_classes=3, causal=causal).eval()
    tokens, mask = batch()
    logits = model(tokens, mask)
    assert logits.shape == (3, 3)
    padded_otherwise = torch.where(mask, tokens, 49)
    assert torch.allclose(logits, model(padded_otherwise, mask), atol=1e-6)
    alone = model(tokens[1:2, :7], mask[1:2, :7])
    assert torch.allclose(logits[1:2], alone, atol=1e-5)


def test_it_reads_both_ways_unless_causal():
    tokens, mask = batch()
    changed = tokens.clone()
    changed[0, 11] = (changed[0, 11] + 1) % 50
    model = Encoder(TINY, n_classes=3).eval()
    h, other = model.hidden(tokens, mask), model.hidden(changed, mask)
    assert not torch.allclose(h[0, 0], other[0, 0], atol=1e-6)


def test_the_loss_is_the_cross_entropy():
    tokens, mask = batch()
    model = Encoder(TINY, n_classes=3).eval()
    labels = torch.tensor([0, 2, 1])
    expected = torch.nn.functional.cross_entropy(model(tokens, mask), labels)
    assert model(tokens, mask, labels).item() == pytest.approx(expected.item())


def test_it_shares_the_attention_and_freezes_alike():
    model = Encoder(TINY, method("oelm_v2"), n_classes=3)
    assert isinstance(model.blocks[0].attention, Attention)
    assert count(model)["frozen"] == 2 * 2 * 32 * 32
