"""What is learned: the model, its batches and its evaluation. The loop knows nothing else of it."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from oelm import probes
from oelm.config import split_spec, to_mapping
from oelm.data.batches import Batches, evaluation_windows
from oelm.data.dataset import Dataset
from oelm.model.gpt import GPT
from oelm.roofline import step_flops
from oelm.train.config import TrainConfig
from oelm.train.parallel import Processes

Batch = tuple[Tensor, ...]
EVALUATION_BATCH = 4096  # tokens at a time, whatever the batch size of training
# Of the tokens trained on in between; forward only, so that it stays under 10 % of the time.
EVALUATION_SHARE = 0.2


class Task(Protocol):
    """`model(*batch)` is the mean loss of a batch; all else is the task's to say."""

    def build(self) -> nn.Module:
        """A fresh model on the CPU, the same for the same seeds."""

    def resolved(self) -> Mapping[str, Any]:
        """What the configuration came to, for `config.yaml` and for refusing to mix runs."""

    def batches(self, start: int, processes: Processes) -> Iterator[Batch]:
        """This process's part of batches `start`, `start + 1`, … to the end of training."""

    def evaluate(
        self, forward: Callable[..., Tensor], split: str, processes: Processes, *, full: bool
    ) -> dict[str, Any]:
        """The split's metrics, `loss` among them; on a fixed stretch unless `full`."""

    def flops(self, model: nn.Module, batch: Batch) -> float:
        """Useful operations of a step on this batch."""

    def probe(self, model: nn.Module) -> dict[str, float]:
        """The numbers of the probes that the run asks for."""

    def samples(self, model: nn.Module) -> list[dict[str, str]]:
        """What the model writes, if it writes."""

    def where(self) -> str:
        """How to find batch `{step}` again, for messages."""


class LanguageTask:
    """Predict the next token of a prepared dataset."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.dataset = Dataset.open(config.dataset)
        spec = config.model
        given = split_spec(spec)[1] if isinstance(spec, str) else spec
        if "vocab_size" in given:
            self.dataset.require_vocabulary(given["vocab_size"])
        self.shape = config.model_config(vocab_size=self.dataset.vocab_size)
        self.method = config.resolved_method()
        self.data = Batches(
            self.dataset.tokens("train"),
            config.batch_size,
            self.shape.seq_len,
            config.seeds["data_seed"],
        )

    def build(self) -> GPT:
        """The GPT of the run."""
        seeds = self.config.seeds
        model = GPT(self.shape, self.method, seeds["init_seed"], seeds["frozen_seed"])
        model.checkpoint_activations(self.config.activation_checkpointing)
        return model

    def resolved(self) -> dict[str, Any]:
        """Method, model, seeds and dataset in full."""
        splits = self.dataset.meta["splits"]
        return {
            "method": to_mapping(self.method),
            "model": to_mapping(self.shape),
            "seeds": dict(self.config.seeds),
            "dataset": {
                "name": self.dataset.name,
                "path": str(self.dataset.path.resolve()),
                "tokens": {split: about["tokens"] for split, about in splits.items()},
                "sha256": {split: about["sha256"] for split, about in splits.items()},
            },
            "evaluation_tokens": self.evaluation_tokens(),
        }

    def batches(self, start: int, processes: Processes) -> Iterator[Batch]:
        """Inputs and targets [batch / processes, seq_len] on the device."""
        stop, cuda = self.config.max_steps, processes.device.type == "cuda"
        for batch in self.data.prefetch(start, stop, processes.rank, processes.world):
            pair = (torch.from_numpy(array) for array in batch)
            yield tuple(
                (t.pin_memory() if cuda else t).to(processes.device, non_blocking=True)
                for t in pair
            )

    def evaluation_tokens(self) -> int:
        """How long the fixed stretch is: by arithmetic, not by the clock, so all arms agree."""
        available = len(self.dataset.tokens("val")) - 1
        if self.config.eval_tokens is not None:
            return min(self.config.eval_tokens, available)
        c = self.config
        trained = c.eval_interval * c.batch_size * self.shape.seq_len
        least = c.batch_size * self.shape.seq_len
        return min(max(least, int(EVALUATION_SHARE * trained)), available)

    def evaluate(
        self, forward: Callable[..., Tensor], split: str, processes: Processes, *, full: bool
    ) -> dict[str, Any]:
        """Loss, perplexity and bits per byte over the tokens in order; no randomness anywhere."""
        tokens = self.dataset.tokens(split)
        limit = None if full else self.evaluation_tokens()
        rows = max(1, EVALUATION_BATCH // self.shape.seq_len)
        windows = evaluation_windows(tokens, self.shape.seq_len, rows, limit)
        losses, counts = [], []
        while group := list(itertools.islice(windows, processes.world)):
            # Every process takes part in every round (FSDP needs all), though perhaps for nothing.
            mine = processes.rank < len(group)
            x, y, n = group[processes.rank if mine else 0]
            losses.append(forward(_on(x, processes.device), _on(y, processes.device)))
            counts.append(n if mine else 0)
        # Collected on the device and added up once, in double precision.
        each, weight = torch.stack(losses).cpu().double(), torch.tensor(counts).double()
        total, count = processes.sum(torch.stack([each @ weight, weight.sum()])).tolist()
        loss = total / count
        bits = loss / math.log(2) * len(tokens) / self.dataset.text_bytes(split)
        ppl = math.exp(min(loss, 700.0))
        return {"loss": loss, "ppl": ppl, "bpb": bits, "tokens": int(count)}

    def flops(self, model: nn.Module, batch: Batch) -> float:
        """By arithmetic: see `oelm/roofline.py`."""
        return step_flops(self.shape, self.method, len(batch[0]))

    def probe(self, model: nn.Module) -> dict[str, float]:
        """In-context copying, attention: see `oelm/probes.py`."""
        assert isinstance(model, GPT)
        return probes.run(model, self.config.probes)

    def samples(
        self, model: nn.Module, prompt_tokens: int = 12, new: int = 64
    ) -> list[dict[str, str]]:
        """Continuations of the first words of three validation documents, the same for every arm."""
        assert isinstance(model, GPT)
        tokenizer = self.dataset.tokenizer()
        generator = torch.Generator().manual_seed(0)
        found = []
        for document in itertools.islice(self.dataset.documents("val"), 3):
            ids = torch.tensor(document[:prompt_tokens].astype(np.int64))[None]
            if ids.numel():
                ids = ids[:, : self.shape.seq_len]
                out = model.generate(ids, new, temperature=0.8, top_k=50, generator=generator)
                text = tokenizer.decode([int(token) for token in out])
                found.append({"prompt": tokenizer.decode(ids[0].tolist()), "text": text})
        return found

    def where(self) -> str:
        """The batch, as a call that gives it again."""
        return f"Batches(…, data_seed={self.config.seeds['data_seed']}).batch({{step}})"


def _on(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
