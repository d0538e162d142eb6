"""How fast training steps are on this machine: methods side by side, and against what arithmetic allows."""

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from oelm.config import to_mapping
from oelm.errors import UserError
from oelm.kernels.functions import attention
from oelm.methods import PROJECTIONS, Method
from oelm.model.config import ModelConfig
from oelm.model.gpt import GPT
from oelm.model.loss import linear_cross_entropy
from oelm.model.transformer import Block
from oelm.roofline import rest_of_step, step_flops, step_parts
from oelm.train.config import TrainConfig
from oelm.train.console import Console
from oelm.train.loop import Trainer
from oelm.train.parallel import Processes, processes
from oelm.train.record import Record
from oelm.train.timing import matmul_peak, reading_rate, timed

WARMUP = 2
BESIDES = 20  # measurements of the peak, beside those of the steps
PEAK_SECONDS = 0.3  # that each of them takes for each of its products
READINGS = 5  # of a large tensor, in each way, for the memory's rate
ONE_LAYER_VOCABULARY = 64


class _RandomTokens:
    """A task with a model to build and nothing to read."""

    def __init__(self, shape: ModelConfig, method: Method) -> None:
        self.shape, self.method = shape, method

    def build(self) -> GPT:
        return GPT(self.shape, self.method, 0)


def trainer(
    method: Method,
    shape: ModelConfig,
    batch_size: int,
    device: str = "auto",
    group: Processes | None = None,
    **rest: Any,
) -> Trainer:
    """A trainer that can take steps, alone or in a group, but has no folder and no data."""
    changing = [p for p in PROJECTIONS if method.treatment(p).trains in ("late", "every")]
    if changing:
        raise UserError(
            f"{method.name} changes in the course of training; there is no one step to time"
        )
    config = TrainConfig(
        method=to_mapping(method),
        model=to_mapping(shape),
        batch_size=batch_size,
        dropout=shape.dropout,
        device=device,
        max_steps=10**6,
        **rest,
    )
    record, console = Record(config, writes=False), Console(config, first=False)
    task: Any = _RandomTokens(shape, method)
    if group is not None:
        own = Trainer(config, task, group, record, console, None, None)
        own.wrapped.wrap(0)
        return own
    with processes(config) as alone:
        return Trainer(config, task, alone, record, console, None, None)


def random_batch(
    shape: ModelConfig, batch_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, T], the same every time."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (batch_size, shape.seq_len + 1), generator=draw)
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)


@dataclass(frozen=True)
class Ratio:
    """A median of ratios taken within rounds, with its 95 % interval."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        """By order statistics, so that a moment when the machine was busy does not matter."""
        from scipy import stats  # 59 MiB, which whoever only takes steps does without

        ordered = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
        outside = max(0, int(stats.binom.ppf(0.025, len(ordered), 0.5)) - 1)
        return Ratio(statistics.median(ordered), ordered[outside], ordered[-1 - outside])


def compare(
    methods: Sequence[Method],
    shape: ModelConfig,
    batch_size: int,
    rounds: int,
    device: str = "auto",
    progress: Callable[[int], None] = lambda done: None,
    *,
    by_layer: bool = False,
) -> dict[str, Any]:
    """Steps of every method against those of the first and against the machine's peak.

    The methods take turns, a step each, in another order every round, and each has a turn of the first
    next to its own, to which it is held: what a shared machine can do changes from turn to turn. `saved` is
    the share of the first method's step that a method's is shorter by, `possible` the share of its
    arithmetic that the method does without.

    `by_layer` takes the steps of models with one layer and hardly any vocabulary: methods differ in
    layers only, and a noisy moment is shared the better the shorter a turn is. What such a step saves,
    times the layers, is held against whole steps of the first method, taken now and then.
    """
    turn = replace(shape, n_layers=1, vocab_size=ONE_LAYER_VOCABULARY) if by_layer else shape
    if by_layer:
        for m in methods:
            _require_equal_layers(m, shape.n_layers)
    base = methods[0].name
    trainers = {m.name: trainer(m, turn, batch_size, device) for m in methods}
    where, precision = trainers[base].device, trainers[base].precision.name
    steps = {name: _step(own) for name, own in trainers.items()}
    whole_step = steps[base]
    if by_layer:
        whole_step = _step(trainer(methods[0], shape, batch_size, device))
    for step in (*steps.values(), whole_step) * WARMUP:
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    beside: dict[str, list[float]] = {name: [] for name in steps}
    whole, peaks, order = [], [], random.Random(0)
    others = [name for name in steps if name != base]

    def turn_of(name: str) -> float:
        return timed(steps[name], where)

    for i in range(rounds):
        if i % max(1, rounds // BESIDES) == 0:
            peaks.append(matmul_peak(where, precision, PEAK_SECONDS))
            if by_layer:
                whole.append(timed(whole_step, where))
        seconds[base].append(turn_of(base))
        shuffled = order.sample(others, len(others))
        for pair in (shuffled[at : at + 2] for at in range(0, len(shuffled), 2)):
            before = seconds[base][-1]
            taken = [turn_of(name) for name in pair]
            seconds[base].append(turn_of(base))
            for name, own, first in zip(pair, taken, (before, seconds[base][-1]), strict=False):
                seconds[name].append(own)
                beside[name].append(first)
        progress(i + 1)
    one, peak = statistics.median(seconds[base]), statistics.median(peaks)
    whole_seconds = statistics.median(whole) if by_layer else one
    layers = shape.n_layers * one / whole_seconds if by_layer else 1.0  # their share of a step
    flops = {m.name: step_flops(shape, m, batch_size) for m in methods}
    rows = []
    for name in steps:
        ratio = Ratio.of(seconds[name], beside[name] if name != base else seconds[base])
        saved, low, high = (layers * (1 - r) for r in (ratio.median, ratio.high, ratio.low))
        own = whole_seconds * (1 - saved)
        rows.append(
            {
                "method": name,
                "seconds": own,
                "tokens_per_second": batch_size * shape.seq_len / own,
                "of_peak": flops[name] / own / peak,
                "saved": saved,
                "saved_low": low,
                "saved_high": high,
                "possible": 1 - flops[name] / flops[base],
                "saved_seconds": saved * whole_seconds,
                "predicted_seconds": (flops[base] - flops[name]) / peak,
            }
        )
    return {"device": str(where), "precision": precision, "threads": torch.get_num_threads(),
            "rounds": rounds, "by_layer": by_layer, "peak_gflops": peak / 1e9, "rows": rows}  # fmt: skip


def _require_equal_layers(method: Method, n_layers: int) -> None:
    for projection in PROJECTIONS:
        treatment = method.treatment(projection)
        if len({treatment.frozen_in(layer, n_layers) for layer in range(n_layers)}) > 1:
            raise UserError(
                f"{method.name} freezes {projection} in some layers only, so one layer does not stand "
                "for all; drop by_layer"
            )


def _step(own: Trainer) -> Callable[[], Any]:
    """A step on random tokens, again and again."""
    assert isinstance(own.model, GPT)
    batch = random_batch(own.model.config, own.config.batch_size, own.device)
    return functools.partial(own.step, batch)


def explain(
    method: Method,
    shape: ModelConfig,
    batch_size: int,
    rounds: int,
    device: str = "auto",
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """A step part by part: the least time by the machine's two limits, and the time it takes.

    The limits are the rate of the best matrix product and that of reading memory, measured in the same
    rounds; a part is predicted to take as long as the slower of them asks. A small model's tensors stay in
    the caches, where the memory's rate is no limit, so that it may take less.

    Each part is measured alone, in all layers, forward and backward, by all cores, on inputs of the real
    shape; "the rest" is what the whole step takes beyond them: norms, activations, residuals, clipping, the
    optimizer, and Python. It comes out too small, below zero perhaps, where a step has blocks in one call or
    in lanes: parts take longer alone.
    """
    own = trainer(method, shape, batch_size, device)
    where, precision, model = own.device, own.precision, own.model
    assert isinstance(model, GPT)
    works: dict[str, Callable[[], Any]]
    works = {"step": _step(own)}
    for name, work in _parts(model, batch_size, where).items():

        def run(work: Callable[[], None] = work) -> None:
            with precision.autocast(where):
                work()

        works[name] = run
    seconds: dict[str, list[float]] = {name: [] for name in works}
    peaks, rates = [], []
    for i in range(WARMUP + rounds):
        peaks.append(matmul_peak(where, precision.name, PEAK_SECONDS))
        rates.append(reading_rate(where, READINGS))
        for name, work in works.items():
            taken = timed(work, where)
            if i >= WARMUP:
                seconds[name].append(taken)
        progress(i + 1 - WARMUP)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    peak, rate = statistics.median(peaks), statistics.median(rates)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = 4 if precision.name == "fp32" else 2
    parts = step_parts(shape, method, batch_size, number_bytes=size)
    parts.append(rest_of_step(shape, batch_size, trained, number_bytes=size))
    median["the rest"] = median["step"] - sum(median[part.name] for part in parts[:-1])
    rows: list[dict[str, Any]] = [
        {"part": part.name, "gflops": part.total / 1e9, "megabytes": part.bytes / 1e6,
         "predicted": part.seconds(peak, rate), "measured": median[part.name]}
        for part in parts
    ]  # fmt: skip
    sums = {key: sum(row[key] for row in rows) for key in ("gflops", "megabytes", "predicted")}
    rows.append({"part": "step", **sums, "measured": median["step"]})
    return {"method": method.name, "device": str(where), "precision": precision.name,
            "threads": torch.get_num_threads(), "rounds": rounds, "peak_gflops": peak / 1e9,
            "reading_gigabytes": rate / 1e9, "rows": rows}  # fmt: skip


def _parts(model: GPT, batch_size: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """Forward and backward of each part in all blocks; an output serves as its own gradient."""
    c, blocks = model.config, [block for block in model.blocks if isinstance(block, Block)]
    size = (batch_size, c.seq_len)
    targets = torch.zeros(batch_size * c.seq_len, dtype=torch.long, device=device)
    stream = torch.randn(*size, c.d_model, device=device, requires_grad=True)
    wide = torch.randn(*size, c.d_ff, device=device, requires_grad=True)
    q, k, v = (stream.view(*size, c.n_heads, -1).transpose(1, 2) for _ in range(3))

    def project(modules: Sequence[nn.Module | None], x: Tensor) -> None:
        for module in modules:
            if module is not None:
                y = module(x)
                trained = [p for p in module.parameters() if p.requires_grad]
                torch.autograd.grad(y, [x, *trained], y.detach(), materialize_grads=True)

    def attend() -> None:
        for _ in blocks:
            y = attention(q, k, v, None, causal=True, dropout=0.0)
            torch.autograd.grad(y, (q, k, v), y.detach())

    def head() -> None:
        loss = linear_cross_entropy(stream.flatten(0, 1), model.head_weight, targets)
        torch.autograd.grad(loss, [stream, model.head_weight])

    of_heads = {name: [getattr(block.attention, name) for block in blocks] for name in "qkvo"}
    ups = [m for block in blocks for m in (block.mlp.up, block.mlp.gate)]
    downs = [block.mlp.down for block in blocks]
    return {
        **{name: functools.partial(project, modules, stream) for name, modules in of_heads.items()},
        "attention": attend,
        "up": functools.partial(project, ups, stream),
        "down": functools.partial(project, downs, wide),
        "head": head,
    }
