import math

import pytest
import torch

from oelm import GPT, ModelConfig, method
from oelm.probes import SEQUENCES, run

TINY = ModelConfig.preset(
    "nano", n_layers=2, d_model=32, n_heads=4, d_ff=64, seq_len=16, vocab_size=50
)


def test_a_fresh_model_copies_nothing():
    found = run(GPT(TINY), ("induction",))
    assert found["induction_accuracy"] < 0.1
    assert abs(found["induction_gain"]) < 0.3


def test_a_model_that_copies_is_seen_to():
    class Copier(GPT):
        """Answers with the token that followed this one's last occurrence, as an induction head does."""

        def hidden(self, tokens, *args, **kwargs):
            h = torch.zeros(*tokens.shape, 64)
            for b, row in enumerate(tokens.tolist()):
                for t in range(len(row)):
                    before = [s for s in range(t) if row[s] == row[t]]
                    if before:
                        h[b, t, row[before[-1] + 1]] = 50.0
            return h

    config = ModelConfig.from_spec(TINY, d_model=64, vocab_size=50)
    model = Copier(config)
    with torch.no_grad():
        model.token_embedding.weight.copy_(torch.eye(50, 64))
    found = run(model, ("induction",))
    assert found["induction_accuracy"] > 0.8  # a token that occurs twice in a half can mislead it
    assert found["induction_gain"] > 1


def test_even_attention_has_entropy_one_and_no_spread():
    model = GPT(TINY)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q.weight.zero_()
    found = run(model, ("attention",))
    assert found["attention_entropy_0"] == pytest.approx(1, abs=1e-5)
    assert found["logit_std_1"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
def test_entropy_is_that_of_the_weights(positions):
    config = ModelConfig.from_spec(TINY, positions=positions, n_layers=1)
    model = GPT(config, method("oelm_v2")).eval()
    with torch.no_grad():
        if positions == "relative":
            model.blocks[0].attention.relative_bias.normal_()
    found = run(model, ("attention",))
    attention, length = model.blocks[0].attention, 16
    tokens = torch.randint(50, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        x = model.token_embedding(tokens)
        if positions == "learned":
            x = x + model.position_embedding.weight
        rotation = (model.cos, model.sin) if positions == "rope" else None
        q, k = attention.queries_and_keys(model.blocks[0].attention_norm(x), rotation)
        total = n = 0
        for t in range(length // 4, length):
            logits = (q[:, :, t, None] * k[:, :, : t + 1]).sum(-1) / math.sqrt(8)
            if positions == "relative":
                logits = logits + attention.relative_bias[:, torch.arange(t, -1, -1)]
            p = logits.softmax(-1)
            total += (-(p * p.log()).sum(-1) / math.log(t + 1)).sum().item()
            n += p.shape[0] * p.shape[1]
    assert found["attention_entropy_0"] == pytest.approx(total / n, abs=1e-5)


def test_probes_leave_the_model_and_the_random_state_alone():
    model = GPT(ModelConfig.from_spec(TINY, dropout=0.5)).train()
    state = torch.get_rng_state()
    a, b = run(model, ("induction", "attention")), run(model, ("induction", "attention"))
    assert a == b
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert not model.blocks[0].attention._forward_pre_hooks
