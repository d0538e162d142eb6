"""Training steps beside Hugging Face's on the same work: time, share of the matmul peak, memory.

python -m benchmarks.train [--workload nano] [--rounds 5]. Each contender lives in a process of its
own, so that its peak memory is its own; they take turns, so that a noisy machine is noisy for all.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

WORKLOADS = {"nano": ("nano", 16), "medium-512": ("medium-512", 8)}
SECONDS_PER_TURN = 3.0


def ours(method, preset, batch_size):
    """The step of the training loop itself, with everything that belongs to it."""
    from oelm.bench import random_batch, trainer
    from oelm.methods import METHODS
    from oelm.model.config import ModelConfig
    from oelm.roofline import step_flops

    shape = ModelConfig.preset(preset)
    own = trainer(METHODS[method], shape, batch_size, "cpu")
    batch = random_batch(shape, batch_size, own.device)
    return lambda: own.step(batch), step_flops(shape, METHODS[method], batch_size)


def hugging_face(preset, batch_size):
    """GPT2LMHeadModel with SDPA and fused AdamW: the usual loop around it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from oelm.model.config import ModelConfig

    shape = ModelConfig.preset(preset)
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.seq_len, n_embd=shape.d_model,
        n_layer=shape.n_layers, n_head=shape.n_heads, n_inner=shape.d_ff, activation_function="gelu",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    x, _ = tokens(shape, batch_size)

    def step():
        model(input_ids=x, labels=x).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, 0


def tokens(shape, batch_size):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (batch_size, shape.seq_len + 1), generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


CONTENDERS = {
    "oelm baseline": lambda *work: ours("baseline", *work),
    "oelm oelm_v2": lambda *work: ours("oelm_v2", *work),
    "hugging face": hugging_face,
}


def contender(name, preset, batch_size):
    """Serve turns: a line on stdin asks for one, the answer is its time per step and the peak."""
    step, flops = CONTENDERS[name](preset, batch_size)
    for _ in range(2):
        step()
    print(flops, flush=True)
    for _ in sys.stdin:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS_PER_TURN:
            step()
            steps += 1
        seconds = (time.perf_counter() - began) / steps
        print(seconds, peak_flops(), high_water_mark(), flush=True)


def peak_flops(n=2048):
    a = torch.ones(n, n)
    best = min(_timed(lambda: a @ a) for _ in range(4))
    return 2 * n**3 / best


def _timed(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def high_water_mark():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def compare(workload, rounds):
    preset, batch_size = WORKLOADS[workload]
    processes = {}
    for name in CONTENDERS:
        command = [
            sys.executable,
            "-m",
            "benchmarks.train",
            "--contender",
            name,
            "--workload",
            workload,
        ]
        processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        flops = int(processes[name].stdout.readline())
        print(f"{name} is ready", file=sys.stderr)
        if name == "oelm baseline":
            useful = flops
    turns = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, process in processes.items():
            process.stdin.write("turn\n")
            turns[name].append([float(word) for word in process.stdout.readline().split()])
    for process in processes.values():
        process.stdin.close()
        process.wait()

    from oelm.model.config import ModelConfig

    seq_len = ModelConfig.preset(preset).seq_len
    peak = max(turn[1] for all_turns in turns.values() for turn in all_turns)
    print(f"{workload}: {batch_size} × {seq_len} tokens, fp32, {torch.get_num_threads()} threads, "
          f"median of {rounds} interleaved rounds; peak {peak / 1e9:.0f} GFLOP/s")  # fmt: skip
    print(f"{'':<16}{'step':>9}{'tokens/s':>10}{'of peak':>9}{'memory':>10}{'vs HF':>8}")
    for name, results in turns.items():
        seconds = statistics.median(turn[0] for turn in results)
        ratio = statistics.median(
            theirs[0] / own[0] for own, theirs in zip(results, turns["hugging face"], strict=True)
        )
        print(
            f"{name:<16}{seconds:>8.3f}s{batch_size * seq_len / seconds:>10,.0f}"
            f"{useful / seconds / peak:>9.2f}{results[-1][2] / 2**20:>6,.0f} MiB{ratio:>7.2f}×"
        )


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workload", choices=WORKLOADS, default="nano")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.contender:
        contender(given.contender, *WORKLOADS[given.workload])
    else:
        compare(given.workload, given.rounds)


if __name__ == "__main__":
    main()
