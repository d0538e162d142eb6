"""A study's YAML → its runs. Pure data: nothing is started and no torch is imported.

A study names arms, seeds and claims; every field of `TrainConfig` can be set for all arms
(`defaults`) or for one, and a list value stands for each of its members in turn (a grid).
"""

import contextlib
import dataclasses
import importlib.resources
import itertools
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.analysis.claims import Claim, parse_claims
from oelm.config import from_mapping, load_yaml, to_mapping
from oelm.errors import UserError, unknown
from oelm.train.config import TrainConfig
from oelm.train.record import FREE

# What the study decides itself, for every run.
OWN_FIELDS = ("seed", "out_dir", "resume")
# Fields that say how a run is carried out, not what it computes: changing them repeats nothing.
HOW = FREE - {"test"}
HINTS = typing.get_type_hints(TrainConfig)


@dataclass(frozen=True, kw_only=True)
class SlurmNeeds:
    """What a run asks of Slurm."""

    partition: str | None = None
    time: int = 24 * 60
    """Minutes until Slurm stops the job; it saves, goes back into the queue, and continues."""
    gres: str | None = None
    """Such as `gpu:2`; from `gpus_per_run` if not given."""
    account: str | None = None
    nodes: int = 1
    """With more than one, the run trains on all of them together."""
    cpus_per_task: int | None = None
    mem: str | None = None
    """Such as `32GB`."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one run needs of an engine."""

    gpus_per_run: int = 1
    """GPUs that train one run together, where there are GPUs."""
    slurm: SlurmNeeds = field(default_factory=SlurmNeeds)

    def __post_init__(self) -> None:
        if self.gpus_per_run < 1:
            raise UserError(f"needs: gpus_per_run must be at least 1, not {self.gpus_per_run}")
        if self.slurm.nodes < 1 or self.slurm.time < 1:
            raise UserError("needs: slurm: nodes and time (minutes) must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm at one point of its grid with one seed."""

    study: str
    arm: str
    point: str
    """`max_lr=0.001` where the arm has a grid, else empty."""
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        """The run's path below the study's folder: `frozen/max_lr=0.001/seed-0`."""
        return "/".join(filter(None, (self.arm, self.point, f"seed-{self.seed}")))

    @property
    def folder(self) -> Path:
        """Where it runs and what it leaves."""
        return self.config.out_dir

    def row(self) -> dict[str, Any]:
        """The run as an entry of `plan.json`."""
        return {
            "arm": self.arm,
            "point": self.point,
            "seed": self.seed,
            "folder": self.name,
            "config": to_mapping(self.config),
        }


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms × seeds with shared defaults, and the claims made beforehand."""

    name: str
    arms: dict[str, dict[str, Any]]
    seeds: tuple[int, ...]
    question: str = ""
    """What the study is to settle, in one sentence."""
    defaults: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    needs: Needs = field(default_factory=Needs)

    def __post_init__(self) -> None:
        _check_name("study", self.name)
        if not self.arms:
            raise UserError("a study needs at least one arm")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(
                f"seeds must be different numbers, at least one, not {list(self.seeds)}"
            )
        for arm in self.arms:
            _check_name("arm", arm)

    @property
    def parsed_claims(self) -> tuple[Claim, ...]:
        """The claims, checked against the arms."""
        return parse_claims(self.claims, self.arms)

    def points(self, arm: str) -> dict[str, dict[str, Any]]:
        """The points of an arm's grid by name; one point named "" where there is no grid."""
        overrides = self.arms[arm]
        if not isinstance(overrides, Mapping):
            raise UserError(f"arm '{arm}' must be a mapping such as {{method: oelm_v2}}")
        fields = {**self.defaults, **overrides}
        for key in fields:
            if key in OWN_FIELDS:
                raise UserError(f"arm '{arm}': the study sets `{key}` itself; drop it")
            if key not in HINTS:
                raise unknown(f"field of arm '{arm}'", str(key), set(HINTS) - set(OWN_FIELDS))
        axes = {k: v for k, v in fields.items() if isinstance(v, list) and _scalar(HINTS[k])}
        if empty := [k for k, v in axes.items() if not v]:
            raise UserError(
                f"arm '{arm}': the grid `{empty[0]}` is empty; give it at least one value"
            )
        points = {}
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            label = ",".join(f"{k}={_label(v)}" for k, v in chosen.items() if len(axes[k]) > 1)
            if label in points:
                raise UserError(f"arm '{arm}': the grid gives the point '{label}' twice")
            points[label] = {**fields, **chosen}
        return points

    def runs(self, root: Path) -> list[Run]:
        """Every run, seed by seed, so that a study cut short still has whole pairs."""
        runs = []
        for seed in self.seeds:
            for arm in self.arms:
                for point, fields in self.points(arm).items():
                    parts = filter(None, (self.name, arm, point, f"seed-{seed}"))
                    out = {"seed": seed, "out_dir": root.joinpath(*parts)}
                    config = from_mapping(TrainConfig, {**fields, **out}, what=f"arm '{arm}'")
                    run = Run(study=self.name, arm=arm, point=point, seed=seed, config=config)
                    runs.append(run)
        return runs


def load_study(path: Path) -> Study:
    """Read and check a study: arms, grids, claims and every run's configuration."""
    try:
        study = from_mapping(Study, load_yaml(path), what="study")
        study.runs(Path("runs"))
        parse_claims(study.claims, study.arms)
    except UserError as error:
        text = str(error)
        raise UserError(text if str(path) in text else f"{path}: {text}") from None
    return study


def find_study(text: str) -> Path:
    """A study's file: a path, or the name of one in `studies/` or among those that ship with OELM."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if path.is_file():
            return path
    else:
        shipped = Path(str(importlib.resources.files("oelm.studies")))
        for folder in (Path("studies"), shipped):
            if (candidate := folder / f"{text}.yaml").is_file():
                return candidate
        known = {p.stem for f in (Path("studies"), shipped) for p in f.glob("*.yaml")}
        raise unknown("study", text, known)
    raise UserError(f"no study at {path}; write the path of a YAML file or the name of a study")


def essence(config: TrainConfig) -> dict[str, Any]:
    """What determines a run's result, with method and model spelled out: equal means comparable."""
    fields = {k: v for k, v in to_mapping(config).items() if k not in HOW}
    seeds = dict(config.seeds)
    method = to_mapping(config.resolved_method())
    own = config.hugging_face is None  # else `model` says it all
    model = dataclasses.asdict(config.model_config()) if own else {"hf": config.model}
    # Labels are for people, and the vocabulary comes with the dataset.
    for mapping, keys in ((method, ("name", "about")), (model, ("vocab_size",))):
        for key in keys:
            mapping.pop(key, None)
    rest = {k: v for k, v in fields.items() if k not in ("seed", *seeds)}
    rest |= {"min_lr": float(f"{config.last_lr:.9g}"), "warmup": config.warmup_steps}
    rest["dataset"] = re.sub(r"[^,=]*[/\\]", "", config.dataset)  # the same, wherever it lies
    return {**rest, **seeds, "method": method, "model": model}


def _scalar(hint: Any) -> bool:
    """Whether a field holds one value, so that a list of values is a grid."""
    options = typing.get_args(hint) or (hint,)
    return not any(typing.get_origin(o) in (tuple, list) for o in (hint, *options))


def _label(value: Any) -> str:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # YAML reads 1e-3 as text
            value = float(value)
    if isinstance(value, Mapping):
        value = value.get("name") or ",".join(f"{k}={v}" for k, v in value.items())
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.,=+-]+", "_", text)


def _check_name(what: str, name: str) -> None:
    """A name becomes a folder."""
    if not re.fullmatch(r"\w[\w.+-]*", str(name)) or str(name).startswith("seed-"):
        raise UserError(
            f"{what} name {name!r} cannot be a folder; use letters, digits, '.', '+', '-' and '_'"
        )
