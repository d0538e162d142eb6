"""What a run writes when it has trained: its timings and a sample of its text."""

import math
from typing import Any

from oelm.train import checkpoint, timing
from oelm.train.config import TrainConfig
from oelm.train.parallel import Processes
from oelm.train.record import Record
from oelm.train.state import State
from oelm.train.task import Task


def write_summaries(
    config: TrainConfig,
    task: Task,
    group: Processes,
    record: Record,
    state: State,
    final: dict[str, Any],
    precision: str,
) -> None:
    """`samples.json` from the best weights, and `timing_stats.json`; every process must call it."""
    p, folder = state.progress, config.out_dir
    memory = timing.peak_memory(group.device)  # before the summaries take some for themselves
    batch = next(iter(task.batches(p.step - 1, group)))
    flops = task.flops(state.model, batch)
    if not group.first:
        return
    best = task.build()
    best.load_state_dict(checkpoint.read(folder / checkpoint.BEST)["model"])
    record.json("samples.json", task.samples(best.eval()))
    peak = timing.matmul_peak(group.device, precision)
    record.json(
        "timing_stats.json",
        {
            **timing.summary(config, p, flops, peak, memory),
            "final_perplexity": final.get("ppl"),
            "best_perplexity": math.exp(min(p.best_loss, 700.0)) if "ppl" in final else None,
            "final_accuracy": final.get("accuracy"),
            "checkpoint_bytes": (folder / checkpoint.LAST).stat().st_size,
        },
    )
