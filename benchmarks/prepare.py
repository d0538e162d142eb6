"""How fast and in how much memory `oelm data prepare` tokenizes, against two usual ways.

python -m benchmarks.prepare [--text FILE] [--copies 6] [--rounds 5] [--workers 2]

All three get the same documents and make the same GPT-2 ids:
- loop:    `encode_ordinary` of tiktoken over documents in memory, on one core; tokens only, no files
- recipe:  `datasets.map(num_proc=WORKERS)` with tiktoken, then shards into a memmap
- oelm:    `oelm.data.prepare` from the file to the published dataset
Rounds are interleaved and the ratios are taken within a round. Memory is the peak of a fresh process
on the text and on ten times as much. Text: the addresses of `sotu`, or FILE with <|endoftext|>.
"""

import argparse
import json
import os
import platform
import re
import shutil
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

from oelm.data import tokenizers
from oelm.data.corpora import Sotu
from oelm.data.files import Files
from oelm.data.prepare import prepare
from oelm.data.tokenizers import EOT


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


def peak_memory(file: Path, folder: Path, workers: int) -> int:
    """Peak bytes of a fresh process that prepares the file."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.prepare",
        "--peak-of",
        str(file),
        "--workers",
        str(workers),
    ]
    result = subprocess.run(
        [*command, "--folder", str(folder)], check=True, capture_output=True, text=True
    )
    return int(result.stdout)


def timed(work: Callable[[], int]) -> tuple[float, int]:
    begin = time.perf_counter()
    tokens = work()
    return time.perf_counter() - begin, tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        oelm(options.peak_of, options.folder, options.workers)
        # Not ru_maxrss, which a child inherits from whoever started it.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024)  # type: ignore[index]
        return
    source = Files([options.text]) if options.text else Sotu()
    documents = list(source.documents("train"))
    seconds: dict[str, list[float]] = {"loop": [], "recipe": [], "oelm": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder, file = Path(scratch) / "work", Path(scratch) / "text.txt"
        write(file, documents, options.copies)
        texts = list(Files([file]).documents("train"))
        contenders: dict[str, Callable[[], int]] = {
            "loop": lambda: loop(texts),
            "recipe": lambda: recipe(file, folder, options.workers),
            "oelm": lambda: oelm(file, folder, options.workers),
        }
        tokens = 0
        for number in range(options.rounds + 1):
            counts = set()
            for name, work in contenders.items():
                folder.mkdir()
                took, tokens = timed(work)
                shutil.rmtree(folder)
                counts.add(tokens)
                if number:  # the first round warms up
                    seconds[name].append(took)
            assert len(counts) == 1, f"the contenders disagree on the number of tokens: {counts}"
        large = Path(scratch) / "large.txt"
        write(large, documents, 10 * options.copies)
        memory = []
        for text in (file, large):
            folder.mkdir()
            memory.append(peak_memory(text, folder, options.workers))
            shutil.rmtree(folder)
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
