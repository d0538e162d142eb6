"""Read a study: its plan and claims from its folder, and every run that is there.

Also a few single runs side by side, and the numbers that others published (`studies/reference`).
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from oelm.analysis.claims import parse_claims
from oelm.analysis.metrics import metric
from oelm.analysis.runs import Run, read_run
from oelm.analysis.study import Arm, Study
from oelm.analysis.words import Text, text
from oelm.config import load_yaml
from oelm.errors import UserError, unknown
from oelm.methods import method as find_method

REFERENCE = "reference:"


def load(paths: Sequence[str], language: str = "en") -> list[Study]:
    """The studies at these places; single runs among them become one comparison."""
    studies, singles = [], []
    for place in paths:
        path = Path(place)
        if place.startswith(REFERENCE) or path.suffix == ".json":
            studies.append(read_reference(place, language))
        elif path.suffix in (".yaml", ".yml") and path.is_file():
            studies.append(read_study(Path("runs") / str(load_yaml(path).get("name", path.stem))))
        elif not path.is_dir():
            studies.append(read_study(_by_name(place)))
        elif (path / "config.yaml").is_file() or (path / "state.json").is_file():
            singles.append(path)
        else:
            studies.append(read_study(path))
    if singles:
        studies.append(read_singles(singles))
    return studies


def _by_name(place: str) -> Path:
    """`quickstart` for `runs/quickstart` or `results/quickstart`."""
    for root in ("runs", "results"):
        if (Path(root) / place).is_dir() and "/" not in place:
            return Path(root) / place
    raise UserError(
        f"no study or run at '{place}'; give a folder such as runs/quickstart, a run's folder, "
        f"or {REFERENCE}tinystories"
    )


def read_study(folder: Path) -> Study:
    """A study's folder, `runs/<study>` or its compact copy `results/<study>`."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; `oelm run` makes it")
    problems: list[Text] = []
    data: dict[str, Any] = {}
    if (folder / "study.yaml").is_file():
        try:
            data = load_yaml(folder / "study.yaml")
        except UserError as error:
            problems.append(text("study_broken", file="study.yaml", why=str(error)))
    plan = _rows(folder / "plan.json", problems)
    places = {(str(r["arm"]), str(r.get("point") or ""), int(r["seed"])): r for r in plan}
    points, leftover = {place[:2] for place in places}, set()
    for seed_folder in sorted(folder.glob("**/seed-*")):
        with contextlib.suppress(ValueError):
            seed = int(seed_folder.name.removeprefix("seed-"))
            above = seed_folder.relative_to(folder).parts[:-1] or ("run",)
            own = above[0], "/".join(above[1:])
            if points and own not in points:
                leftover.add("/".join(above))
            else:
                places.setdefault((*own, seed), {})
    if leftover:
        problems.append(text("leftover", places=", ".join(sorted(leftover))))
    if not places:
        raise UserError(f"{folder} holds no runs; give a study's folder such as runs/quickstart")
    arms: dict[str, Arm] = {}
    for (name, point, seed), row in places.items():
        arm = arms.setdefault(name, Arm(name))
        run_folder = folder.joinpath(*filter(None, (name, point, f"seed-{seed}")))
        run = read_run(run_folder, arm=name, point=point, seed=seed)
        run.config = run.config or dict(row.get("config") or {})
        arm.points.setdefault(point, []).append(run)
    seeds = data.get("seeds") or sorted({int(r["seed"]) for r in plan} or {p[2] for p in places})
    study = Study(
        name=str(data.get("name") or folder.name),
        question=str(data.get("question") or ""),
        arms=arms,
        seeds=tuple(int(s) for s in seeds),
        confounds=_rows(folder / "confounds.json", problems),
        problems=problems,
        path=folder,
    )
    _read_claims(study, data.get("claims"))
    _choose_points(study)
    _note_states(study)
    return study


def read_singles(folders: Sequence[Path]) -> Study:
    """Single runs as a study without claims; runs of one method with different seeds are one arm."""
    runs = [read_run(folder) for folder in folders]
    arms: dict[str, Arm] = {}
    for run in runs:
        if any(r.seed == run.seed for a in arms.values() if a.name == run.arm for r in a.runs):
            assert run.folder
            run.arm = "/".join(run.folder.parts[-2:])
        arms.setdefault(run.arm, Arm(run.arm)).points.setdefault("", []).append(run)
    study = Study(name="comparison", arms=arms, seeds=tuple(sorted({r.seed for r in runs})))
    _note_states(study)
    return study


def reference_names() -> list[str]:
    """The published numbers that ship with OELM."""
    folder = files("oelm.studies.reference")
    return sorted(
        p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json")
    )


def read_reference(place: str, language: str = "en") -> Study:
    """Published numbers, `reference:tinystories` or the path of such a file: quoted, not ours."""
    if place.startswith(REFERENCE):
        name = place.removeprefix(REFERENCE)
        if name not in reference_names():
            raise unknown("reference", name, reference_names())
        source = (
            files("oelm.studies.reference").joinpath(f"{name}.json").read_text(encoding="utf-8")
        )
    else:
        try:
            source = Path(place).read_text(encoding="utf-8")
        except OSError:
            raise UserError(f"no file at {place}") from None
    try:
        data = json.loads(source)
        arms = {name: Arm(name, {"": [_quoted(name, a)]}) for name, a in data["arms"].items()}
        study = Study(
            name=str(data["name"]),
            question=_said(data["question"], language),
            arms=arms,
            seeds=(0,),
            confounds=[
                {**c, "line": _said(c["line"], language)} for c in data.get("confounds", [])
            ],
            notes=[_said(note, language) for note in data.get("notes", [])],
            source=_said(data["source"], language),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place} is not a reference file: {error!r}") from None
    _read_claims(study, data.get("claims"))
    _note_states(study)
    return study


def _said(text: Any, language: str) -> str:
    """Text that may be given in several languages."""
    return str(text.get(language) or text["en"]) if isinstance(text, Mapping) else str(text)


def _quoted(name: str, data: Mapping[str, Any]) -> Run:
    """One published run: its finals, and the curve as far as it was printed."""
    config = dict(data.get("config", {}))
    run = Run(
        arm=name, seed=0, config=config, values={k: float(v) for k, v in data["values"].items()}
    )
    run.state = str(data.get("state", "finished"))
    run.max_steps = int(config.get("max_steps", 0))
    run.step = run.max_steps if run.finished else int(data.get("step", 0))
    with contextlib.suppress(UserError):
        found = find_method(str(config.get("method", name)))
        run.method = {"name": found.name, "q": vars(found.q), "k": vars(found.k)}
    if "trainable" in run.values and "frozen" in run.values:
        run.values["total"] = run.values["trainable"] + run.values["frozen"]
        run.values["frozen_share"] = run.values["frozen"] / run.values["total"]
    curve = np.array(data.get("curve", []), dtype=float).reshape(-1, 2)
    if len(curve):
        run.val = {"step": curve[:, 0], "ppl": curve[:, 1], "loss": np.log(curve[:, 1])}
    return run


def _rows(path: Path, problems: list[Text]) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        problems.append(text("study_broken", file=path.name, why=" ".join(str(error).split())))
        return []
    needed = {"arm", "seed"} if path.name == "plan.json" else {"line"}
    good = [r for r in rows if isinstance(r, dict) and needed <= r.keys()]
    if not isinstance(rows, list) or len(good) < len(rows):
        problems.append(text("study_broken", file=path.name, why=f"needs {sorted(needed)}"))
    return good


def _read_claims(study: Study, claims: Any) -> None:
    """Each claim by itself: one that is wrong is shown as a problem and costs no other its verdict."""
    for name, fields in claims.items() if isinstance(claims, Mapping) else ():
        try:
            study.claims += parse_claims({name: fields}, study.arms)
        except UserError as error:
            study.problems.append(text("claim_wrong", why=str(error)))


def _choose_points(study: Study) -> None:
    """Tune each arm alike: the point whose mean validation result over the planned seeds is best.

    Of the points with the most finished seeds: one that lost some might be judged by its lucky ones.
    """
    measure = metric(study.primary)
    for arm in study.arms.values():
        found = {p: list(arm.values(study.primary, study.seeds, p).values()) for p in arm.points}
        most = max(map(len, found.values()), default=0)
        means = {
            point: float(np.mean(values if measure.share else np.log(values)))
            for point, values in found.items()
            if values and len(values) == most
        }
        if len(arm.points) > 1 and means:
            best = max if measure.better == "greater" else min
            arm.chosen = best(means, key=lambda point: means[point])
        elif arm.points:
            arm.chosen = next(iter(arm.points))


def _note_states(study: Study) -> None:
    """What keeps the study from being whole: runs missing, in excess, or unequal between arms."""
    by_state: dict[str, list[str]] = {}
    for run in study.runs:
        if not run.finished and run.state != "failed":
            by_state.setdefault(run.state, []).append(run.where)
    for state, names in by_state.items():
        shown = ", ".join(names[:6]) + (" …" if len(names) > 6 else "")
        study.problems.append(
            text("not_finished", n=len(names), state=text(f"state_{state}"), runs=shown)
        )
    extra = sorted({run.seed for run in study.runs if run.finished} - set(study.seeds))
    if extra:
        study.problems.append(text("extra_seeds", seeds=", ".join(map(str, extra))))
    seeds = {
        arm.name: tuple(sorted(arm.values(study.primary, study.seeds)))
        for arm in study.arms.values()
    }
    if not any(seeds.values()):
        study.problems.append(text("none_finished"))
    elif len(set(seeds.values())) > 1:
        shown = "; ".join(f"{arm}: {', '.join(map(str, s)) or '–'}" for arm, s in seeds.items())
        study.problems.append(text("seeds_differ", seeds=shown))
