"""The same GPT by others, from the same weights, each at its best settings: fused AdamW, SDPA.

Every maker takes our freshly made baseline and returns the peer's model, with our values in it, and a
function of (inputs, targets) that gives the loss. Where a peer has biases that ours has not, they start
at zero, so that all begin from the same loss.
"""

import torch
import torch.nn.functional as F
from torch import nn


def hugging_face(ours):
    """GPT2LMHeadModel with SDPA."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = ours.config
    config = GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.seq_len, n_embd=c.d_model, n_layer=c.n_layers,
        n_head=c.n_heads, n_inner=c.d_ff, activation_function="gelu_new" if tanh(c) else "gelu",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_implementation="sdpa", use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    body = model.transformer
    values = [
        (body.wte.weight, ours.token_embedding.weight),
        (body.wpe.weight, ours.position_embedding.weight),
    ]
    for theirs, block in zip(body.h, ours.blocks, strict=True):
        a, mlp = block.attention, block.mlp
        # Their matrices are [in, out].
        values += [
            (theirs.attn.c_attn.weight, torch.cat([a.q.weight, a.k.weight, a.v.weight]).T),
            (theirs.attn.c_proj.weight, a.o.weight.T),
            (theirs.mlp.c_fc.weight, mlp.up.weight.T),
            (theirs.mlp.c_proj.weight, mlp.down.weight.T),
        ]
    _fill(values)

    def loss(x, y):
        # `labels` would be shifted once more than ours.
        return model(input_ids=x, labels=y, shift_labels=y).loss

    return model, loss


class TorchGPT(nn.Module):
    """A decoder of torch's own parts, with the chunked loss that torch ships."""

    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Embedding(c.seq_len, c.d_model)
        layer = nn.TransformerEncoderLayer(
            c.d_model, c.n_heads, c.d_ff, dropout=0.0, activation=nn.GELU("tanh" if tanh(c) else "none"),
            batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.TransformerEncoder(
            layer, c.n_layers, norm=nn.LayerNorm(c.d_model), enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(c.seq_len)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x, y):  # noqa: D102
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        h = self.layers(h, mask=self.mask, is_causal=True)
        return F.linear_cross_entropy(h.flatten(0, 1), self.tokens.weight, y.flatten())


def torch_encoder(ours):
    """`nn.TransformerEncoder` under a causal mask."""
    model = TorchGPT(ours.config).train()
    values = [
        (model.tokens.weight, ours.token_embedding.weight),
        (model.positions.weight, ours.position_embedding.weight),
    ]
    for theirs, block in zip(model.layers.layers, ours.blocks, strict=True):
        a, mlp = block.attention, block.mlp
        values += [
            (theirs.self_attn.in_proj_weight, torch.cat([a.q.weight, a.k.weight, a.v.weight])),
            (theirs.self_attn.out_proj.weight, a.o.weight),
            (theirs.linear1.weight, mlp.up.weight),
            (theirs.linear2.weight, mlp.down.weight),
        ]
    _fill(values)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model, model


def x_transformers(ours):
    """x-transformers with its flash attention; its norms have no bias."""
    from x_transformers import Decoder, TransformerWrapper

    c = ours.config
    layers = Decoder(
        dim=c.d_model, depth=c.n_layers, heads=c.n_heads, attn_dim_head=c.d_head, attn_flash=True,
        ff_mult=c.d_ff / c.d_model,
    )  # fmt: skip
    model = TransformerWrapper(
        num_tokens=c.vocab_size, max_seq_len=c.seq_len, tie_embedding=True, attn_layers=layers
    ).train()
    values = [
        (model.token_emb.emb.weight, ours.token_embedding.weight),
        # Theirs is divided by √d when it is read.
        (model.pos_emb.emb.weight, ours.position_embedding.weight * c.d_model**0.5),
    ]
    for i, block in enumerate(ours.blocks):
        attention, mlp = layers.layers[2 * i][1], layers.layers[2 * i + 1][1]
        a = block.attention
        values += [
            (attention.to_q.weight, a.q.weight),
            (attention.to_k.weight, a.k.weight),
            (attention.to_v.weight, a.v.weight),
            (attention.to_out.weight, a.o.weight),
            (mlp.ff[0][0].weight, block.mlp.up.weight),
            (mlp.ff[2].weight, block.mlp.down.weight),
        ]
        for bias in (mlp.ff[0][0].bias, mlp.ff[2].bias):
            nn.init.zeros_(bias)
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.approximate = "tanh" if tanh(c) else "none"
    _fill(values)

    def loss(x, y):
        h = model(x, return_embeddings=True)
        return F.linear_cross_entropy(h.flatten(0, 1), model.token_emb.emb.weight, y.flatten())

    return model, loss


def tanh(c):
    return c.activation == "gelu_tanh"


def _fill(values):
    with torch.no_grad():
        for theirs, own in values:
            theirs.copy_(own)
