"""What a study comes to, chosen by rule: the headline, the scenario it fits, what limits it."""

import math

from oelm.analysis import numbers
from oelm.analysis.blocks import Block, bullets, cell, paragraph, table
from oelm.analysis.figures import margins_of
from oelm.analysis.metrics import metric
from oelm.analysis.sentences import estimate_of, metric_name, spread, statement
from oelm.analysis.statistics import ALPHA, Estimate, compare
from oelm.analysis.study import Arm, Study, chain, method_of
from oelm.analysis.verdicts import Verdict, gap
from oelm.analysis.words import Words

MARGIN = 0.05
"""What counts as the same where no claim sets a margin: the source's criterion."""
SCENARIOS = ("better", "equal", "slight", "worse", "open")
FEW_SEEDS = 8


def headline(words: Words, study: Study, verdicts: list[Verdict]) -> str:
    """The study in one sentence: its first claim with an estimate, or else its largest gap."""
    for verdict in verdicts:
        claim, seen = verdict.claim, verdict.result
        if seen is None:
            continue
        said = {"claim": claim.text.rstrip(".。") or statement(words, claim)}
        said["verdict"] = words(verdict.state)
        value, _ = estimate_of(verdict)
        if claim.vs is None:
            return words("head_value", value=value, **said)
        interval = spread(words, seen, claim.measured, log=verdict.log)
        return words("head_claim", gap=value, interval=interval, **said)
    main, name = main_arm(study), metric_name(words, study.primary)
    seen = gap(study, main) if main else None
    if main and seen:
        measure = metric(study.primary)
        said = {"arm": main.name, "vs": study.reference.name, "metric": name}
        said |= {"gap": numbers.difference(measure, seen.mean, log=measure.ratio)}
        return words("head_gap", interval=spread(words, seen, measure, log=measure.ratio), **said)
    for arm in study.arms.values():
        for final in arm.values(study.primary, study.seeds).values():
            shown = numbers.shown(metric(study.primary), final)
            return words("head_single", arm=arm.name, metric=name, value=shown)
    return words("head_nothing")


def main_arm(study: Study) -> Arm | None:
    """The arm that the study is about: of its first claim against the reference, or its first frozen one."""
    for claim in study.claims:
        if claim.vs == study.reference.name and claim.metric == study.primary:
            return study.arms[claim.arm]
    others = [arm for arm in study.arms.values() if arm is not study.reference]
    freezing = [arm for arm in others if method_of(arm).get("q", {}).get("trains") == "never"]
    return next(iter(freezing or others), None)


def scenario(seen: Estimate | None, high: float) -> str:
    """Which row of the scenario table an arm's gap falls into, given a margin; less is better."""
    if seen is None or not seen.decidable:
        return "open"
    if seen.p_below(0) <= ALPHA:
        return "better"
    if seen.p_above(high) <= ALPHA:
        return "worse"
    if seen.p_below(high) <= ALPHA:
        return "slight" if seen.p_above(0) <= ALPHA else "equal"
    return "open"


def conclusion(words: Words, study: Study) -> list[Block | None]:
    """The scenario that the main arm's gap falls into, what follows, and what else is shown."""
    main, measure = main_arm(study), metric(study.primary)
    seen = gap(study, main) if main else None
    margin = (
        max((m for m in margins_of(study) if m > 0), default=MARGIN) if measure.ratio else MARGIN
    )
    ours = seen
    if seen and not measure.ratio:  # more is better, and the margin is one of points
        ours = Estimate(-seen.mean, seen.se, seen.df, seen.n, seen.paired)
        points = [abs(m) for m in margins_of(study)]
        margin = max(points, default=0.01)
    found = scenario(ours, math.log1p(margin) if measure.ratio else margin)
    said = f"{margin * 100:g}\u202f%" if measure.ratio else f"{margin * 100:g}\u202fpt"
    rows = []
    for name in SCENARIOS:
        text = words(
            f"con_{name}", **({"margin": said} if name in ("equal", "slight", "worse") else {})
        )
        here = name == found
        mark = cell("←" if here else "", strong=here)
        rows.append([cell(text, strong=here), cell(words(f"next_{name}"), strong=here), mark])
    blocks: list[Block | None] = []
    if main and seen:
        blocks.append(
            paragraph(
                words(
                    "con_arm",
                    arm=main.name,
                    vs=study.reference.name,
                    metric=metric_name(words, study.primary),
                    gap=numbers.difference(measure, seen.mean, log=measure.ratio),
                    interval=spread(words, seen, measure, log=measure.ratio),
                )
            )
        )
    heads = [words(f"col_{key}") for key in ("scenario", "next", "here")]
    return [*blocks, table(heads, rows, left=3), bullets(_also(words, study, main))]


def _also(words: Words, study: Study, main: Arm | None) -> list[str]:
    """What else the arms show: orthogonality against randomness, and speed."""
    found, steps, measure = [], chain(study), metric(study.primary)
    kinds = {str(method_of(arm).get("q", {}).get("init")): arm for arm in steps[1:] if _frozen(arm)}
    orthogonal = next(
        (arm for init, arm in kinds.items() if init not in ("normal", "matched")), None
    )
    other = kinds.get("matched") or kinds.get("normal")
    if orthogonal and other and (seen := gap(study, orthogonal, other)):
        sure = seen.p_below(0) if measure.better == "less" else seen.p_above(0)
        better = seen.decidable and sure <= ALPHA
        said = {"arm": orthogonal.name, "vs": other.name}
        said["gap"] = numbers.difference(measure, seen.mean, log=measure.ratio)
        said["interval"] = spread(words, seen, measure, log=measure.ratio)
        found.append(words("con_orthogonal_better" if better else "con_orthogonal_not", **said))
        if "matched" not in kinds:
            found.append(words("con_scale"))
    if main:
        sides = [arm.values("step_time", study.seeds) for arm in (main, study.reference)]
        if all(sides) and main is not study.reference:
            seen = compare(*sides, log=True)
            faster = seen.decidable and seen.p_below(0) <= ALPHA
            said = {"arm": main.name, "vs": study.reference.name}
            said["gap"] = numbers.percent(math.expm1(seen.mean))
            said["interval"] = spread(words, seen, metric("step_time"), log=True)
            found.append(words("con_faster" if faster else "con_slower", **said))
    return found


def _frozen(arm: Arm) -> bool:
    return bool(method_of(arm).get("q", {}).get("trains") == "never")


def limitations(words: Words, study: Study) -> list[str]:
    """What keeps the study's conclusions from reaching further."""
    found = []
    if study.source:
        found.append(words("lim_quoted"))
    n = len(study.seeds)
    if n == 1:
        found.append(words("lim_one_seed"))
    elif n < FEW_SEEDS:
        found.append(words("lim_seeds", n=n))
    if not any(claim.metric.startswith("test_") for claim in study.claims):
        found.append(words("lim_val"))
    if any(len(arm.points) > 1 for arm in study.arms.values()):
        found.append(words("lim_tuned"))
    datasets = sorted(
        {str(run.config["dataset"]) for run in study.runs if run.config.get("dataset")}
    )
    totals = sorted({run.values["total"] for run in study.runs if run.values.get("total")})
    if datasets and totals:
        total = " / ".join(numbers.count(t) for t in totals[:3])
        found.append(words("lim_size", dataset=", ".join(datasets), total=total))
    machines = sorted({str(r.environment["cpu"]) for r in study.runs if r.environment.get("cpu")})
    if machines:
        found.append(words("lim_timing", machine=", ".join(machines[:3])))
    planned = [run for arm in study.arms.values() for run in arm.runs if run.seed in study.seeds]
    if missing := sum(not run.finished for run in planned):
        found.append(words("lim_unfinished", n=missing))
    return found
