"""Classification as a task of the training loop: encoder, causal, or any converted Hugging Face model."""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from oelm.config import to_mapping
from oelm.data.classification import (
    Buckets,
    Encoding,
    Examples,
    Ids,
    LabelledDataset,
    OwnEncoding,
    in_order,
)
from oelm.data.labelled import DEFAULT, Labelled
from oelm.model.encoder import Encoder
from oelm.train.config import TrainConfig
from oelm.train.parallel import Processes
from oelm.train.task import EVALUATION_SHARE, Batch

log = logging.getLogger(__name__)

# What the labels of the embedded data set mean; every other label is its own name.
MEANINGS = {DEFAULT: {"0": "negative", "1": "positive"}}


class ClassificationTask:
    """Tell the class of a text, or of a pair of texts."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.method = config, config.resolved_method()
        self.checkpoint = None
        if config.hugging_face is not None:
            from oelm.hf.classifier import Checkpoint

            self.checkpoint = Checkpoint.parse(config.hugging_face)
        self.dataset = LabelledDataset(config.dataset, self._encoding())
        self.vocab_size, self.pad = self.dataset.vocab_size, self.dataset.pad
        if self.checkpoint is not None and not self.checkpoint.pretrained:
            # Our texts end in what we pad with; Hugging Face's models never train their padding.
            self.vocab_size, self.pad = self.vocab_size + 1, self.vocab_size
        self.train = self.dataset.examples("train")
        self.buckets = Buckets(self.train.lengths, config.batch_size, config.seeds["data_seed"])

    def _encoding(self) -> Encoding:
        tokenizer = Labelled.parse(self.config.dataset).tokenizer
        if self.checkpoint is None:
            return OwnEncoding(tokenizer, self.config.model_config().seq_len)
        if self.checkpoint.pretrained:
            from oelm.hf.classifier import HubEncoding

            return HubEncoding(self.checkpoint)
        return OwnEncoding(tokenizer, self.checkpoint.length())

    def _report(self) -> None:
        """Say what was cut and what was left out."""
        splits, dropped = self.dataset.meta["splits"], self.dataset.meta["dropped"]
        for split, about in splits.items():
            if about["truncated"]:
                log.info(
                    "%s: %d of %d texts are longer than the model and were cut",
                    split, about["truncated"], about["rows"],
                )  # fmt: skip
        if dropped:
            log.info("%d rows without a text or a label were left out", dropped)
        padding = self.buckets.padding()
        log.info(
            "padding: %.1f %% of tokens, %.1f %% unsorted",
            *(100 * padding[k] for k in ("bucketed", "unsorted")),
        )

    def build(self) -> nn.Module:
        """The classifier of the run."""
        seeds, data = self.config.seeds, self.dataset
        if self.checkpoint is not None:
            about = data.classes, self.vocab_size, self.pad
            return self.checkpoint.build(self.method, *about, seeds, self.config.dropout)
        model = Encoder(
            self.config.model_config(vocab_size=data.vocab_size),
            self.method,
            len(data.classes),
            seeds["init_seed"],
            seeds["frozen_seed"],
            causal=self.config.causal,
        )
        model.checkpoint_activations(self.config.activation_checkpointing)
        return model

    def resolved(self) -> dict[str, Any]:
        """Method, model, seeds and data set in full, with what was cut, left out and padded."""
        self._report()
        data, splits = self.dataset, self.dataset.meta["splits"]
        if self.checkpoint is None:
            model = to_mapping(self.config.model_config(vocab_size=data.vocab_size))
        else:
            model = {"hf": self.config.hugging_face, "vocab_size": self.vocab_size}
        return {
            "method": to_mapping(self.method),
            "model": model,
            "seeds": dict(self.config.seeds),
            "dataset": {
                "name": data.name,
                "path": str(data.path.resolve()),
                "classes": data.classes,
                **{
                    key: {split: about[key] for split, about in splits.items()}
                    for key in ("rows", "tokens", "truncated", "sha256")
                },
                "dropped": data.meta["dropped"],
                "padding": self.buckets.padding(),
                "batches_per_epoch": self.buckets.batches_per_epoch,
            },
        }

    def batches(self, start: int, processes: Processes) -> Iterator[Batch]:
        """Tokens, mask (for a Hugging Face model: parts) and labels of this process's rows."""
        share = self.config.batch_size // processes.world
        mine = slice(processes.rank * share, (processes.rank + 1) * share)
        for t in range(start, self.config.max_steps):
            yield self._batch(self.train, self.buckets.rows(t), processes, mine)

    def _batch(
        self, examples: Examples, rows: Ids, processes: Processes, share: slice = slice(None)
    ) -> Batch:
        tokens, parts, labels = examples.batch(rows, self.pad, share)
        mask = parts > 0 if self.checkpoint is None else parts
        arrays = (torch.from_numpy(array) for array in (tokens, mask, labels))
        return tuple(t.to(processes.device, non_blocking=True) for t in arrays)

    def evaluate(
        self, forward: Callable[..., Tensor], split: str, processes: Processes, *, full: bool
    ) -> dict[str, Any]:
        """Loss, accuracy and macro-F1; over all rows also the confusion matrix and each class's scores."""
        examples = self.dataset.examples(split)
        rows = np.arange(len(examples)) if full else self._stretch(examples)
        batches = in_order(examples.lengths, rows, 2 * self.config.batch_size)
        n = len(self.dataset.classes)
        loss, confusion = (
            torch.zeros((), dtype=torch.float64),
            torch.zeros(n, n, dtype=torch.float64),
        )
        while group := list(itertools.islice(batches, processes.world)):
            # Every process takes part in every round (FSDP needs all), though perhaps for nothing.
            mine = processes.rank < len(group)
            *inputs, labels = self._batch(examples, group[processes.rank if mine else 0], processes)
            logits = forward(*inputs).float()
            if mine:
                loss += nn.functional.cross_entropy(logits, labels, reduction="sum").cpu().double()
                cells = labels * n + logits.argmax(-1)
                confusion += torch.bincount(cells, minlength=n * n).view(n, n).cpu()
        totals = processes.sum(torch.cat([loss[None], confusion.flatten()]))
        meanings = MEANINGS.get(self.dataset.name, {})
        names = [meanings.get(label, label) for label in self.dataset.classes]
        scores = _scores(totals[1:].view(n, n), names)
        tokens = int(examples.lengths[rows].sum())
        result = {
            "loss": float(totals[0]) / len(rows),
            **scores,
            "rows": len(rows),
            "tokens": tokens,
        }
        return (
            result
            if full
            else {k: v for k, v in result.items() if k not in ("confusion", "classes")}
        )

    def _stretch(self, examples: Examples) -> Ids:
        """The rows that are evaluated during training: always the same ones, spread over the split."""
        c = self.config
        if c.eval_tokens is not None:
            wanted = round(c.eval_tokens / float(examples.lengths.mean()))
        else:
            wanted = int(EVALUATION_SHARE * c.eval_interval * c.batch_size)
        count = min(max(wanted, 2 * c.batch_size), len(examples))
        return np.linspace(0, len(examples) - 1, count).astype(np.int64)

    def flops(self, model: nn.Module, batch: Batch) -> float:
        """As torch counts the products of a forward and backward pass over one row, padding included."""
        with FlopCounterMode(display=False) as counter:
            model(*(t[:1] for t in batch)).backward()
        model.zero_grad(set_to_none=True)
        return float(counter.get_total_flops() * len(batch[0]))

    def probe(self, model: nn.Module) -> dict[str, float]:
        """None: the probes are for language models."""
        return {}

    def samples(self, model: nn.Module) -> list[dict[str, str]]:
        """None: a classifier writes nothing."""
        return []

    def where(self) -> str:
        """The batch, as a call that gives it again."""
        seed = self.config.seeds["data_seed"]
        return f"Buckets(…, batch_size={self.config.batch_size}, data_seed={seed}).rows({{step}})"


def _scores(confusion: Tensor, names: list[str]) -> dict[str, Any]:
    """Accuracy, macro-F1 and the table of classes; rows of the confusion matrix are the true classes."""
    right, true, said = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    f1 = 2 * right / (true + said).clamp(min=1)
    table = {
        name: {
            "precision": float(right[i] / said[i].clamp(min=1)),
            "recall": float(right[i] / true[i].clamp(min=1)),
            "f1": float(f1[i]),
            "rows": int(true[i]),
        }
        for i, name in enumerate(names)
    }
    return {
        "accuracy": float(right.sum() / confusion.sum()),
        "macro_f1": float(f1.mean()),
        "confusion": confusion.long().tolist(),
        "classes": table,
    }
