"""What a study will cost, from a few steps of every arm measured on this machine.

Each arm's first point is trained for a moment, through the same engine and side by side as in the
study, on noise with the dataset's vocabulary (or on its labelled texts); the rest is arithmetic.
"""

import heapq
import json
import math
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from oelm.config import to_mapping
from oelm.data.corpora import Corpus
from oelm.data.dataset import Dataset
from oelm.data.prepare import prepare
from oelm.errors import UserError
from oelm.model.config import ModelConfig
from oelm.study.confounds import Measured
from oelm.study.engines.local import Places, work
from oelm.study.folders import read_json, read_state
from oelm.study.plan import HINTS, OWN_FIELDS, Run, Study
from oelm.study.queue import Queue
from oelm.train.config import TrainConfig
from oelm.train.errors import StoppedError

# Work per measured arm: seconds on a CPU core, moments on a GPU.
BUDGET_FLOPS = {"cpu": 4e11, "gpu": 2e14}
FEWEST_STEPS, MOST_STEPS = 4, 60
SKIPPED_STEPS = 2  # the first allocate memory
EVALUATED_TOKENS = 2**13
TOKENS_PER_WORD = 4  # of words made of random letters


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one run of an arm needs."""

    arm: str
    parameters: int
    trainable: int
    frozen: int
    flops: float
    """Of the whole run."""
    step_seconds: float
    seconds: float
    """From start to finish, evaluations included."""
    memory: int
    disk: int
    tokens: int
    """Trained on."""
    epochs: float | None
    """How often each token is seen; None where the dataset is not on this machine."""
    validation_share: float
    validation_tokens: int | None

    @property
    def measured(self) -> Measured:
        """The part of it that can confound a claim."""
        return Measured(
            epochs=self.epochs,
            validation_share=self.validation_share,
            validation_tokens=self.validation_tokens,
        )


class Noise(Corpus):
    """Documents of random words, so that a study can be costed before its corpus is there."""

    name = "noise"
    size = 200

    def __init__(self, tokens_per_document: int) -> None:
        self.length = tokens_per_document
        self.held_out = min(0.3, max(0.04, EVALUATED_TOKENS / tokens_per_document / self.size))

    def documents(self, split: str) -> Iterator[str]:
        """The same documents each time, each of about a sequence's length."""
        dice = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = ["".join(dice.choices(letters, k=dice.randint(2, 9))) for _ in range(4000)]
        for _ in range(self.size):
            yield " ".join(dice.choices(words, k=self.length // TOKENS_PER_WORD))

    def origin(self) -> dict[str, Any]:
        """Where it comes from."""
        return {"name": self.name, "words": self.length}


def costs(
    study: Study, places: Places, *, slots: int, gpu: bool, say: Callable[[str], None]
) -> dict[str, Cost]:
    """The cost of a run of each arm; `say` hears how far the measuring is."""
    say(f"measuring a few steps of {len(study.arms)} arms; a large model takes minutes")
    firsts = _firsts(study)
    with tempfile.TemporaryDirectory(prefix="oelm-check-") as name:
        scratch = Path(name)
        budget = BUDGET_FLOPS["gpu" if gpu else "cpu"]
        small = {arm: _small(firsts[arm], scratch, budget) for arm in study.arms}
        # As many at once as in the study, or memory and caches would seem freer than they are.
        copies = math.ceil(slots / len(small))
        plan = {
            "name": "measured",
            "seeds": list(range(copies)),
            "arms": small,
            "needs": {"gpus_per_run": study.needs.gpus_per_run},
        }
        source = scratch / "measured.yaml"
        source.write_text(yaml.safe_dump(plan), encoding="utf-8")
        queue = Queue(source, scratch / "runs")
        queue.open(results=scratch / "none")
        if work(queue, places, say=say, patient=False):
            raise StoppedError("stopped before everything was measured")
        if left := queue.unfinished():
            state = read_state(left[0].folder)
            raise UserError(f"arm '{left[0].arm}' cannot be measured: {state.get('error')}")
        return {arm: _cost(firsts[arm], [r for r in queue.runs if r.arm == arm]) for arm in small}


def unmeasurable(study: Study) -> str | None:
    """Why the study cannot be measured here: noise will do for a language model, but labelled texts
    are measured on themselves, and must be there."""
    from oelm.train.classification import ClassificationTask

    try:
        for run in _firsts(study).values():
            if run.config.task == "classification":
                ClassificationTask(run.config)
    except UserError as error:
        return str(error)
    return None


def duration(runs: list[Run], found: dict[str, Cost], slots: int) -> float:
    """Seconds until the last run ends, if each slot takes the next run when it is free."""
    free = [0.0] * slots
    for run in runs:
        heapq.heappush(free, heapq.heappop(free) + found[run.arm].seconds)
    return max(free)


def _firsts(study: Study) -> dict[str, Run]:
    """The first run of each arm."""
    return {r.arm: r for r in reversed(study.runs(Path("runs")))}


def _small(run: Run, scratch: Path, budget: float) -> dict[str, Any]:
    """The run's configuration cut down to a few steps; of few sequences if one step is long."""
    shape = _shape(run.config)
    per_sequence = (
        6
        * shape.seq_len
        * (12 * shape.n_layers * shape.d_model**2 + shape.vocab_size * shape.d_model)
    )
    batch = run.config.batch_size
    if budget < FEWEST_STEPS * per_sequence * batch and run.config.device in ("auto", "cpu"):
        batch = max(run.config.grad_accumulation, int(budget / FEWEST_STEPS / per_sequence))
    steps = int(min(max(budget / per_sequence / batch, FEWEST_STEPS), MOST_STEPS))
    cut = {
        "max_steps": steps,
        "batch_size": batch,
        "warmup": 1,
        "log_interval": 1,
        "eval_interval": steps,
        "eval_tokens": shape.seq_len,
        "save_interval": steps,
        "test": False,
        "track": [],
    }
    if run.config.task == "language":  # labelled texts are small, and their lengths matter
        cut["dataset"] = str(_noise(run.config.dataset, shape.seq_len, scratch))
    fields = {k: v for k, v in to_mapping(run.config).items() if k in HINTS and k not in OWN_FIELDS}
    return {**fields, **cut}


def _shape(config: TrainConfig) -> ModelConfig:
    """The model's shape; a Hugging Face model is taken to be of BERT-base's size, which steers only how
    many steps are measured."""
    return config.model_config() if config.hugging_face is None else ModelConfig.preset("gpt2-124m")


def _noise(name: str, seq_len: int, scratch: Path) -> Path:
    """A dataset of noise with the tokenizer of the one named, which need not be there."""
    out = scratch / "datasets" / re.sub(r"\W", "_", f"{name} {seq_len}")
    try:
        real = Dataset.open(name)
        tokenizer = real.meta["tokenizer"]["name"]
        if tokenizer not in ("gpt2", "bytes"):
            tokenizer = str(real.path / "tokenizer.json")
    except UserError:
        suffix = name.rpartition("-")[2]
        tokenizer = re.sub(r"^bpe(\d+)$", r"bpe:\1", suffix) if "bpe" in suffix else "gpt2"
    return out if out.exists() else prepare(Noise(seq_len), tokenizer, out=out, workers=1).path


def _cost(run: Run, measured: list[Run]) -> Cost:
    samples = [_sample(r) for r in measured]
    mean = {k: sum(s[k] for s in samples) / len(samples) for k in samples[0]}
    config, shape = run.config, _shape(run.config)
    share = config.batch_size / measured[0].config.batch_size
    step = mean["step"] * share
    data = _dataset(config)
    evaluated = _evaluation_tokens(config, data)
    validating = math.ceil(config.max_steps / config.eval_interval) * evaluated / mean["eval_rate"]
    final = (
        sum(data["splits"][s]["tokens"] for s in ("val", *(["test"] * config.test))) if data else 0
    )
    training = step * config.max_steps
    tokens = config.max_steps * config.batch_size * _length(config, data)
    # What a sequence adds: the inputs of every product of a block, and little else.
    activations = 4 * shape.seq_len * shape.n_layers * (10 * shape.d_model + 3 * shape.d_ff)
    more_sequences = config.batch_size - measured[0].config.batch_size
    return Cost(
        arm=run.arm,
        parameters=int(mean["total"]),
        trainable=int(mean["trainable"]),
        frozen=int(mean["frozen"]),
        flops=mean["flops"] * share * config.max_steps,
        step_seconds=step,
        seconds=training + validating + final / mean["eval_rate"] + mean["other"],
        memory=int(mean["memory"] + activations * more_sequences),
        disk=int((2 + config.keep) * mean["checkpoint"] + 4 * mean["total"]),
        tokens=tokens,
        epochs=tokens / data["splits"]["train"]["tokens"] if data else None,
        validation_share=validating / (training + validating),
        validation_tokens=data["splits"]["val"]["tokens"] if data else None,
    )


def _sample(run: Run) -> dict[str, float]:
    """The numbers that a measured run left in its folder."""
    state, timing = read_state(run.folder), read_json(run.folder / "timing_stats.json")
    audit = read_json(run.folder / "freeze_audit.json")
    text = (run.folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    laps = [line["seconds"] for line in lines if line["kind"] == "train"]
    evals = [line for line in lines if line["kind"] == "eval"]
    full = evals[-1]
    evaluating = sum(line["seconds"] for line in evals)
    mean_step = timing["mean_step_time"]
    return {
        # The median: while this arm was measured, its neighbours started up and stopped.
        "step": statistics.median(b - a for a, b in pairwise(laps[SKIPPED_STEPS - 1 :])),
        "eval_rate": full["tokens"] / full["seconds"],
        "other": state["finished"] - state["started"] - laps[-1] - evaluating,
        "flops": timing["matmul_share"] * mean_step * timing["matmul_peak_gflops"] * 1e9,
        "memory": timing["peak_memory_bytes"],
        "checkpoint": timing["checkpoint_bytes"],
        "total": audit["total"],
        "trainable": audit["trainable"],
        "frozen": audit["frozen"],
    }


def _length(config: TrainConfig, data: dict[str, Any] | None) -> int:
    """Tokens of a sequence: labelled texts are as long as they are, on average."""
    if config.task == "classification" and data is not None:
        about = data["splits"]["train"]
        return int(about["tokens"] / about["rows"])
    return _shape(config).seq_len


def _dataset(config: TrainConfig) -> dict[str, Any] | None:
    try:
        if config.task == "classification":
            from oelm.train.classification import ClassificationTask

            return ClassificationTask(config).dataset.meta
        return Dataset.open(config.dataset).meta
    except UserError:
        return None


def _evaluation_tokens(config: TrainConfig, data: dict[str, Any] | None) -> int:
    """How many tokens an evaluation on the way takes, as the trainer sizes it."""
    from oelm.train.task import EVALUATION_SHARE

    batch = config.batch_size * _length(config, data)
    wanted = config.eval_tokens or max(batch, int(EVALUATION_SHARE * config.eval_interval * batch))
    return min(wanted, data["splits"]["val"]["tokens"]) if data else wanted
