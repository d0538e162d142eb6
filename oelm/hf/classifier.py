"""A Hugging Face classifier under a method, from a pretrained checkpoint or from scratch."""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from oelm.config import split_spec
from oelm.data.labelled import Row
from oelm.errors import UserError, unknown
from oelm.hf.convert import convert
from oelm.methods import Method

# What the rates of dropout are called in the configurations of the families.
DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout",
    "seq_classif_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout_rate",
)  # fmt: skip
# These count positions from behind the id of their padding token.
OFFSET = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl")


@dataclass(frozen=True)
class Checkpoint:
    """`hf:bert-base-uncased,max_length=128`: a folder or hub name, or an architecture to start anew.

    An architecture (`hf:bert,hidden_size=128,num_hidden_layers=2`) takes fields of its config.
    """

    name: str
    fields: dict[str, Any]
    max_length: int | None

    @staticmethod
    def parse(spec: str) -> "Checkpoint":
        """From the text after `hf:`."""
        name, fields = split_spec(spec)
        length = fields.pop("max_length", None)
        if length is not None and not isinstance(length, int):
            raise UserError(f"hf:{name}: max_length must be a number, not {length!r}")
        found = Checkpoint(name, fields, length)
        if fields and found.pretrained:
            raise UserError(
                f"hf:{name} is pretrained, so {', '.join(fields)} cannot be changed; "
                "max_length=N is the one field it takes"
            )
        if fields:
            known = vars(AutoConfig.for_model(name))
            for field in fields:
                if field not in known:
                    raise unknown(f"field of hf:{name}", field, known)
        return found

    @property
    def pretrained(self) -> bool:
        """Whether weights are loaded; not for the bare name of an architecture."""
        return self.name not in CONFIG_MAPPING_NAMES

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The configuration with our number of classes, vocabulary and so on."""
        if not self.pretrained:
            return AutoConfig.for_model(self.name, **{**self.fields, **changes})
        try:
            return AutoConfig.from_pretrained(self.name, **changes)
        except (OSError, ValueError) as error:
            raise _unreadable(self.name, error) from None

    def length(self) -> int:
        """Where texts are cut: as asked, or at what the model has positions for."""
        config = self.config()
        limit = getattr(config, "max_position_embeddings", None) or 512
        if config.model_type in OFFSET and self.pretrained:
            limit -= config.pad_token_id + 1
        if self.max_length is not None and not 8 <= self.max_length <= limit:
            raise UserError(
                f"hf:{self.name}: max_length must be 8 to {limit}, not {self.max_length}"
            )
        return self.max_length or limit

    def build(
        self,
        method: Method,
        classes: Sequence[str],
        vocab_size: int,
        pad: int,
        seeds: Mapping[str, int],
        dropout: float,
    ) -> "HubClassifier":
        """The converted model; what is not loaded is drawn from the seeds."""
        changes: dict[str, Any] = {
            "id2label": dict(enumerate(classes)),
            "label2id": {name: i for i, name in enumerate(classes)},
        }
        if not self.pretrained:
            changes |= {"vocab_size": vocab_size, "pad_token_id": pad}
            if self.name in OFFSET:
                changes["max_position_embeddings"] = self.length() + pad + 1
        config = self.config(**changes)
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, dropout)
        if config.pad_token_id is None:
            config.pad_token_id = pad
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds["init_seed"])
            if self.pretrained:
                model = AutoModelForSequenceClassification.from_pretrained(
                    self.name, config=config, ignore_mismatched_sizes=True, dtype=torch.float32
                )
            else:
                model = AutoModelForSequenceClassification.from_config(config)
        convert(model, method, seed=seeds["init_seed"], frozen_seed=seeds["frozen_seed"])
        return HubClassifier(model)


class HubClassifier(nn.Module):
    """`model(tokens, parts)` → logits, `model(tokens, parts, labels)` → loss, as our encoder has it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self.typed = takes_types and getattr(model.config, "type_vocab_size", 0) > 1

    def forward(
        self, tokens_BT: Tensor, parts_BT: Tensor, labels_B: Tensor | None = None
    ) -> Tensor:
        """Parts are 0 at padding, 1 in the first text and 2 in the second."""
        types = {"token_type_ids": (parts_BT == 2).long()} if self.typed else {}
        out = self.model(input_ids=tokens_BT, attention_mask=(parts_BT > 0).long(), **types)
        logits: Tensor = out.logits
        return logits if labels_B is None else F.cross_entropy(logits.float(), labels_B)


class HubEncoding:
    """The checkpoint's own tokenizer, with the special tokens it puts around one text or two."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.name, self.max_length = checkpoint.name, checkpoint.length()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.name)
        except (OSError, ValueError) as error:
            raise _unreadable(self.name, error) from None

    def describe(self) -> dict[str, Any]:
        """The tokenizer's origin and the length at which texts are cut."""
        words = json.dumps(sorted(self._tokenizer.get_vocab().items()))
        digest = hashlib.sha256(words.encode()).hexdigest()[:16]
        return {"hf": self.name, "max_length": self.max_length, "vocab": digest}

    def learn(self, rows: Sequence[Row]) -> None:
        """Nothing: it is learnt."""

    def encode(self, row: Row) -> tuple[list[int], int, bool]:
        """The ids, cut by the tokenizer itself, the longer text first."""
        whole = self._tokenizer(*row.texts, truncation=False, verbose=False)["input_ids"]
        cut = len(whole) > self.max_length
        found = self._tokenizer(
            *row.texts, truncation=cut, max_length=self.max_length if cut else None
        )
        ids = list(found["input_ids"])
        types = found.get("token_type_ids") or [0] * len(ids)
        return ids, types.index(1) if 1 in types else len(ids), cut

    def save(self) -> dict[str, Any]:
        """Size and padding; the tokenizer stays with its checkpoint."""
        pad = self._tokenizer.pad_token_id
        fallback = self._tokenizer.eos_token_id
        return {"vocab_size": len(self._tokenizer), "pad": fallback if pad is None else pad}


def _unreadable(name: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:160]
    return UserError(
        f"cannot load hf:{name} ({reason}); give a folder, a hub name (with network), "
        "or an architecture such as hf:bert"
    )
