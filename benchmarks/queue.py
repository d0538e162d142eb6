"""What the queue costs: many short runs on two slots, against the time that the runs themselves take.

python -m benchmarks.queue [--runs 40] [--slots 2]

Prints JSON: start-up of a fresh trainer process and of a forked one, the study's wall time, the sum
of the runs' own times, and their ratio. A run's own time is from its first to its last line of
state, so what the queue and process start-up add is the rest.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro
import yaml

from oelm.study.check import Noise

MODEL = "nano,n_layers=1,d_model=64,n_heads=2,d_ff=128,seq_len=64"


def main(runs: int = 40, slots: int = 2, seconds: float = 1.0) -> None:
    from oelm.data.prepare import prepare

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        prepare(Noise(64), "bytes", out=Path("noise"), workers=1)
        steps = calibrated(seconds)
        wall, output = run_study(steps, runs, slots)
        own, waits = own_times(Path("runs/queue"), slots)
        forked = statistics.median(waits)
        fresh = fresh_start(steps)
        ideal = sum(own) / slots
        result = {
            "runs": runs,
            "slots": slots,
            "steps_per_run": steps,
            "run_seconds_median": round(statistics.median(own), 3),
            "wall_seconds": round(wall, 2),
            "ideal_seconds": round(ideal, 2),
            "first_start_seconds": round(output, 2),
            "between_runs_seconds_median": round(forked, 3),
            "fresh_process_start_seconds": round(fresh, 2),
            "ratio": round(wall / ideal, 3),
            "ratio_without_start_up": round((wall - output) / ideal, 3),
        }
        print(json.dumps(result, indent=1))


def study(steps: int, seeds: int, name: str) -> Path:
    fixed = {"model": MODEL, "dataset": "noise", "batch_size": 4, "warmup": 1, "max_lr": 1e-3}
    rare = {"eval_interval": steps, "eval_tokens": 64, "save_interval": steps, "dropout": 0.0}
    plan = {
        "name": name,
        "defaults": {**fixed, **rare, "max_steps": steps, "threads": 1},
        "seeds": list(range(seeds)),
        "arms": {"a": {"method": "baseline"}},
    }
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump(plan))
    return path


def oelm(*argv: str) -> None:
    subprocess.run([sys.executable, "-m", "oelm", *argv], check=True, stdout=subprocess.DEVNULL)


def calibrated(seconds: float) -> int:
    """Steps that make a run last about so long, set-up and evaluation included."""
    oelm("run", str(study(100, 2, "calibrate")), "--slots", "2")
    (first, *_), _ = own_times(Path("runs/calibrate"), 2)
    timing = json.loads(Path("runs/calibrate/a/seed-0/timing_stats.json").read_text())
    rest = first - timing["train_time"]
    return max(1, round((seconds - rest) / timing["median_step_time"])) if seconds > rest else 1


def run_study(steps: int, seeds: int, slots: int) -> tuple[float, float]:
    path, began = study(steps, seeds, "queue"), time.time()
    oelm("run", str(path), "--slots", str(slots))
    wall = time.time() - began
    states = [json.loads(f.read_text()) for f in Path("runs/queue").glob("a/*/state.json")]
    return wall, min(s["started"] for s in states) - began


def own_times(folder: Path, slots: int) -> tuple[list[float], list[float]]:
    """Each run's own seconds, and the gaps between one run's end and the next one's start in a slot."""
    states = [json.loads(f.read_text()) for f in folder.glob("a/*/state.json")]
    gaps = []
    for slot in range(slots):
        here = sorted(
            (s["started"], s["finished"]) for s in states if s["where"].endswith(f" {slot}")
        )
        gaps += [b[0] - a[1] for a, b in itertools.pairwise(here)]
    return [s["finished"] - s["started"] for s in states], gaps or [0.0]


def fresh_start(steps: int) -> float:
    """Seconds from starting `python -m oelm train` to its first line of state."""
    path = Path("fresh.yaml")
    config = yaml.safe_load(study(steps, 1, "one").read_text())["defaults"]
    path.write_text(yaml.safe_dump({**config, "method": "baseline", "out_dir": "fresh"}))
    began = time.time()
    oelm("train", "--config", str(path))
    return float(json.loads(Path("fresh/state.json").read_text())["started"] - began)


if __name__ == "__main__":
    tyro.cli(main)
