import pytest
import torch
import transformers

from oelm import method
from oelm.errors import UserError
from oelm.freezing import count
from oelm.hf import import_gpt2


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=60,
        n_positions=24,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at 0, which would hide a mistake
            parameter.normal_(std=0.2)
    return model


TOKENS = torch.randint(60, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "spec", ["baseline", "oelm_v2,qk.init=keep", "qk_ffn,qk.init=keep,up.init=keep,down.init=keep"]
)
def test_logits_equal_those_of_the_checkpoint(gpt2, spec):
    ours = import_gpt2(gpt2, spec).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), gpt2(TOKENS).logits, atol=1e-4, rtol=0)


def test_freezing_some_heads_keeps_the_logits_too(gpt2):
    spec = "baseline,qk.init=keep,qk.trains=ratio,qk.freeze_ratio=0.5,qk.ratio_of=heads"
    ours = import_gpt2(gpt2, spec).eval()
    assert count(ours)["frozen"] == 2 * 2 * 16 * 32
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), gpt2(TOKENS).logits, atol=1e-4, rtol=0)


def test_from_a_folder_with_another_q_and_k(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    ours = import_gpt2(tmp_path, "oelm_v2", seed=3)
    q, v = ours.blocks[0].attention.q, ours.blocks[0].attention.v
    head = q.weight[:8]
    torch.testing.assert_close(head @ head.T, torch.eye(8), atol=1e-6, rtol=0)
    assert not q.bias.any()
    assert torch.equal(v.weight, gpt2.transformer.h[0].attn.c_attn.weight[:, 64:].T)
    assert ours.method == method("oelm_v2")


def test_an_untied_head(tmp_path):
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=60, n_positions=24, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=1, activation_function="gelu",
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = import_gpt2(theirs).eval()
    assert not ours.config.tie_embeddings
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"activation_function": "relu"}, "activation 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
    ],
)
def test_variants_that_compute_something_else_are_refused(change, match):
    fields = {
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "vocab_size": 60,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields, **change))
    with pytest.raises(UserError, match=match):
        import_gpt2(model)
