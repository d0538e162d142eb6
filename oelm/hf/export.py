"""A finished run as a Hugging Face folder: weights, config, tokenizer, and a card with its numbers."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from oelm.data.dataset import Dataset
from oelm.data.tokenizers import EOT
from oelm.errors import UserError
from oelm.freezing import count
from oelm.hf.gpt import OelmConfig, OelmForCausalLM
from oelm.train.saved import SavedRun


def export(run: Path, to: Path) -> Path:
    """Write the run's best weights to the folder `to`, for `AutoModelForCausalLM` to load."""
    saved = SavedRun(run)
    if saved.config.get("task") != "language":
        raise UserError(f"{run} trained a classifier; only language models are exported")
    state = _json(run / "state.json").get("state", "not started")
    if state != "finished":
        raise UserError(
            f"{run} is not finished (it is {state}); finish it with the command that started it"
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} is there already; choose another --to or remove it")
    dataset = saved.dataset()
    config = OelmConfig(
        shape=saved.resolved["model"],
        method=saved.resolved["method"],
        bos_token_id=dataset.eot,
        eos_token_id=dataset.eot,
    )
    model = OelmForCausalLM(config).eval()
    model.gpt.load_state_dict(saved.weights())
    to.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(to)
    _tokenizer(dataset, config.max_position_embeddings).save_pretrained(to)
    (to / "README.md").write_text(_card(saved, count(model)), encoding="utf-8")
    return to


def _tokenizer(dataset: Dataset, length: int) -> PreTrainedTokenizerFast:
    """The dataset's own tokenizer; its end-of-text token ends, begins and pads."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(dataset.tokenizer().json)
    end = backend.id_to_token(dataset.eot) or EOT
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        bos_token=end,
        pad_token=end,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
    )


def _card(saved: SavedRun, counts: dict[str, Any]) -> str:
    """The model card: what it is, how it was trained, how well it does."""
    config, resolved = saved.config, saved.resolved
    method, shape, dataset = resolved["method"], resolved["model"], resolved["dataset"]
    rows = "\n".join(
        f"| {row['split']} | {row['loss']:.4f} | {row['ppl']:.3f} | {row['bpb']:.4f} | {row['tokens']:,} |"
        for row in _evaluations(saved.folder)
    )
    audit = _json(saved.folder / "freeze_audit.json").get("verdict", "not run")
    version = _json(saved.folder / "environment.json")
    seeds = ", ".join(f"{name} {value}" for name, value in resolved["seeds"].items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [oelm]
---
# {method["name"]} on {dataset["name"]}

A language model of {counts["total"]:,} weights ({shape["n_layers"]} layers of width {shape["d_model"]}),
of which {counts["frozen"]:,} were never trained. Method: {method["about"] or method["name"]}.

```python
import oelm.hf  # makes transformers know this kind of model
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (auto.from_pretrained("PATH") for auto in (AutoModelForCausalLM, AutoTokenizer))
ids = tokenizer("The people", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=40)[0]))
```

## Results
At the end of training; the weights here are those with the best validation loss.

| split | loss | perplexity | bits per byte | tokens |
|---|---|---|---|---|
{rows}

## Training
{config["max_steps"]:,} steps of {config["batch_size"]} × {shape["seq_len"]} tokens, learning rate up to
{config["max_lr"]:g} ({config["schedule"]}), weight decay {config["weight_decay"]:g}; seeds: {seeds}.
Freeze audit: {audit}. OELM {version.get("oelm", "?")}, code {version.get("code") or "released"}.
"""


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    """The full evaluations that ended the run."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "eval" and row["full"]]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
