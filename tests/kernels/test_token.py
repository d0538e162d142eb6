"""The next token in one call against the model itself, in float64."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm import GPT, ModelConfig
from oelm.methods import METHODS, method
from oelm.model.decoder import Decoder
from tests.kernels import needs_compiler

pytestmark = needs_compiler
POSITIONS = 20


def model_of(name, seed, **options):
    small = {"n_layers": 2, "d_model": 48, "n_heads": 2, "d_ff": 80, "vocab_size": 37}
    model = GPT(ModelConfig(seq_len=POSITIONS, **small, **options), method(name), seed).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


@settings(deadline=None, max_examples=120)
@given(
    name=st.sampled_from(sorted(METHODS)), B=st.integers(1, 5), at=st.integers(1, POSITIONS - 1),
    threads=st.integers(1, 3), seed=st.integers(0, 10**6),
    positions=st.sampled_from(["learned", "rope", "relative"]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]), qk_norm=st.booleans(),
    activation=st.sampled_from(["gelu", "gelu_tanh", "swiglu"]), attention_bias=st.booleans(),
    mlp_bias=st.booleans(), tie_embeddings=st.booleans(),
)  # fmt: skip
@torch.no_grad()
def test_the_next_tokens_logits_are_the_models(name, B, at, threads, seed, **options):
    model = model_of(name, seed, **options)
    tokens = torch.randint(37, (B, at + 1), generator=torch.Generator().manual_seed(seed))
    caches, before = model._empty_cache(B, tokens.device), torch.get_num_threads()
    model.hidden(tokens[:, :at], cache=caches)
    assert Decoder.serves(model)
    try:
        torch.set_num_threads(threads)
        found = Decoder(model).logits(tokens[:, at], caches, at)
    finally:
        torch.set_num_threads(before)
    expected = copy.deepcopy(model).double()(tokens)[:, -1]
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * scale)
