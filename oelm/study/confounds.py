"""Confounds: what besides the method could make, or hide, the difference that a claim is about.

Each is one line that says why it matters and what would mend it. No torch; what can only be known
by measuring (tokens in the corpus, seconds per step) is passed in by `oelm check`.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oelm.analysis.claims import Claim
from oelm.analysis.metrics import other_split
from oelm.config import from_mapping, to_mapping
from oelm.errors import UserError
from oelm.methods import UNIT_ROWS, Treatment
from oelm.study.plan import OWN_FIELDS, Study
from oelm.train.config import TrainConfig

SEEDS_FOR_A_CLAIM = 3
EPOCHS = 4.0
VALIDATION_SHARE = 0.10
# Spread of a token's loss around its mean, in nats: 2 to 3 for every corpus and model we have seen.
LOSS_SPREAD = 2.5
NORMAL_STD = 0.02

# What a difference in each field does to a comparison, and what mends it.
WHY: dict[str, tuple[str, str]] = {
    "max_lr": ("the better rate may win, not the better method", "give both arms the same grid"),
    "min_lr": ("the rates end at other shares of their maximum", "give both the same share"),
    "warmup": ("one arm has had a gentler start", "give both the same warm-up, or the same grid"),
    "schedule": ("one arm's rate falls differently", "give both the same schedule"),
    "batch_size": ("one arm sees more tokens per step", "give both the same batch_size"),
    "max_steps": ("one arm trains longer", "give both the same max_steps"),
    "dataset": ("perplexities on different text do not compare", "give both the same dataset"),
    "model": ("the models differ in more than their method", "give both the same model"),
    "dropout": ("one arm is regularised more", "give both the same dropout"),
    "weight_decay": ("one arm is regularised more", "give both the same weight_decay"),
    "data_seed": ("the arms see the text in another order, so seeds do not pair", "drop data_seed"),
    "init_seed": ("the arms start elsewhere, so seeds do not pair", "drop init_seed"),
    "eval_tokens": ("the arms are judged on different text", "give both the same eval_tokens"),
}
OTHERWISE = ("it is a second difference beside the method", "give both the same value")
# These change no result, or are the method itself.
NO_CONFOUND = (
    "method",
    "model",
    "threads",
    "device",
    "track",
    "keep",
    "log_interval",
    "save_interval",
)


@dataclass(frozen=True, kw_only=True)
class Confound:
    """One thing that weakens a study's claims."""

    kind: str
    line: str
    arms: tuple[str, ...] = ()
    claim: str | None = None
    """The first claim that it weakens; None if it weakens the study as a whole."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `oelm check` finds out about an arm beyond its configuration."""

    epochs: float | None = None
    validation_share: float | None = None
    validation_tokens: int | None = None


def confounds(study: Study, measured: Mapping[str, Measured] | None = None) -> list[Confound]:
    """Every confound of a study's claims; the same one is listed once, for the first claim it hits."""
    found: dict[str, Confound] = {}
    claims = study.parsed_claims
    candidates = [c for claim in claims for c in _of_claim(study, claim, measured or {})]
    candidates += _of_study(study, measured or {})
    for confound in candidates:
        found.setdefault(confound.line, confound)
    return list(found.values())


def from_datasets(study: Study) -> dict[str, Measured]:
    """What the datasets that are on this machine tell about each arm, without a step being run."""
    from oelm.data.dataset import Dataset

    found = {}
    for arm in study.arms:
        config = from_mapping(TrainConfig, next(iter(study.points(arm).values())), what="arm")
        if config.task != "language":
            continue
        with contextlib.suppress(UserError):  # not prepared here
            splits = Dataset.open(config.dataset).meta["splits"]
            tokens = config.max_steps * config.batch_size * config.model_config().seq_len
            epochs = tokens / splits["train"]["tokens"]
            found[arm] = Measured(epochs=epochs, validation_tokens=splits["val"]["tokens"])
    return found


def _of_claim(study: Study, claim: Claim, measured: Mapping[str, Measured]) -> list[Confound]:
    found = []
    inexact = not claim.measured.exact
    if inexact and len(study.seeds) < SEEDS_FOR_A_CLAIM:
        n = len(study.seeds)
        line = (
            f"{'one seed' if n == 1 else f'{n} seeds'}: the difference cannot be told from chance; "
            f"run at least {SEEDS_FOR_A_CLAIM} seeds"
        )
        found.append(Confound(kind="seeds", line=line, claim=claim.name))
    if inexact and claim.measured.unit in ("steps/h", "s", "tokens/s"):
        line = (
            f"{claim.metric} depends on what else the machine does; run with --slots 1 (or one run per "
            "GPU) while nobody else computes"
        )
        found.append(Confound(kind="timing", line=line, arms=claim.arms, claim=claim.name))
    if inexact and claim.vs is not None:
        found += _of_pair(study, claim.arm, claim.vs, claim)
    found += _noise(claim, measured)
    return found


def _of_pair(study: Study, arm: str, vs: str, claim: Claim) -> list[Confound]:
    found = []
    about: dict[str, Any] = {"arms": (arm, vs), "claim": claim.name}
    ours, theirs = study.points(arm), study.points(vs)
    if len(ours) != len(theirs):
        line = (
            f"{arm} is tuned over {_points(ours)}, {vs} over {_points(theirs)}: more tries find better "
            "results by themselves; give both the same grid"
        )
        found.append(Confound(kind="tuning", line=line, **about))
    for name, a, b in _differences(ours, theirs):
        why, remedy = WHY.get(name.partition(".")[0], OTHERWISE)
        line = f"{name} is {_shown(a)} in {arm} and {_shown(b)} in {vs}: {why}; {remedy}"
        found.append(Confound(kind=name, line=line, **about))
    a_std, b_std = _qk_std(ours), _qk_std(theirs)
    if any(abs(math.log(x / y)) > 0.05 for x, y in zip(a_std, b_std, strict=True)):
        line = (
            f"Q/K start with std {_pair(a_std)} in {arm} and {_pair(b_std)} in {vs}: the attention "
            "logits differ in scale, which can pass for the effect of how they are made; add an arm "
            "with the same scale (random_matched, or qk.scale)"
        )
        found.append(Confound(kind="init_scale", line=line, **about))
    confirmed = {c.arms for c in study.parsed_claims if c.metric.startswith("test_")}
    if len(ours) > 1 and claim.arms not in confirmed:
        twin = other_split(claim.metric)
        line = (
            f"{claim.metric} picks each arm's best of {len(ours)} points and judges it on the same text; "
            f"confirm the claim on {f'{twin} or on ' if twin else ''}fresh seeds"
        )
        found.append(Confound(kind="selection", line=line, **about))
    if claim.metric == "best_ppl":
        line = "best_ppl picks the luckiest evaluation of each run; claim ppl or test_ppl instead"
        found.append(Confound(kind="selection", line=line, **about))
    return found


def _noise(claim: Claim, measured: Mapping[str, Measured]) -> list[Confound]:
    """Whether the validation text is too short to show a difference as small as the margin."""
    known = [
        m.validation_tokens for a in claim.arms if (m := measured.get(a)) and m.validation_tokens
    ]
    if claim.kind not in ("at_most", "at_least", "equivalent_within") or not known:
        return []
    if (
        claim.metric.removeprefix("test_") not in ("ppl", "best_ppl", "loss")
        or not claim.margin.relative
    ):
        return []
    noise = math.expm1(LOSS_SPREAD / math.sqrt(min(known)))
    margin = abs(claim.margin.value)
    if not margin or noise <= margin:  # of a margin of 0, more text would not make it larger
        return []
    line = (
        f"perplexity on {min(known):,} validation tokens is known to about ±{noise:.1%}, the margin is "
        f"{margin:.1%}: the text decides, not the method; evaluate on more tokens"
    )
    return [Confound(kind="evaluation_noise", line=line, arms=claim.arms, claim=claim.name)]


def _of_study(study: Study, measured: Mapping[str, Measured]) -> list[Confound]:
    found = []
    repeats = {a: m.epochs for a, m in measured.items() if m.epochs and m.epochs > EPOCHS}
    if repeats:
        line = (
            f"each token is seen {max(repeats.values()):.1f} times: how an arm over-fits enters the "
            "comparison; use more text or fewer steps"
        )
        found.append(Confound(kind="epochs", line=line, arms=tuple(repeats)))
    shares = {a: s for a, m in measured.items() if (s := m.validation_share)}
    slow = {a: s for a, s in shares.items() if s > VALIDATION_SHARE}
    if slow:
        line = (
            f"validation takes {max(slow.values()):.0%} of the time; raise eval_interval, or leave "
            "eval_tokens out and it is sized"
        )
        found.append(Confound(kind="validation_time", line=line, arms=tuple(slow)))
    return found


def _differences(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, list[str], list[str]]]:
    """Fields whose values over the two arms' grids differ."""
    a, b = (_values(points) for points in (ours, theirs))
    both = [name for name in a if name in b]  # a Hugging Face model has no shape of ours
    return [(name, a[name], b[name]) for name in both if set(a[name]) != set(b[name])]


def _values(points: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """The values that each field takes over a grid, resolved to what a run would use."""
    values: dict[str, list[str]] = {}
    for fields in points.values():
        config = from_mapping(TrainConfig, fields, what="arm")
        given = {
            k: v for k, v in to_mapping(config).items() if k not in (*OWN_FIELDS, *NO_CONFOUND)
        }
        given["model"] = f"hf:{config.hugging_face}" if config.hugging_face else "OELM's own"
        if config.hugging_face is None:
            shape = config.model_config(vocab_size=1)  # the vocabulary comes with the dataset
            given |= {f"model.{k}": v for k, v in to_mapping(shape).items() if k != "dropout"}
        given |= {"warmup": config.warmup_steps, "min_lr": config.last_lr / config.max_lr}
        for name, value in given.items():
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            values.setdefault(name, [])
            if shown not in values[name]:
                values[name].append(shown)
    return values


def _qk_std(points: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """Standard deviation of the entries of Q and of K at the start."""
    config = from_mapping(TrainConfig, next(iter(points.values())), what="arm")
    if config.hugging_face is not None:  # the width is known only once it is loaded
        return math.nan, math.nan
    method, width = config.resolved_method(), config.model_config().d_model
    return _std(method.q, width), _std(method.k, width)


def _std(treatment: Treatment, width: int) -> float:
    if treatment.init == "keep":  # whatever the pretrained model has
        return math.nan
    unit = treatment.init in (*UNIT_ROWS, "xavier")
    return treatment.scale * (1 / math.sqrt(width) if unit else NORMAL_STD)


def _pair(stds: tuple[float, float]) -> str:
    q, k = (f"{s:.2g}" for s in stds)
    return q if q == k else f"{q} / {k}"


def _points(points: Mapping[str, Any]) -> str:
    return "1 point" if len(points) == 1 else f"{len(points)} points"


def _shown(values: list[str]) -> str:
    return values[0] if len(values) == 1 else "{" + ", ".join(values) + "}"
