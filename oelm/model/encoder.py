"""A classifier on the shared trunk: BERT-like and bidirectional, or causal as our GPT is."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.methods import METHODS, Method
from oelm.model.config import ModelConfig
from oelm.model.transformer import Transformer


class Encoder(Transformer):
    """Token sequences → classes, read off the first token (bidirectional) or the last (causal)."""

    def __init__(
        self,
        config: ModelConfig,
        method: Method = METHODS["baseline"],
        n_classes: int = 2,
        seed: int | None = 0,
        frozen_seed: int | None = None,
        *,
        causal: bool = False,
    ) -> None:
        super().__init__(config, method, causal=causal)
        self.causal = causal
        self.pooler = nn.Linear(config.d_model, config.d_model)
        self.classifier = nn.Linear(config.d_model, n_classes)
        if seed is not None:
            self.init_weights(seed, seed if frozen_seed is None else frozen_seed)

    def forward(self, tokens_BT: Tensor, mask_BT: Tensor, labels_B: Tensor | None = None) -> Tensor:
        """Logits [B, n_classes] or, given labels, the mean loss; the mask is True at real tokens."""
        # Padding stands behind the text, where a causal model never looks: no mask is needed.
        mask = None if self.causal else mask_BT
        at_B = (
            mask_BT.sum(1) - 1 if self.causal else torch.zeros_like(mask_BT[:, 0], dtype=torch.long)
        )
        h_BD = self.hidden(tokens_BT, mask=mask, at_B=at_B)[:, 0]
        h_BD = torch.tanh(self.pooler(h_BD))
        logits: Tensor = self.classifier(F.dropout(h_BD, self.config.dropout, self.training))
        return logits if labels_B is None else F.cross_entropy(logits.float(), labels_B)
