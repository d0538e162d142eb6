import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from oelm import GPT, ModelConfig, method
from oelm.config import to_mapping
from oelm.errors import UserError
from oelm.freezing import count, hashes, roles
from oelm.hf import OelmConfig, OelmForCausalLM

TOKENS = torch.randint(97, (3, 20), generator=torch.Generator().manual_seed(0))
VARIANTS = [
    ("oelm_v2", {}),
    ("identity_lowrank", {"positions": "rope", "qk_norm": True, "tie_embeddings": False}),
    ("oelm_v2,kernel=true", {}),
    ("oelm_gain", {"positions": "relative", "norm": "rmsnorm", "activation": "swiglu"}),
]


@pytest.fixture(params=VARIANTS, ids=lambda v: v[0])
def pair(request, tmp_path):
    """Our GPT, and what AutoModel makes of the folder that it was saved to."""
    name, changes = request.param
    shape = ModelConfig.preset(
        "nano", d_model=32, n_layers=2, d_ff=64, vocab_size=97, seq_len=48, **changes
    )
    ours = GPT(shape, method(name), seed=1).eval()
    with torch.no_grad():  # kernels start at 0, where nothing could be seen of them
        for parameter_name, parameter in ours.named_parameters():
            if "kernel" in parameter_name:
                parameter.normal_(generator=torch.Generator().manual_seed(2))
    config = OelmConfig(shape=to_mapping(shape), method=to_mapping(ours.method))
    model = OelmForCausalLM(config)
    model.gpt.load_state_dict(ours.state_dict())
    model.save_pretrained(tmp_path)
    return ours, AutoModelForCausalLM.from_pretrained(tmp_path).eval()


def test_the_same_logits_loss_and_freezing(pair):
    ours, theirs = pair
    assert isinstance(theirs, OelmForCausalLM)
    with torch.no_grad():
        out = theirs(TOKENS, labels=TOKENS)
        torch.testing.assert_close(out.logits, ours(TOKENS), atol=1e-5, rtol=0)
        torch.testing.assert_close(out.loss, ours(TOKENS[:, :-1], TOKENS[:, 1:]), atol=1e-5, rtol=0)
    assert {n.removeprefix("gpt."): h for n, h in hashes(theirs).items()} == hashes(ours)
    assert {n.removeprefix("gpt."): r for n, r in roles(theirs).items()} == roles(ours)
    assert count(theirs)["frozen"] == count(ours)["frozen"]


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_is_ours_greedily(pair, use_cache):
    ours, theirs = pair
    expected = torch.stack(list(ours.generate(TOKENS, 25, temperature=0)), dim=1)
    mask = torch.ones_like(TOKENS)
    found = theirs.generate(
        TOKENS, attention_mask=mask, max_new_tokens=25, do_sample=False, use_cache=use_cache
    )
    assert torch.equal(found[:, 20:], expected)


def test_a_trainer_averages_over_what_it_accumulates(pair, tmp_path):
    args = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, report_to=[])
    assert not Trainer(model=pair[1], args=args).model_accepts_loss_kwargs


def test_a_padded_row_gets_what_it_gets_alone(pair):
    _, theirs = pair
    short = TOKENS[:1, :12]
    padding = torch.zeros(1, 8, dtype=torch.long)
    tokens = torch.cat([torch.cat([padding, short], 1), TOKENS[1:2]])
    mask = torch.cat([torch.cat([padding, torch.ones_like(short)], 1), torch.ones(1, 20).long()])
    with torch.no_grad():
        together = theirs(tokens, attention_mask=mask).logits[0, 8:]
        torch.testing.assert_close(together, theirs(short).logits[0], atol=1e-5, rtol=0)
    alone = theirs.generate(
        short, attention_mask=torch.ones_like(short), max_new_tokens=20, do_sample=False
    )
    found = theirs.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(found[0, 20:], alone[0, 12:])


def test_beams_use_the_cache(pair):
    _, theirs = pair
    mask = torch.ones_like(TOKENS)
    found = [
        theirs.generate(
            TOKENS,
            attention_mask=mask,
            max_new_tokens=8,
            num_beams=3,
            do_sample=False,
            use_cache=cached,
        )
        for cached in (True, False)
    ]
    assert torch.equal(*found)


def test_only_the_last_logits(pair):
    _, theirs = pair
    with torch.no_grad():
        whole = theirs(TOKENS).logits
        assert torch.equal(theirs(TOKENS, logits_to_keep=2).logits, whole[:, -2:])


def test_too_many_tokens_are_refused(pair):
    _, theirs = pair
    with pytest.raises(UserError, match="49 tokens do not fit the model's seq_len of 48"):
        theirs.generate(
            TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=60, do_sample=False
        )


def test_generic_fields_of_the_config(pair, tmp_path):
    _, theirs = pair
    theirs.config.save_pretrained(tmp_path / "c")
    config = AutoConfig.from_pretrained(tmp_path / "c")
    found = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    assert (*found, config.vocab_size, config.max_position_embeddings) == (32, 2, 4, 97, 48)
