"""Run folders as training leaves them, made up: realistic curves in a moment, in any state."""

import json
import math
import re
import time
from pathlib import Path

import numpy as np
import vl_convert
import yaml

from oelm.analysis import pictures
from oelm.config import to_mapping
from oelm.methods import method as find_method

N_LAYERS, D = 4, 128
BLOCK = 4 * D * D + 8 * D * D


def write_run(
    folder: Path,
    *,
    method: str = "baseline",
    seed: int = 0,
    final: float = 42.0,
    steps: int = 300,
    evals: int = 12,
    logs: int = 60,
    state: str = "finished",
    task: str = "language",
    noise: float = 0.004,
    step_time: float = 0.05,
    error: str | None = None,
    classes: tuple[str, ...] = ("negative", "positive"),
    probes: bool = False,
    **config,
) -> Path:
    """One run that ends near perplexity `final` (or accuracy `final` below 1)."""
    folder.mkdir(parents=True, exist_ok=True)
    treated = find_method(method)
    frozen = 2 * D * D * N_LAYERS if treated.q.frozen and treated.k.frozen else 0
    shared = np.random.default_rng(seed)  # what runs of one seed have in common
    own = np.random.default_rng([seed, len(method), *method.encode()])
    level = math.log(final) + 0.02 * shared.standard_normal() + noise * own.standard_normal()
    if task == "classification":
        level = final + 0.01 * shared.standard_normal() + noise * own.standard_normal()
    speed = step_time * (1 + 0.02 * own.standard_normal()) * (0.97 if frozen else 1.0)
    reached = steps if state == "finished" else steps // 2
    if state == "waiting":
        reached = 0

    def loss_at(step: int) -> float:
        if task == "classification":
            return level
        share = min(1.0, step / steps)
        excess = 3.2 * math.exp(-6 * share) + 0.35 * (1 - share)
        return level + excess * (1.05 if frozen else 1.0)

    lines = []
    for step in sorted({round(steps * (i + 1) / logs) for i in range(logs)}):
        if step > reached or not step:
            continue
        warm = min(1.0, step / (0.1 * steps))
        lr = 3e-3 * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        loss = loss_at(step) if task == "language" else 0.7 * math.exp(-2 * step / steps) + 0.2
        row = {"kind": "train", "step": step, "loss": loss + 0.05 * own.standard_normal(), "lr": lr}
        lines.append(row | {"grad_norm": 0.9, "tokens": step * 2048, "seconds": step * speed})
    every = max(1, steps // evals)
    for step in range(every, reached + 1, every):
        lines.append(_eval(step, loss_at(step), task, full=False))
        found = {"copy": 1 - math.exp(-step / steps)}
        if probes:
            found = _probes(step / steps, frozen=bool(frozen), noise=own)
        for name, value in found.items():
            lines.append({"kind": "probe", "step": step, "name": name, "value": value})
    if state == "finished":
        for split in ("val", "test"):
            at_end = loss_at(steps)
            if split == "test":  # other text: a little harder, with noise of its own
                harder = -0.01 if task == "classification" else 0.03
                at_end += harder + 0.5 * noise * own.standard_normal()
            lines.append(_eval(steps, at_end, task, split=split, full=True, classes=classes))
    lines.sort(key=lambda row: row["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))

    written = {"schema": 1, "method": method, "model": "nano", "task": task, "seed": seed}
    written |= {"dataset": "sotu-bpe2048", "max_steps": steps, "max_lr": 3e-3, **config}
    written["out_dir"] = str(folder)
    resolved = {"method": to_mapping(treated), "model": {"n_layers": N_LAYERS, "d_model": D}}
    resolved["dataset"] = {"classes": [str(i) for i in range(len(classes))]}
    (folder / "config.yaml").write_text(yaml.safe_dump({**written, "resolved": resolved}))
    write(folder / "environment.json", ENVIRONMENT)
    now = time.time()
    running = {"schema": 1, "state": state, "step": reached, "max_steps": steps, "attempt": 1}
    running |= {"host": "box", "pid": 1, "heartbeat": now, "started": now - 60, "error": error}
    write(folder / "state.json", running)
    if state != "finished":
        return folder
    total = N_LAYERS * BLOCK + 2048 * D + 128 * D
    layer = {"trainable": BLOCK - frozen // N_LAYERS, "frozen": frozen // N_LAYERS}
    audit = {"total": total, "trainable": total - frozen, "frozen": frozen, "verdict": "pass"}
    audit["by_layer"] = {
        "token_embedding": {"trainable": 2048 * D, "frozen": 0},
        "position_embedding": {"trainable": 128 * D, "frozen": 0},
        **{f"layer {i}": layer for i in range(N_LAYERS)},
    }
    tensor = {
        "name": "blocks.0.attention.q.weight",
        "role": "frozen",
        "orthogonality_error": [2e-7, 3e-7],
    }
    audit |= {"frozen_bytes": 4 * frozen, "problems": [], "tensors": [tensor] if frozen else []}
    write(folder / "freeze_audit.json", audit)
    timing = {"total_wall_time": steps * speed * 1.1, "median_step_time": speed}
    timing |= {"mean_step_time": speed * 1.01, "tokens_per_second": 2048 / speed}
    timing |= {
        "steps_per_hour": 3600 / speed,
        "peak_memory_bytes": (900 - bool(frozen) * 40) * 2**20,
    }
    timing |= {"checkpoint_bytes": 12 * total - 8 * frozen}
    write(folder / "timing_stats.json", timing)
    if task == "language":
        text = f"Mr. Speaker, the state of our union is strong, said the {method} model, and so on."
        write(folder / "samples.json", [{"prompt": "Mr. Speaker,", "text": text}])
    return folder


ENVIRONMENT = {
    "oelm": "0.1.0", "code": "0" * 40, "python": "3.11.9", "packages": {"torch": "2.13.0"},
    "host": "box", "cpu": "a processor", "device": "cpu", "threads": 1, "precision": "fp32",
}  # fmt: skip


def _probes(share: float, *, frozen: bool, noise: np.random.Generator) -> dict[str, float]:
    """What the probes of a language model give after this share of its steps."""
    copied = 1 / (1 + math.exp(-12 * (share - (0.85 if frozen else 0.6))))
    found = {"induction_accuracy": 0.7 * copied, "induction_gain": 3 * copied}
    for layer in range(N_LAYERS):
        sharp = (0.1 if frozen else 0.25) * layer * share
        found[f"attention_entropy_{layer}"] = 0.98 - sharp
        found[f"logit_std_{layer}"] = 0.4 + 2 * sharp
    return {name: value * (1 + 0.03 * noise.standard_normal()) for name, value in found.items()}


def _eval(
    step: int,
    loss: float,
    task: str,
    *,
    split: str = "val",
    full: bool,
    classes: tuple[str, ...] = (),
) -> dict:
    row = {
        "kind": "eval",
        "split": split,
        "step": step,
        "tokens": 50_000,
        "seconds": 0.4,
        "full": full,
    }
    if task == "classification":
        accuracy = min(0.999, max(0.3, loss - 0.35 * math.exp(-step / 60)))
        row |= {"loss": 1 - accuracy, "accuracy": accuracy, "macro_f1": accuracy - 0.01}
        if full:
            n = len(classes)
            right, wrong = round(100 * n * accuracy), round(100 * n * (1 - accuracy) / (n - 1))
            row["confusion"] = [[right if i == j else wrong for j in range(n)] for i in range(n)]
            row["classes"] = {name: {"recall": accuracy} for name in classes}
        return row
    return row | {"loss": loss, "ppl": math.exp(loss), "bpb": loss / math.log(2) / 4.1}


def write(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


ARMS = {
    "baseline": ("baseline", 42.0),
    "orthogonal": ("oelm_no_freeze", 41.8),
    "frozen": ("oelm_v2", 46.4),
    "matched": ("random_matched", 46.6),
    "random": ("oelm_random", 48.9),
    "lowrank": ("oelm_lowrank", 43.0),
}
CLAIMS = {
    "success": {
        "text": "Frozen orthogonal Q/K cost at most 5 % of perplexity.",
        "metric": "ppl", "arm": "frozen", "vs": "baseline", "at_most": "+5%",
    },
    "low-rank": {
        "text": "A rank-8 update brings the frozen model within 5 % of the baseline.",
        "metric": "ppl", "arm": "lowrank", "vs": "baseline", "at_most": "+5%",
    },
    "same": {
        "text": "Orthogonal and matched Gaussian frozen Q/K are the same within 1 %.",
        "metric": "ppl", "arm": "frozen", "vs": "matched", "equivalent_within": "1%",
    },
    "counts": {"metric": "frozen", "arm": "frozen", "min": 100_000},
    "speed": {"metric": "steps_per_hour", "arm": "frozen", "vs": "baseline", "greater": True},
}  # fmt: skip
CONFOUNDS = [
    {
        "kind": "init_scale",
        "line": "Q/K start with std 0.088 in frozen and 0.02 in random: the attention logits differ in "
        "scale; add an arm with the same scale",
        "arms": ["frozen", "random"],
        "claim": "success",
    },
    {
        "kind": "timing",
        "line": "steps_per_hour depends on the machine",
        "arms": [],
        "claim": "speed",
    },
]


def write_study(
    root: Path,
    *,
    name: str = "synthetic",
    arms: dict[str, tuple[str, float]] = ARMS,
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    claims: dict | None = None,
    question: str = "What does freezing Q/K cost, and does a small trained update win it back?",
    **run,
) -> Path:
    """A study's folder with all runs finished."""
    folder, plan = root / name, []
    for arm, (method, final) in arms.items():
        for seed in seeds:
            write_run(folder / arm / f"seed-{seed}", method=method, seed=seed, final=final, **run)
            plan.append({"arm": arm, "point": "", "seed": seed, "folder": f"{arm}/seed-{seed}"})
    given = CLAIMS if claims is None else claims
    kept = {n: c for n, c in given.items() if {c["arm"], c.get("vs", c["arm"])} <= set(arms)}
    study = {"name": name, "question": question, "seeds": list(seeds), "claims": kept}
    study["arms"] = {arm: {"method": method} for arm, (method, _) in arms.items()}
    (folder / "study.yaml").write_text(yaml.safe_dump(study, allow_unicode=True, sort_keys=False))
    write(folder / "plan.json", plan)
    write(folder / "confounds.json", CONFOUNDS)
    return folder


def blocks(doc, kind):
    """The blocks of a kind in a document."""
    return [b for s in doc.sections for b in s["blocks"] if b["kind"] == kind]


def labels(spec):
    """Every text in a chart, as it is drawn."""
    svg = vl_convert.vegalite_to_svg(spec, vl_version=pictures.VEGA_LITE)
    return re.findall(r">([^<>]+)</(?:text|tspan)>", svg)
