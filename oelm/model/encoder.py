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
        # Padding stands behind the text, where a causal model never looks: no mask, faster attention.
        h_BTD = self.hidden(tokens_BT, mask=None if self.causal else mask_BT)
        if self.causal:
            last = mask_BT.sum(1) - 1
            h_BD = h_BTD[torch.arange(len(h_BTD), device=h_BTD.device), last]
        else:
            h_BD = h_BTD[:, 0]
        h_BD = torch.tanh(self.pooler(h_BD))
        logits: Tensor = self.classifier(F.dropout(h_BD, self.config.dropout, self.training))
        return logits if labels_B is None else F.cross_entropy(logits.float(), labels_B)
