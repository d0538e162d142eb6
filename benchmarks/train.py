"""Training steps beside the peers' on the same work: time, share of the matmul peak, memory.

python -m benchmarks.train [--workload nano] [--rounds 20] [--json FILE]

Each contender lives in a process of its own, so that its peak memory is its own. They take turns, in
another order every round, as does the product that finds the machine's peak, and ratios are taken within
a round, so that a noisy moment is shared by all. Before anything is timed, every
contender must show the same first loss from the same weights, to 0.001, and the same to 0.02,
or 2 % of what it fell by, three updates later (peers have a few more or fewer biases).

`benchmarks.evaluation` is this with the loss alone, without gradients.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version

import torch

from benchmarks import output, peers, positive
from oelm.bench import Ratio, random_batch, trainer
from oelm.kernels import library as kernels
from oelm.methods import METHODS
from oelm.model.config import ModelConfig
from oelm.model.gpt import GPT
from oelm.roofline import step_parts
from oelm.train.config import TrainConfig
from oelm.train.fitting import keep_freed_memory
from oelm.train.task import EVALUATION_BATCH
from oelm.train.timing import matmul_rates, peak_memory

WORKLOADS = {"nano": 16, "medium-512": 8, "gpt2-124m": 1}
SECONDS_PER_TURN = 1.0  # at least; short, so that a noisy moment is shared by all
SECONDS_PER_PRODUCT = 0.3  # of each of those that find the peak
PEAK = "matmul peak"  # takes its turn like everybody
STEPS_TO_AGREE = 4
RECIPE = {"precision": "fp32", "max_lr": 3e-5, "warmup": 0, "schedule": "constant"}
CPU = torch.device("cpu")


def ours(method, shape, batch_size, evaluation):
    """The step of the training loop itself, with everything that belongs to it, or its evaluation."""
    own = trainer(METHODS[method], shape, batch_size, "cpu", **RECIPE)
    batch = random_batch(shape, batch_size, CPU)

    def step():
        before = own.window[0].item()
        own.step(batch)
        return own.window[0].item() - before

    def evaluate():
        return own.loss(*batch).item()

    own.model.train(not evaluation)
    return evaluate if evaluation else step


def peer(make, shape, batch_size, evaluation, *, keeps_memory=False, compiled=False):
    """The usual loops around somebody else's model, with the settings of ours.

    `keeps_memory`: with the allocator's settings of our trainer, which no peer has by itself.
    """
    if keeps_memory:
        keep_freed_memory()
    model, loss_of = make(GPT(shape, METHODS["baseline"], 0))
    if compiled:
        model.compile()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    ours = TrainConfig()
    optimizer = torch.optim.AdamW(
        groups, lr=RECIPE["max_lr"], betas=(ours.beta1, ours.beta2), fused=True
    )
    x, y = random_batch(shape, batch_size, CPU)

    def step():
        loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def evaluate():
        with torch.inference_mode():
            return loss_of(x, y).item()

    model.train(not evaluation)
    return evaluate if evaluation else step


CONTENDERS = {
    "oelm": partial(ours, "baseline"),
    "oelm, oelm_v2": partial(ours, "oelm_v2"),
    "Hugging Face": partial(peer, peers.hugging_face),
    "Hugging Face, memory kept": partial(peer, peers.hugging_face, keeps_memory=True),
    "Hugging Face, compiled": partial(peer, peers.hugging_face, compiled=True),
    "torch": partial(peer, peers.torch_encoder),
    "torch, compiled": partial(peer, peers.torch_encoder, compiled=True),
    "x-transformers": partial(peer, peers.x_transformers),
    "x-transformers, compiled": partial(peer, peers.x_transformers, compiled=True),
}


def work_of(workload, evaluation):
    """The shape, and the sequences at a time: in evaluation as many tokens for everybody as ours takes."""
    shape = ModelConfig.preset(workload)
    return shape, EVALUATION_BATCH // shape.seq_len if evaluation else WORKLOADS[workload]


def contender(name, workload, evaluation):
    """Serve turns: a line on stdin asks for one, the answer is its time per step and peak memory."""
    step = CONTENDERS[name](*work_of(workload, evaluation), evaluation)
    print(json.dumps([step() for _ in range(STEPS_TO_AGREE)]), flush=True)
    for _ in sys.stdin:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS_PER_TURN:
            step()
            steps += 1
        print(json.dumps([(time.perf_counter() - began) / steps, peak_memory(CPU)]), flush=True)


def peak():
    """Serve turns as above; the answer is the rate of the best matrix product, torch's and ours."""
    print("[]", flush=True)
    for _ in sys.stdin:
        print(json.dumps(matmul_rates(CPU, "fp32", SECONDS_PER_PRODUCT)), flush=True)


def compare(workload, rounds, evaluation):
    """What is known after each round of everybody's turns; first a look at whether they do the same work."""
    processes, losses = {}, {}
    for name in (PEAK, *CONTENDERS):
        module = "benchmarks.evaluation" if evaluation else "benchmarks.train"
        processes[name] = subprocess.Popen(
            [sys.executable, "-m", module, "--contender", name, "--workload", workload],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        losses[name] = json.loads(processes[name].stdout.readline())
        print(f"{name} is ready", file=sys.stderr)
        if name not in (PEAK, "oelm, oelm_v2"):  # that is another model, and so another loss
            first, last = losses[name][0], losses[name][-1]
            assert abs(first - losses["oelm"][0]) < 1e-3, (name, losses)
            fell = losses["oelm"][0] - losses["oelm"][-1]
            assert abs(last - losses["oelm"][-1]) < max(0.02, 0.02 * fell), (name, losses)
    turns = {name: [] for name in processes}
    order = random.Random(0)
    for i in range(rounds):
        for name in order.sample(list(processes), len(processes)):
            processes[name].stdin.write("turn\n")
            turns[name].append(json.loads(processes[name].stdout.readline()))
        print(f"round {i + 1} of {rounds}", file=sys.stderr)
        yield summary(workload, evaluation, turns, losses)
    for process in processes.values():
        process.stdin.close()
        process.wait()


def summary(workload, evaluation, turns, losses):
    shape, batch_size = work_of(workload, evaluation)
    own, peaks = [turn[0] for turn in turns["oelm"]], [max(turn.values()) for turn in turns[PEAK]]
    rows = {}
    for name in CONTENDERS:
        seconds = [turn[0] for turn in turns[name]]
        method = METHODS["oelm_v2" if "v2" in name else "baseline"]
        parts = step_parts(shape, method, batch_size)
        flops = sum(part.forward if evaluation else part.total for part in parts)
        ratio = Ratio.of(seconds, own)
        rows[name] = {
            "seconds": statistics.median(seconds),
            "tokens_per_second": batch_size * shape.seq_len / statistics.median(seconds),
            "of_peak": statistics.median(
                flops / s / p for s, p in zip(seconds, peaks, strict=True)
            ),
            "memory": turns[name][-1][1],
            "time_of_ours": [ratio.median, ratio.low, ratio.high],
            "losses": losses[name],
        }
    return {
        "workload": workload,
        "evaluation": evaluation,
        "batch_size": batch_size,
        "seq_len": shape.seq_len,
        "rounds": len(own),
        "threads": torch.get_num_threads(),
        "peak_gflops": statistics.median(peaks) / 1e9,
        "torch_gflops": statistics.median(turn["torch"] for turn in turns[PEAK]) / 1e9,
        "settings": "fp32, fused AdamW, SDPA, clip 1.0; torch and x-transformers with torch's chunked loss",
        "versions": {p: version(p) for p in ("torch", "transformers", "x-transformers")},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kernels": kernels.in_use(),
        "rows": rows,
    }


def show(result):
    print(f"{result['workload']}: {result['batch_size']} × {result['seq_len']} tokens, fp32, "
          f"{result['threads']} threads, median of {result['rounds']} interleaved rounds; "
          f"peak {result['peak_gflops']:.0f} GFLOP/s, of torch's products "
          f"{result['torch_gflops']:.0f}")  # fmt: skip
    print(f"{'':<26}{'step':>9}{'tokens/s':>10}{'of peak':>9}{'memory':>11}   time of ours")
    for name, row in result["rows"].items():
        median, low, high = row["time_of_ours"]
        print(f"{name:<26}{row['seconds']:>8.3f}s{row['tokens_per_second']:>10,.0f}"
              f"{row['of_peak']:>9.2f}{row['memory'] / 2**20:>7,.0f} MiB"
              f"{median:>8.2f}× ({low:.2f} to {high:.2f})")  # fmt: skip


def main(description=__doc__, *, evaluation=False):
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--workload", choices=WORKLOADS, default="nano")
    options.add_argument("--rounds", type=positive, default=20)
    options.add_argument("--json", type=output, help="also write the numbers here")
    options.add_argument("--contender", choices=(PEAK, *CONTENDERS), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.contender == PEAK:
        peak()
        return
    if given.contender:
        contender(given.contender, given.workload, evaluation)
        return
    for result in compare(given.workload, given.rounds, evaluation):
        if given.json:  # every time, so that a run that is stopped is not lost
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
