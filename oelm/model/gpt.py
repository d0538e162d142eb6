"""The GPT decoder: loss, logits, and generation with a cache."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oelm.kernels.functions import linear
from oelm.methods import METHODS, Method
from oelm.model.attention import Cache
from oelm.model.config import ModelConfig
from oelm.model.decoder import Decoder
from oelm.model.loss import linear_cross_entropy
from oelm.model.transformer import Transformer

FEW_ROWS = 16  # up to which the decoder was faster than the model


class GPT(Transformer):
    """A causal language model; `model(x, y)` is the mean loss, `model(x)` the logits."""

    def __init__(
        self,
        config: ModelConfig,
        method: Method = METHODS["baseline"],
        seed: int | None = 0,
        frozen_seed: int | None = None,
    ) -> None:
        """Build and fill; `seed=None` leaves the values empty (for counting, or before loading)."""
        super().__init__(config, method, causal=True)
        tied = config.tie_embeddings
        self.head = None if tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        if seed is not None:
            self.init_weights(seed, seed if frozen_seed is None else frozen_seed)

    @property
    def head_weight(self) -> Tensor:
        """The matrix [V, D] that turns hidden states into logits."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] or, given targets (−100 is ignored), the mean loss."""
        h_BTD = self.hidden(tokens_BT)
        if targets_BT is None:
            return linear(h_BTD, self.head_weight)
        return linear_cross_entropy(h_BTD.flatten(0, 1), self.head_weight, targets_BT.flatten())

    @torch.inference_mode()
    def generate(
        self,
        tokens_BT: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        decoder: Decoder | None = None,
    ) -> Iterator[Tensor]:
        """Yield the next token ids [B], one step at a time; temperature 0 takes the likeliest.

        When the window of `seq_len` is full, its later half is read anew and goes on growing. A
        `Decoder(model)` made before spares the time of making one.
        """
        seq_len = self.config.seq_len
        window = tokens_BT[:, -seq_len:]
        cache, start = self._empty_cache(len(window), window.device), 0
        if decoder is None and len(window) <= FEW_ROWS and Decoder.serves(self):
            decoder = Decoder(self)
        for _ in range(max_new_tokens):
            if window.shape[1] > seq_len:
                window = window[:, -(seq_len // 2) :]
                start = 0
            if decoder and window.shape[1] == start + 1:
                logits = decoder.logits(window[:, -1], cache, start)
            else:
                h = self.hidden(window[:, start:], cache=cache, start=start)
                logits = linear(h[:, -1], self.head_weight)
            start = window.shape[1]
            chosen = sample(logits.float(), temperature, top_k, top_p, generator)
            yield chosen
            window = torch.cat([window, chosen[:, None]], dim=1)

    def _empty_cache(self, batch: int, device: torch.device) -> list[Cache]:
        c = self.config
        shape = (batch, c.n_heads, c.seq_len, c.d_head)
        dtype = self.head_weight.dtype
        return [
            {name: torch.empty(shape, device=device, dtype=dtype) for name in ("k", "v")}
            for _ in range(c.n_layers)
        ]


def sample(
    logits_BV: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw ids [B] from the logits, cut to the top k and to the smallest set of mass p."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits = logits_BV / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None:
        ordered, ids = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.scatter(-1, ids, ordered.masked_fill(before >= top_p, float("-inf")))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
