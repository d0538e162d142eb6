"""Head + cross-entropy at Medium-512: our chunked form against the plain one and torch's own.

python -m benchmarks.loss            times of one forward and backward pass, interleaved
python -m benchmarks.loss --memory   peak memory of a whole training step with each form
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import positive
from oelm import GPT, ModelConfig, method
from oelm.model import gpt as gpt_module
from oelm.model.loss import linear_cross_entropy

ROWS, WIDTH, CLASSES = 8 * 512, 512, 50257


def plain(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h @ w.T, y)


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ours": linear_cross_entropy,
    "plain": plain,
    "torch": getattr(F, "linear_cross_entropy", plain),  # from torch 2.13 on
}


def seconds(
    form: Callable[[Tensor, Tensor, Tensor], Tensor], h: Tensor, w: Tensor, y: Tensor
) -> float:
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    start = time.perf_counter()
    form(h, w, y).backward()
    return time.perf_counter() - start


def compare_times(rounds: int) -> None:
    torch.manual_seed(0)
    h, w, y = (
        torch.randn(ROWS, WIDTH),
        torch.randn(CLASSES, WIDTH) * 0.02,
        torch.randint(CLASSES, (ROWS,)),
    )
    values = {name: form(h, w, y).item() for name, form in FORMS.items()}
    assert max(values.values()) - min(values.values()) < 1e-4, values
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds):
        for name, form in FORMS.items():
            times[name].append(seconds(form, h, w, y))
    print(
        f"{ROWS} rows × {CLASSES} classes, width {WIDTH}, {torch.get_num_threads()} threads, {rounds} rounds"
    )
    for name, spent in times.items():
        ratios = [other / own for other, own in zip(spent, times["ours"], strict=True)]
        print(
            f"{name:6} {statistics.median(spent):6.2f} s   {statistics.median(ratios):5.2f} × ours"
        )


def step_memory(name: str) -> None:
    """Peak memory of this process after two training steps with the given form."""
    gpt_module.linear_cross_entropy = FORMS[name]  # type: ignore[assignment]
    model = GPT(ModelConfig.preset("medium-512"), method("baseline"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randint(CLASSES, (8, 513))
    for _ in range(2):
        model(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def compare_memory() -> None:
    peaks = {
        name: json.loads(
            subprocess.check_output(
                [sys.executable, "-m", "benchmarks.loss", "--form", name], text=True
            )
        )
        for name in FORMS
    }
    print("peak memory of a Medium-512 training step, batch 8 × 512")
    for name, peak in peaks.items():
        print(f"{name:6} {peak / 2**30:6.2f} GiB   {peak / peaks['plain']:5.2f} × plain")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--form", choices=FORMS, help="measure one form's memory in this process")
    options = parser.parse_args()
    if options.form:
        step_memory(options.form)
    elif options.memory:
        compare_memory()
    else:
        compare_times(options.rounds)
