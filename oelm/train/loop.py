"""The training loop: fast, exact, and hard to break."""

import contextlib
import gc
import logging
import math
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oelm.errors import UserError
from oelm.freezing import Gates, Plan, audit, hashes
from oelm.kernels import library as kernels
from oelm.model.transformer import Transformer
from oelm.train import checkpoint, fitting, parallel, precision, timing
from oelm.train.classification import ClassificationTask
from oelm.train.closing import write_summaries
from oelm.train.config import TrainConfig
from oelm.train.console import Console
from oelm.train.errors import NonFiniteError, StoppedError
from oelm.train.lanes import Lanes
from oelm.train.lock import FolderLock
from oelm.train.optimizer import Guard, build_optimizer, set_learning_rates
from oelm.train.record import Record, environment
from oelm.train.signals import Signals
from oelm.train.state import State
from oelm.train.task import Batch, LanguageTask, Task

log = logging.getLogger(__name__)
TASKS: dict[str, Callable[[TrainConfig], Task]] = {
    "language": LanguageTask,
    "classification": ClassificationTask,
}


def train(config: TrainConfig) -> Path:
    """Train one run to its end, or on from where it stopped; returns its folder."""
    task = TASKS[config.task](config)
    folder, first = config.out_dir, os.environ.get("RANK", "0") == "0"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        record = Record(config, writes=first)
        lock = enter(FolderLock(folder, on_beat=record.beat)) if first else None
        console = enter(Console(config, first=first))
        group = enter(parallel.processes(config))
        record.config(task.resolved())
        if not config.resume and (folder / checkpoint.LAST).exists():
            raise UserError(
                f"{folder} holds a run already; drop --no-resume, or choose another --out_dir"
            )
        if group.any(first and record.finished()):
            log.info("%s is finished already", folder)
            return folder
        enter(record)
        enter(group.explaining())
        signals = enter(Signals())
        writer = enter(checkpoint.Writer(folder, keep=config.keep)) if first else None
        trainer = Trainer(config, task, group, record, console, writer, lock)
        stack.callback(trainer.wrapped.unwrap)
        stack.callback(gc.unfreeze)
        trainer.resume()
        trainer.run(signals)
        trainer.finish()
    return folder


class Trainer:
    """One run: its model as it is stepped, and all that happens between two steps."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        group: parallel.Processes,
        record: Record,
        console: Console,
        writer: checkpoint.Writer | None,
        lock: FolderLock | None,
    ) -> None:
        self.config, self.task, self.group = config, task, group
        self.record, self.console, self.writer, self.lock = record, console, writer, lock
        self.method, self.device, self.began = config.resolved_method(), group.device, time.time()
        self.model = task.build()
        plan = Plan.of(self.model, self.method)
        self.plan = replace(plan, values={name: v.clone() for name, v in plan.values.items()})
        first_hashes = hashes(self.model)

        self.model.to(self.device).train()
        self.wrapped = parallel.Wrapped(self.model, config, group)
        self.precision = precision.choose(config.precision, self.device, self.wrapped.kind)
        self.gates = Gates(self.model, config.max_steps)
        self.optimizer = build_optimizer(self.model, self.method, self.gates, config)
        scaled = self.precision.name == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        self.guard = Guard(self.optimizer, config.skip_bad_steps, self.device, scaled=scaled)
        self.pieces = fitting.pieces(config, self.model, group.world, self.device)
        self.lanes = Lanes() if self.splits() else None
        if self.lanes and isinstance(self.model, Transformer):
            self.model.lanes = self.lanes
        self.window = torch.zeros(2, device=self.device)  # the sum of the losses, and of how many
        self.one = torch.ones((), device=self.device)
        self.state = State(
            self.model, self.optimizer, self.scaler, self.guard, self.window, first_hashes
        )
        # Python looks through all its objects for garbage every few steps, while both lanes wait: what
        # exists by now need not be looked at.
        gc.freeze()

    def splits(self) -> bool:
        """Whether to take the halves of a batch side by side: on a CPU, where nothing is drawn at
        random on the way (threads share one generator) and no more than two gradients meet."""
        config = self.config
        return (
            self.device.type == "cpu"
            and self.group.world == 1
            and torch.get_num_threads() % 2 == 0
            and config.task == "language"
            and config.dropout == 0
            and self.pieces == 1
            and config.batch_size % 2 == 0
            and not config.compile
        )

    def resume(self) -> None:
        """Continue from the folder's newest whole checkpoint if it has one; audit either way."""
        if content := checkpoint.read_last(self.config.out_dir):
            self.state.restore(content)
            log.info("continuing from step %d", self.state.progress.step)
        self.began -= self.state.progress.wall_seconds
        self.record.rewind(self.state.progress.step)
        self.gates.apply(self.state.progress.step, keep_every=True)
        self.wrapped.wrap(self.state.progress.step)
        counts = self.audit()
        threads = torch.get_num_threads()
        about = environment(str(self.device), self.precision.name, threads, self.group.world)
        how = {
            "lanes": 2 if self.lanes else 1,
            "pieces": self.pieces,
            "kernels": kernels.in_use() if self.device.type == "cpu" else "torch",
        }
        self.record.json("environment.json", about | how)
        if self.config.warmup_steps >= self.config.max_steps:
            log.warning(
                "warm-up takes all %d steps: max_lr is never reached", self.config.max_steps
            )
        log.info(
            f"{self.method.name}: {counts['trainable']:,} trained, {counts['frozen']:,} frozen; "
            f"{self.device}, {self.precision.name} ({self.precision.reason}), "
            f"{self.group.world} × {threads} threads"
        )

    def run(self, signals: Signals) -> None:
        """All steps, with logging, evaluation and saving where they are due."""
        config, p = self.config, self.state.progress
        clock = timing.Clock(p)
        for batch in self.task.batches(p.step, self.group):
            rate, norm = self.step(batch)
            last = p.step == config.max_steps
            stops = self.group.any(signals.received is not None) and not last
            logs, evaluates, saves = (
                last or p.step % interval == 0
                for interval in (config.log_interval, config.eval_interval, config.save_interval)
            )
            if logs or evaluates or saves or stops or self.device.type == "cpu":
                norm_value = float(norm)  # waits for the device, so that the clock is honest
                clock.lap()
            if logs:
                self.log(rate, norm_value)
            if evaluates:
                self.evaluate_and_keep_best()
            if saves or stops:
                self.save()
            if stops:
                self.record.update(p.step)
                self.flush()
                cause = signals.received or "a signal to another rank"
                raise StoppedError(f"stopped by {cause} at step {p.step}, and saved")
            if evaluates or saves:
                clock.start()

    def step(self, batch: Batch) -> tuple[float, Tensor]:
        """One optimizer step; returns the learning rate and the norm of the gradient."""
        config, step, ddp = self.config, self.state.progress.step, self.wrapped.kind == "ddp"
        self.gates.apply(step, keep_every=ddp)
        if ddp and step in self.gates.thaw_steps():
            self.wrapped.wrap(step)
        rate = set_learning_rates(self.optimizer, config, step)
        # Dropout depends on (seed, step, rank) alone: no random state to save, none to be shifted.
        seed = zlib.crc32(f"{config.seeds['data_seed']} {step} {self.group.rank}".encode())
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:  # all generators; to look for devices takes a quarter of a millisecond
            torch.manual_seed(seed)

        n = self.pieces
        pieces = list(zip(*(t.chunk(n) for t in batch), strict=True))
        losses = [self.backward(p, 1 / n, last=p is pieces[-1]) for p in pieces]
        total = sum(losses[1:], losses[0])
        if ddp:
            self.gates.drop_closed(step)

        self.scaler.unscale_(self.optimizer)
        norm = self.optimizer.clip(config.clip)
        good = self.guard.watch(step, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

        self.window += torch.stack([total, self.one]).where(good, 0.0)
        self.state.progress.step += 1
        self.state.progress.tokens += batch[0].numel() * self.group.world
        return rate, norm

    def backward(self, piece: Batch, share: float, *, last: bool) -> Tensor:
        """Add the gradient of a piece's share of the loss to the others'; returns that share."""
        with self.wrapped.synchronised(last):
            with self.precision.autocast(self.device):
                loss: Tensor = self.wrapped.stepped(*piece)
                loss = loss if share == 1 else loss * share
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def log(self, rate: float, norm: float) -> None:
        """One line of metrics, with the mean loss since the line before."""
        p = self.state.progress
        self.guard.check(self.task.where())
        total, good = self.group.sum(self.window).tolist()
        self.window.zero_()
        if not math.isfinite(total):
            raise NonFiniteError(f"the loss is not finite at step {p.step}; last.pt is from before")
        if not good:  # every step of these was passed over
            return
        loss, recent = total / good, p.step_seconds[-self.config.log_interval :]
        pace = sum(recent) / len(recent)
        speed, ppl = p.tokens / p.step / pace, math.exp(min(loss, 700.0))
        self.record.metrics(
            "train", p.step, loss=loss, lr=rate, grad_norm=norm if math.isfinite(norm) else None,
            tokens=p.tokens, seconds=round(p.seconds, 6),
        )  # fmt: skip
        self.record.update(p.step, loss=loss, ppl=ppl, tokens_per_second=speed)
        self.console.step(p.step, loss, ppl, speed, (self.config.max_steps - p.step) * pace)

    def evaluate(self, split: str, *, full: bool) -> dict[str, Any]:
        """Metrics of a split; touches no weight and no random state."""
        began = time.perf_counter()
        self.model.eval()
        result = self.task.evaluate(self.loss, split, self.group, full=full)
        self.model.train()
        step, seconds = self.state.progress.step, time.perf_counter() - began
        self.state.progress.validation_seconds += seconds
        self.record.metrics(
            "eval", step, split=split, **result, seconds=round(seconds, 6), full=full
        )
        numbers = "  ".join(f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float))
        log.info("step %d  %s%s: %s", step, split, " (all)" if full else "", numbers)
        return result

    def loss(self, *batch: Tensor) -> Tensor:
        """The mean loss of a batch, without gradients."""
        with torch.no_grad(), self.precision.autocast(self.device):
            result: Tensor = self.wrapped.compiled(*batch)
        return result

    def evaluate_and_keep_best(self) -> None:
        """Evaluate on the fixed stretch; the best weights so far become `best.pt`."""
        p = self.state.progress
        loss = self.evaluate("val", full=False)["loss"]
        for name, value in self.task.probe(self.model).items():
            self.record.metrics("probe", p.step, name=name, value=value)
        if loss < p.best_loss:
            p.best_loss, p.best_step = loss, p.step
            if self.copies:
                best = {
                    "schema": 1,
                    "step": p.step,
                    "val_loss": loss,
                    "model": self.state.weights(),
                }
                self.submit(checkpoint.BEST, best)

    def save(self) -> None:
        """Copy the state and hand it to the writer: training waits for the copy only."""
        self.guard.check(self.task.where())
        frozen = hashes(self.model, self.plan.values.keys())
        if moved := [name for name, h in frozen.items() if h != self.state.first_hashes[name]]:
            raise RuntimeError(f"frozen tensors moved: {', '.join(moved)}")
        if self.wrapped.kind == "ddp":
            self.group.require_equal(self.model, self.state.progress.step)
        self.state.progress.wall_seconds = time.time() - self.began
        self.window.copy_(self.group.sum(self.window) / self.group.world)  # of all, not of rank 0
        if self.copies:
            self.submit(checkpoint.LAST, self.state.snapshot() | {"seeds": dict(self.config.seeds)})

    @property
    def copies(self) -> bool:
        """Whether this process must take part in copying the state: under FSDP, all hold a part."""
        return self.group.first or self.wrapped.kind == "fsdp"

    def submit(self, name: str, content: dict[str, Any]) -> None:
        """Give a copy to the writer, if this process writes and still owns the folder."""
        if self.writer and self.lock:
            self.lock.check()
            self.writer.submit(name, content)

    def flush(self) -> None:
        """Wait until everything saved is on disk."""
        if self.writer:
            self.writer.flush()

    def audit(self) -> dict[str, Any]:
        """The freeze audit of the model as it is trained, after all wrapping."""
        step = self.state.progress.step
        before, thawed = self.state.first_hashes if step else None, self.gates.thawed_by(step)
        proof = audit(self.model, self.plan, optimizer=self.optimizer, before=before, thawed=thawed)
        self.record.json("freeze_audit.json", proof)
        if proof["verdict"] == "fail":
            raise RuntimeError(f"the freeze audit failed: {'; '.join(proof['problems'])}")
        return proof

    def finish(self) -> None:
        """The evaluations of whole splits, the audit, and what else the report reads."""
        final = self.evaluate("val", full=True)
        if self.config.test:
            self.evaluate("test", full=True)
        self.audit()
        self.flush()
        self.state.progress.wall_seconds = time.time() - self.began
        write_summaries(
            self.config, self.task, self.group, self.record, self.state, final, self.precision.name
        )
        shown = {key: final[key] for key in ("loss", "ppl", "accuracy") if key in final}
        self.record.update(self.state.progress.step, **shown)
