"""Causal attention on the CPU: our row blocks against torch's fused kernel, forward and backward.

python -m benchmarks.attention
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.model.causal import causal_attention

SHAPES = {"nano": (16, 4, 128, 32), "medium-512": (8, 8, 512, 64), "gpt2-124m": (1, 12, 1024, 64)}


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def seconds(attend: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> float:
    B, H, T, E = shape
    q, k, v = (torch.randn(B, T, H, E).transpose(1, 2).requires_grad_() for _ in range(3))
    grad = torch.randn(B, T, H, E).transpose(1, 2)
    start = time.perf_counter()
    attend(q, k, v).backward(grad)
    return time.perf_counter() - start


def main(rounds: int) -> None:
    for name, shape in SHAPES.items():
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for _ in range(rounds):
            times["ours"].append(seconds(causal_attention, shape))
            times["torch"].append(seconds(torchs, shape))
        ratio = statistics.median(t / o for t, o in zip(times["torch"], times["ours"], strict=True))
        ours, theirs = (1000 * statistics.median(times[n]) for n in ("ours", "torch"))
        print(f"{name:12} ours {ours:8.2f} ms   torch {theirs:8.2f} ms   {ratio:5.2f} × ours")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)
