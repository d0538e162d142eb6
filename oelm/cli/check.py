"""`oelm check`: what a study will cost, and what confounds its claims."""

import dataclasses
import json as jsonlib
import sys
from typing import TYPE_CHECKING

from oelm.cli.options import parse
from oelm.cli.run import choose_places
from oelm.cli.status import aligned, duration

if TYPE_CHECKING:
    from oelm.study.check import Cost
    from oelm.study.plan import Run, Study


def check(argv: list[str]) -> int:
    """Entry point of `oelm check`."""
    return parse(_check, argv, prog="oelm check")


def _check(
    study: str,
    /,
    *,
    gpus: str | None = None,
    slots: int | None = None,
    measure: bool = True,
    json: bool = False,
) -> int:
    """What a study will cost, and what confounds its claims, before anything is spent.

    A few steps of every arm are measured here, on as many slots as the study would use; nothing is
    left behind. `oelm run` takes the same --gpus and --slots.

    Args:
        study: A YAML file, or the name of one in studies/.
        gpus: The GPUs that the study would use.
        slots: How many runs side by side on the CPU.
        measure: With --no-measure, only the runs and the confounds that need no measuring.
        json: Print JSON instead of tables.
    """
    from pathlib import Path

    from oelm.study.check import costs, unmeasurable
    from oelm.study.check import duration as takes
    from oelm.study.confounds import confounds, from_datasets
    from oelm.study.plan import find_study, load_study
    from oelm.train.errors import StoppedError

    plan = load_study(find_study(study))
    runs = plan.runs(Path("runs"))
    places, side_by_side, on_gpu = choose_places(plan, gpus, slots)
    why_not = unmeasurable(plan) if measure else "as you asked"
    try:
        found = {}
        if why_not is None:
            found = costs(plan, places, slots=side_by_side, gpu=on_gpu, say=_say)
    except StoppedError as stopped:
        print(f"oelm: {stopped}", file=sys.stderr)
        return stopped.exit_code
    known = {**from_datasets(plan), **{arm: cost.measured for arm, cost in found.items()}}
    problems = confounds(plan, known)
    seconds = takes(runs, found, side_by_side) if found else None
    if json:
        data = {
            "runs": [r.row() for r in runs],
            "costs": [dataclasses.asdict(c) for c in found.values()],
            "seconds": seconds,
            "slots": side_by_side,
            "confounds": [dataclasses.asdict(p) for p in problems],
        }
        print(jsonlib.dumps(data, indent=1))
        return 0
    _print_runs(plan, runs)
    if found:
        _print_costs(found, side_by_side, seconds or 0.0)
    else:
        print(f"\ntime and memory are not known, for nothing was measured: {why_not}")
    print(f"\nconfounds: {'none found' if not problems else len(problems)}")
    for problem in problems:
        claim = f" [{problem.claim}]" if problem.claim else ""
        print(f"- {problem.line}{claim}")
    return 0


def _say(line: str) -> None:
    """What the measured runs say that a reader of costs wants to know: how many are done."""
    if line.startswith("measuring") or "finished" in line:
        print(line, file=sys.stderr)


def _print_runs(plan: "Study", runs: "list[Run]") -> None:
    print(f"{plan.name}: {plan.question}")
    print(f"{len(runs)} runs: {len(plan.arms)} arms × {len(plan.seeds)} seeds")
    for arm in plan.arms:
        points = [p for p in plan.points(arm) if p]
        method = next(r.config.resolved_method() for r in runs if r.arm == arm)
        grid = f", at {'; '.join(points)}" if points else ""
        print(f"  {arm}: {method.about or method.name}{grid}")


def _print_costs(found: "dict[str, Cost]", slots: int, seconds: float) -> None:
    head = [
        "arm",
        "trainable",
        "frozen",
        "FLOPs",
        "step",
        "time",
        "memory",
        "disk",
        "epochs",
        "validation",
    ]
    cells = [head]
    for cost in found.values():
        line = [cost.arm, f"{cost.trainable:,}", f"{cost.frozen:,}", f"{cost.flops:.2g}"]
        line += [f"{cost.step_seconds:.3g} s", duration(cost.seconds)]
        line += [f"{cost.memory / 2**30:.2f} GiB", f"{cost.disk / 2**20:,.0f} MiB"]
        line += [
            "?" if cost.epochs is None else f"{cost.epochs:.2g}",
            f"{cost.validation_share:.0%}",
        ]
        cells.append(line)
    print("\none run of each arm:")
    print("\n".join(aligned(cells, left=("arm",))))
    if any(c.epochs is None for c in found.values()):
        print("the dataset is not on this machine: epochs and the last evaluation are not known")
    print(f"all runs, {slots} at a time: about {duration(seconds)}")
