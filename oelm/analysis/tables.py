"""The tables of a report."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from oelm.analysis import numbers
from oelm.analysis.blocks import Block, cell, table
from oelm.analysis.metrics import metric, other_split
from oelm.analysis.sentences import estimate_of, metric_name, statement, why
from oelm.analysis.study import Arm, Study
from oelm.analysis.verdicts import Twice, Verdict, gap
from oelm.analysis.words import Words

HIDDEN_FIELDS = ("schema", "out_dir", "seed", "resume")


def claims(words: Words, verdicts: Sequence[tuple[str, Verdict]]) -> Block | None:
    """The claims with their verdicts, and the numbers that decided them; named by study if given."""
    items = []
    for study, verdict in verdicts:
        value, interval = estimate_of(verdict)
        spelled = statement(words, verdict.claim)
        items.append(
            {
                "verdict": verdict.state,
                "label": words(verdict.state),
                "name": verdict.claim.name,
                "study": study,
                "text": verdict.claim.text or spelled,
                "statement": spelled if verdict.claim.text else "",
                "estimate": value,
                "interval": interval,
                "p": numbers.p_value(verdict.p_holm),
                "seeds": str(verdict.result.n) if verdict.result else "0",
                "why": why(words, verdict),
                "mark": words("on_test") if verdict.claim.metric.startswith("test_") else "",
                "twin": _twin(words, verdict),
            }
        )
    keys = ("verdict", "claim", "estimate", "interval", "p", "seeds", "why")
    heads = {key: words(f"col_{key}") for key in keys}
    return {"kind": "claims", "heads": heads, "items": items} if items else None


def _twin(words: Words, verdict: Verdict) -> str:
    """The same comparison on the other split; empty if the runs did not record it."""
    if verdict.twin is None:
        return ""
    value, interval = estimate_of(verdict.twin)
    key = "twin_test" if verdict.twin.claim.metric.startswith("test_") else "twin_val"
    return words(key, value=value if interval == "–" else f"{value} ({interval})")


def confirmation(words: Words, study: Study, twice: Sequence[Twice]) -> Block | None:
    """Each comparison's gap on val and on test, with its interval."""
    measure, rows = metric(study.primary), []
    for one in twice:
        row: list[Any] = [
            cell(f"{one.arm.name} {words('versus', vs=one.other.name)}", arm=one.arm.name)
        ]
        for seen in (one.val, one.test):
            ends = [
                numbers.difference(measure, v, log=measure.ratio) for v in seen.interval() or ()
            ]
            said = numbers.difference(measure, seen.mean, log=measure.ratio)
            row += [cell(said, strong=True), " … ".join(ends) or "–"]
        rows.append([*row, str(one.test.n)])
    name, twin = study.primary, other_split(study.primary)
    heads = [words("col_comparison"), words(f"col_{name}_gap"), words("col_interval")]
    heads += [words(f"col_{twin}_gap"), words("col_interval"), words("col_seeds")]
    return table(heads, rows)


def quality(words: Words, study: Study) -> Block | None:
    """How good each arm became, and its gap to the reference."""
    if study.classifies:
        names = ["accuracy", "macro_f1", "test_accuracy", "loss"]
    else:
        names = ["ppl", "best_ppl", "test_ppl", "loss", "bpb"]
    first, *rest = names
    heads = [words("col_arm"), words("col_seeds"), words(f"col_{first}")]
    heads += [words("col_gap"), words("col_interval")]
    heads += [words(f"col_{name}") for name in rest]
    rows = []
    for arm in study.arms.values():
        done = len(arm.values(study.primary, study.seeds))
        row: list[Any] = [cell(arm.label, arm=arm.name), f"{done}/{len(study.seeds)}"]
        row.append(_mean_sd(arm, first, study.seeds))
        seen = gap(study, arm) if arm is not study.reference else None
        measure = metric(study.primary)
        interval = seen.interval() if seen else None
        row.append(
            cell(
                numbers.difference(measure, seen.mean, log=measure.ratio) if seen else "–",
                strong=True,
            )
        )
        if interval:
            low, high = (numbers.difference(measure, v, log=measure.ratio) for v in interval)
            row.append(f"{low} … {high}")
        else:
            row.append("–")
        rows.append(row + [_mean_sd(arm, name, study.seeds) for name in rest])
    return table(heads, rows)


def _mean_sd(arm: Arm, name: str, seeds: Sequence[int]) -> str:
    values = np.array(list(arm.values(name, seeds).values()))
    if not len(values):
        return "–"
    measure = metric(name)
    log = measure.ratio and bool(np.all(values > 0))
    mean = float(np.exp(np.log(values).mean())) if log else float(values.mean())
    if measure.share:
        sd = f" ± {values.std(ddof=1) * 100:.2f}" if len(values) > 1 else ""
        return f"{mean * 100:.2f}{sd}\u202f%"
    digits = 4 if mean >= 1 else 3
    text = numbers.number(mean, digits)
    if len(values) > 1:
        places = len(text.partition(".")[2])
        text += f" ± {values.std(ddof=1):.{places}f}"
    return text


def cost(words: Words, study: Study) -> Block | None:
    """What each arm trains, takes and holds."""
    keys = ("arm", "trainable", "frozen", "share", "wall", "step", "tokens", "memory", "checkpoint")
    rows = []
    for arm in study.arms.values():
        names = (
            "trainable",
            "frozen",
            "frozen_share",
            "wall_time",
            "step_time",
            "tokens_per_second",
        )
        found = {n: _mean(arm, n, study.seeds) for n in (*names, "peak_memory", "checkpoint_bytes")}
        share = found["frozen_share"]
        rows.append(
            [
                cell(arm.label, arm=arm.name),
                numbers.count(found["trainable"]),
                numbers.count(found["frozen"]),
                numbers.percent(share, signed=False) if share is not None else "–",
                numbers.duration(found["wall_time"]),
                numbers.duration(found["step_time"]),
                numbers.count(found["tokens_per_second"]),
                numbers.size(found["peak_memory"]),
                numbers.size(found["checkpoint_bytes"]),
            ]
        )
    return table([words(f"col_{key}") for key in keys], rows)


def _mean(arm: Arm, name: str, seeds: Sequence[int]) -> float | None:
    values = list(arm.values(name, seeds).values())
    return float(np.mean(values)) if values else None


def audits(words: Words, study: Study) -> Block | None:
    """Whether what is frozen stayed frozen, arm by arm."""
    rows = []
    for arm in study.arms.values():
        seen = [run.audit for run in arm.runs if run.audit.get("verdict")]
        if not seen:
            continue
        passed = sum(a["verdict"] == "pass" for a in seen)
        tensors = [t for t in seen[0].get("tensors", []) if isinstance(t, dict)]
        frozen = [t for t in tensors if t.get("role") == "frozen"]
        errors = [e for t in tensors for e in _numbers(t.get("orthogonality_error"))]
        state = words("passed", n=passed)
        if passed < len(seen):
            state += ", " + words("audit_failed", n=len(seen) - passed)
        rows.append(
            [
                cell(arm.label, arm=arm.name),
                cell(state, verdict="supported" if passed == len(seen) else "refuted"),
                numbers.count(_number(seen[0].get("frozen"))),
                str(len(frozen)) if tensors else "–",
                f"{max(errors):.1e}".replace("-", numbers.MINUS) if errors else "–",
            ]
        )
    keys = ("arm", "audit", "frozen", "tensors", "orthogonality")
    return table([words(f"col_{key}") for key in keys], rows, left=2)


def _numbers(value: Any) -> list[float]:
    """The numbers in a value that is one, or a list of them (one per head)."""
    found = value if isinstance(value, list) else [value]
    return [float(v) for v in found if isinstance(v, int | float)]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def audit_problems(study: Study) -> list[str]:
    """What the audits of failed runs say."""
    found = []
    for run in study.runs:
        if run.audit.get("verdict") == "fail":
            found += [f"{run.where}: {problem}" for problem in run.audit.get("problems", [])]
    return found


def grid(words: Words, study: Study) -> Block | None:
    """Every point of every grid, with the one each arm was tuned to marked."""
    rows = []
    for arm in study.arms.values():
        for point in arm.points if len(arm.points) > 1 else ():
            values = arm.values(study.primary, study.seeds, point)
            log = metric(study.primary).ratio
            array = np.array(list(values.values()))
            mean = (
                None
                if not len(array)
                else float(np.exp(np.log(array).mean()) if log else array.mean())
            )
            said = numbers.shown(metric(study.primary), mean)
            chosen = point == arm.chosen and bool(values)
            seeds = f"{len(values)}/{len(study.seeds)}"
            rows.append(
                [
                    cell(arm.name, arm=arm.name),
                    cell(point, strong=chosen),
                    seeds,
                    cell(said, strong=chosen),
                ]
            )
    heads = [
        words("col_arm"),
        words("col_point"),
        words("col_seeds"),
        metric_name(words, study.primary),
    ]
    return table(heads, rows, left=2)


def runs(words: Words, study: Study) -> Block | None:
    """Every run there is, in whatever state, and whether it decides anything."""
    rows = []
    for run in study.runs:
        decides = run.finished and run.seed in study.seeds and run in study.arms[run.arm].runs
        rows.append(
            [
                cell(run.where, arm=run.arm),
                words.either(f"state_{run.state}", run.state),
                f"{run.step:,}/{run.max_steps:,}" if run.max_steps else "–",
                numbers.shown(metric(study.primary), run.value(study.primary)),
                words("answer_yes" if decides else "answer_no"),
            ]
        )
    heads = [words(f"col_{k}") for k in ("run", "state", "steps")]
    return table([*heads, metric_name(words, study.primary), words("col_decides")], rows, left=2)


def differences(words: Words, study: Study) -> tuple[Block | None, Block | None]:
    """The fields in which the arms' configurations differ, and those they share."""
    configs = {
        a.label: a.runs[0].config for a in study.arms.values() if a.runs and a.runs[0].config
    }
    fields = [
        k for k in dict.fromkeys(k for c in configs.values() for k in c) if k not in HIDDEN_FIELDS
    ]
    values = {k: [_short(c.get(k)) for c in configs.values()] for k in fields}
    differ = [k for k in fields if len(set(values[k])) > 1]
    names = {a.label: a.name for a in study.arms.values()}
    rows = [
        [cell(label, arm=names[label]), *(_short(c.get(k)) for k in differ)]
        for label, c in configs.items()
    ]
    shared = [[k, values[k][0]] for k in fields if k not in differ and values[k][0] != "–"]
    heads = [words("col_field"), words("col_value")]
    left = len(differ) + 1
    return (table([words("col_arm"), *differ], rows, left=left) if differ else None), table(
        heads, shared, left=2
    )


def _short(value: Any) -> str:
    if value is None or value == [] or value == ():
        return "–"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:58] + "…"


def environment(words: Words, study: Study) -> Block | None:
    """Where and with what the runs were made; several values where runs differ."""
    found: dict[str, dict[str, None]] = {}
    for run in study.runs:
        flat = {**run.environment, **(run.environment.get("packages") or {})}
        for key, value in flat.items():
            if key not in ("schema", "packages", "command") and value is not None:
                found.setdefault(str(key), {})[_short(value)] = None
    rows = [
        [key, ", ".join(list(values)[:4]) + (" …" if len(values) > 4 else "")]
        for key, values in found.items()
    ]
    return table([words("col_field"), words("col_value")], rows, left=2)
