"""How the cost of a step grows with sequence length, width, vocabulary and processes, against arithmetic.

python -m benchmarks.growth [--rounds 5] [--json FILE] [--picture FILE]

Every point is `nano` with one thing changed and the same number of tokens in a step. They take turns;
each time is put beside the time that its useful arithmetic takes at the machine's matmul peak. For two
processes each gets half of the batch and half of the cores, and gradients are averaged over Gloo.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import altair as alt
import torch

from benchmarks import output, positive
from oelm.bench import PEAK_SECONDS, WARMUP, random_batch, trainer
from oelm.methods import METHODS
from oelm.model.config import ModelConfig
from oelm.roofline import step_flops
from oelm.train.config import TrainConfig
from oelm.train.parallel import processes as together
from oelm.train.timing import matmul_peak, timed

TOKENS = 2048
CPU = torch.device("cpu")
METHOD = METHODS["baseline"]
FACTORS = {
    "sequence length": [("seq_len", n) for n in (32, 64, 128, 256, 512, 1024)],
    "width": [("d_model", n) for n in (64, 128, 256, 512)],
    "vocabulary": [("vocab_size", n) for n in (512, 2048, 8192, 32768)],
}

PROCESSES = "processes on two cores"


def shape_of(field, value):
    changed = {field: value}
    if field == "d_model":
        changed |= {"d_ff": 4 * value, "n_heads": value // 32}
    return ModelConfig.preset("nano", **changed)


def step_of(shape):
    batch_size = TOKENS // shape.seq_len
    own = trainer(METHOD, shape, batch_size, "cpu", precision="fp32")
    batch = random_batch(shape, batch_size, CPU)
    return lambda: own.step(batch)


def shapes(rounds):
    """Every point of every factor in turn, as often as there are rounds."""
    points = [(factor, *point) for factor, values in FACTORS.items() for point in values]
    steps = {point: step_of(shape_of(*point[1:])) for point in points}
    seconds, peaks = {point: [] for point in points}, []
    for i in range(WARMUP + rounds):
        peaks.append(matmul_peak(CPU, "fp32", PEAK_SECONDS))
        for point, step in steps.items():
            taken = timed(step, CPU)
            if i >= WARMUP:
                seconds[point].append(taken)
    peak = statistics.median(peaks)
    rows = []
    for (factor, field, value), times in seconds.items():
        shape = shape_of(field, value)
        flops = step_flops(shape, METHOD, TOKENS // shape.seq_len)
        rows.append({"factor": factor, "value": value, "measured": statistics.median(times),
                     "at_peak": flops / peak})  # fmt: skip
    return rows, peak


def process(rounds):
    """One of the processes that train together: its median time of a step."""
    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    shape = ModelConfig.preset("nano")
    batch_size = TOKENS // shape.seq_len
    batch = random_batch(shape, batch_size // world, CPU)
    times = []
    with together(TrainConfig(device="cpu")) as group:
        own = trainer(METHOD, shape, batch_size, "cpu", group, precision="fp32")
        for i in range(WARMUP + rounds):
            began = time.perf_counter()
            own.step(batch)
            if i >= WARMUP:
                times.append(time.perf_counter() - began)
        own.wrapped.unwrap()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(statistics.median(times)), flush=True)


def processes(rounds, peak):
    flops = step_flops(ModelConfig.preset("nano"), METHOD, 16)
    rows = []
    for world in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}",
                   "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                   "-m", "benchmarks.growth", "--process", "--rounds", str(5 * rounds)]  # fmt: skip
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        rows.append({"factor": PROCESSES, "value": world, "measured": measured,
                     "at_peak": flops / peak})  # fmt: skip
    return rows


def picture(rows, file):
    lines = [
        {"factor": row["factor"], "value": row["value"], "seconds": row[key], "what": what}
        for row in rows
        for key, what in (("measured", "measured"), ("at_peak", "its arithmetic at the peak"))
    ]
    log = alt.Scale(type="log", nice=False, padding=12)
    chart = (
        alt.Chart(alt.Data(values=lines))
        .mark_line(point=True)
        .encode(
            # Every value is twice, or four times, the one before: as names they stand evenly.
            x=alt.X("value:O", title=None, axis=alt.Axis(labelAngle=0, format=",")),
            y=alt.Y("seconds:Q", title="seconds a step", scale=log, axis=alt.Axis(grid=False)),
            color=alt.Color("what:N", title=None, scale=alt.Scale(range=["#999999", "#0072b2"])),
        )
        .properties(width=230, height=180)
        .facet(facet=alt.Facet("factor:N", title=None, sort=[*FACTORS, PROCESSES]), columns=2)
        .resolve_scale(x="independent", y="independent")
        .configure_legend(orient="top")
    )
    chart.save(file, scale_factor=2)


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--rounds", type=positive, default=5)
    options.add_argument("--json", type=output, help="also write the numbers here")
    options.add_argument("--picture", type=output, help="also draw them here (.png or .svg)")
    options.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.process:
        process(given.rounds)
        return
    rows, peak = shapes(given.rounds)
    rows += processes(given.rounds, peak)
    print(f"nano, {TOKENS} tokens a step, fp32; peak {peak / 1e9:.0f} GFLOP/s")
    for row in rows:
        measured, at_peak = row["measured"], row["at_peak"]
        print(
            f"{row['factor']:<24}{row['value']:>8,}{measured:>9.3f} s, at the peak {at_peak:.3f} s "
            f"({at_peak / measured:.2f})"
        )
    if given.json:
        result = {"tokens": TOKENS, "peak_gflops": peak / 1e9, "rounds": given.rounds, "rows": rows}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.picture:
        picture(rows, given.picture)


if __name__ == "__main__":
    main()
