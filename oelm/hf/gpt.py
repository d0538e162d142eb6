"""Our GPT as a Hugging Face model: the same weights and logits, with its caches, `generate` and tools."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from oelm.config import from_mapping, to_mapping
from oelm.errors import UserError
from oelm.methods import METHODS, Method
from oelm.model.attention import rotation_table
from oelm.model.config import ModelConfig
from oelm.model.gpt import GPT
from oelm.model.loss import linear_cross_entropy


class OelmConfig(PreTrainedConfig):
    """`shape` and `method` are ours in full; the other fields are what generic tools look for."""

    model_type = "oelm"

    def __init__(
        self,
        shape: dict[str, Any] | None = None,
        method: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        found = from_mapping(ModelConfig, shape or {}, what="config.json: shape")
        self.shape = to_mapping(found)
        self.method = method or to_mapping(METHODS["baseline"])
        self.vocab_size, self.hidden_size = found.vocab_size, found.d_model
        self.num_hidden_layers, self.num_attention_heads = found.n_layers, found.n_heads
        self.max_position_embeddings = found.seq_len
        # With tied embeddings our GPT has no second matrix, so there is nothing to tie here.
        super().__init__(**{**kwargs, "tie_word_embeddings": False})


class OelmForCausalLM(PreTrainedModel, GenerationMixin):
    """`GPT` inside; positions and masks may differ from row to row, as padded batches need."""

    config_class = OelmConfig
    base_model_prefix = "gpt"
    _supports_sdpa = True
    main_input_name = "input_ids"
    accepts_loss_kwargs = (
        False  # the loss is a mean over its own batch: `Trainer` must average them
    )

    def __init__(self, config: OelmConfig) -> None:
        super().__init__(config)
        shape = from_mapping(ModelConfig, config.shape or {}, what="config.json: shape")
        chosen = from_mapping(Method, config.method or {}, what="config.json: method")
        self.gpt = GPT(shape, chosen, seed=None)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are always loaded; what is not stored, the table of rotations, is made here."""
        if isinstance(module, GPT) and module.turns:
            c = module.config
            cos, sin = rotation_table(c.seq_len, c.d_head, c.rope_theta)
            module.cos.copy_(cos)
            module.sin.copy_(sin)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.gpt.token_embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V] and, given labels (shifted here, −100 ignored), the mean loss."""
        T = input_ids.shape[1]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        padded = attention_mask is not None and not bool(attention_mask.all())
        if position_ids is None:
            if padded and attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]
            else:
                position_ids = torch.arange(start, start + T, device=input_ids.device)[None]
        if start + T > self.gpt.config.seq_len:
            raise UserError(
                f"{start + T} tokens do not fit the model's seq_len of {self.gpt.config.seq_len}; "
                "shorten the prompt or max_new_tokens"
            )
        mask = attention_mask.bool() if padded and attention_mask is not None else None
        h_BTD = self._hidden(input_ids, position_ids, mask, past_key_values, start)

        loss = None
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=-100).to(h_BTD.device)
            loss = linear_cross_entropy(
                h_BTD.flatten(0, 1), self.gpt.head_weight, targets.flatten()
            )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = F.linear(h_BTD[:, kept], self.gpt.head_weight)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None,
        past: Cache | None,
        start: int,
    ) -> Tensor:
        """`GPT.hidden`, with positions of each row's own."""
        gpt, T = self.gpt, tokens_BT.shape[1]
        x_BTD = gpt.token_embedding(tokens_BT)
        if gpt.position_embedding is not None:
            x_BTD = x_BTD + gpt.position_embedding(positions_BT)
        x_BTD = F.dropout(x_BTD, gpt.config.dropout, self.training)
        rotation = None
        if gpt.turns:
            rotation = gpt.cos[positions_BT][:, None], gpt.sin[positions_BT][:, None]
        for i, block in enumerate(gpt.blocks):
            cache = None if past is None else self._layer_cache(past, i, x_BTD, start)
            x_BTD = block(x_BTD, rotation, mask, cache, start)
            if mask is not None:
                # Left padding sees no key at all; whatever that gives must not spread.
                x_BTD = torch.where(mask[:, -T:, None], x_BTD, 0.0)
            if past is not None and cache is not None:
                past.update(cache["k"][:, :, start:], cache["v"][:, :, start:], i)
        h: Tensor = gpt.final_norm(x_BTD)
        return h

    def _layer_cache(self, past: Cache, layer: int, x_BTD: Tensor, start: int) -> dict[str, Tensor]:
        """Keys and values so far, with room for the new ones."""
        B, T, _ = x_BTD.shape
        config = self.gpt.config
        room = {name: x_BTD.new_empty(B, config.n_heads, start + T, config.d_head) for name in "kv"}
        if start:
            room["k"][:, :, :start] = past.layers[layer].keys
            room["v"][:, :, :start] = past.layers[layer].values
        return room


AutoConfig.register("oelm", OelmConfig)
AutoModelForCausalLM.register(OelmConfig, OelmForCausalLM)
