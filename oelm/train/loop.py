"""The training loop: fast, exact, and hard to break."""

import contextlib
import json
import logging
import math
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oelm.errors import UserError
from oelm.freezing import Gates, Plan, audit, hashes
from oelm.train import checkpoint, parallel, precision, timing
from oelm.train.checkpoint import BEST, LAST, Writer
from oelm.train.config import TrainConfig
from oelm.train.console import Console
from oelm.train.errors import StoppedError
from oelm.train.lock import FolderLock
from oelm.train.optimizer import Guard, build_optimizer, clip_gradients, set_learning_rates
from oelm.train.record import Record, environment
from oelm.train.signals import Signals
from oelm.train.state import Progress, restore, snapshot, weights
from oelm.train.task import Batch, LanguageTask, Task

log = logging.getLogger(__name__)


def train(config: TrainConfig) -> Path:
    """Train one run to its end, or on from where it stopped; returns its folder."""
    config.out_dir.mkdir(parents=True, exist_ok=True)
    first = int(os.environ.get("RANK", 0)) == 0
    record = Record(config, writes=first)
    with contextlib.ExitStack() as stack:
        lock = FolderLock(config.out_dir, on_beat=record.beat) if first else None
        stack.enter_context(lock or contextlib.nullcontext())
        console = stack.enter_context(Console(config, first=first))
        group = stack.enter_context(parallel.processes(config))
        task = LanguageTask(config)
        record.config(config, task.resolved())
        if group.any(first and _finished(config)):
            log.info("%s is finished already", config.out_dir)
            return config.out_dir
        stack.enter_context(record)
        signals = stack.enter_context(Signals())
        writer = stack.enter_context(Writer(config.out_dir, keep=config.keep)) if first else None
        trainer = Trainer(config, task, group, record, console)
        trainer.writer, trainer.lock = writer, lock
        trainer.resume()
        trainer.run(signals)
        trainer.finish()
    return config.out_dir


class Trainer:
    """One run: the model, its optimizer, and how far they are."""

    writer: Writer | None = None
    lock: FolderLock | None = None

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        group: parallel.Processes,
        record: Record,
        console: Console,
    ) -> None:
        self.config, self.task, self.group = config, task, group
        self.record, self.console = record, console
        method, device = config.resolved_method(), group.device
        sharded = config.parallel == "fsdp" and group.world > 1
        self.precision = precision.choose(config.precision, device, sharded=sharded)

        self.model = task.build()
        plan = Plan.of(self.model, method)
        self.plan = replace(plan, values={name: v.clone() for name, v in plan.values.items()})
        self.first_hashes = hashes(self.model)
        self.model.to(device).train()
        self.wrapped = parallel.Wrapped(self.model, config, group)
        self.gates = Gates(self.model, config.max_steps)
        self.optimizer = build_optimizer(self.model, method, self.gates, config)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision.name == "fp16")
        self.guard = Guard(self.optimizer, config.skip_bad_steps, device)
        self.window = torch.zeros(
            2, device=device
        )  # loss and number of good steps since the last line
        self.progress = Progress()
        self.began = time.perf_counter()

    def resume(self) -> None:
        """Continue from the folder's newest whole checkpoint, if it has one, and prove the freezing."""
        content = checkpoint.read_last(self.config.out_dir)
        if content is not None and not self.config.resume:
            raise UserError(
                f"{self.config.out_dir} holds a run already; drop --no-resume or choose another --out_dir"
            )
        if content is not None:
            self.first_hashes = content["first_hashes"]
            self.progress = restore(
                content, self.model, self.optimizer, self.scaler, self.guard, self.window
            )
            log.info("continuing from step %d", self.progress.step)
        self.began -= self.progress.wall_seconds
        self.clock = timing.Clock(self.progress)
        self.record.rewind(self.progress.step)
        self.gates.apply(self.progress.step, keep_every=True)
        self.wrapped.wrap()
        result = self.audit()
        if result["verdict"] == "fail":
            raise RuntimeError(f"the freeze audit failed before training: {result['problems']}")
        about = environment(str(self.group.device), self.precision.name, torch.get_num_threads())
        self.record.json("environment.json", {**about, "processes": self.group.world})
        log.info(
            "%s: %s trained, %s frozen; %s, %s (%s), %d × %d threads",
            self.config.resolved_method().name,
            f"{result['trainable']:,}",
            f"{result['frozen']:,}",
            self.group.device,
            self.precision.name,
            self.precision.reason,
            self.group.world,
            torch.get_num_threads(),
        )

    def run(self, signals: Signals) -> None:
        """All steps, with logging, evaluation and saving where they are due."""
        config, p = self.config, self.progress
        self.clock.start()
        for batch in self.task.batches(p.step, self.group):
            rate, norm = self.step(batch)
            last = p.step == config.max_steps
            logs = last or p.step % config.log_interval == 0
            if logs:
                self.log(rate, norm)
            elif self.group.device.type == "cpu":
                self.clock.lap()
            evaluates = last or p.step % config.eval_interval == 0
            if evaluates:
                self.evaluate_and_keep_best()
            stops = self.group.any(signals.received is not None) and not last
            saves = last or stops or p.step % config.save_interval == 0
            if saves:
                self.save()
            if stops:
                self.flush()
                log.warning("stopped by %s at step %d; saved", signals.received, p.step)
                raise StoppedError(f"stopped at step {p.step}")
            if evaluates or saves:
                self.clock.start()

    def step(self, batch: Batch) -> tuple[float, Tensor]:
        """One optimizer step; returns the learning rate and the norm of the gradient."""
        config, step, ddp = self.config, self.progress.step, self.wrapped.kind == "ddp"
        self.gates.apply(step, keep_every=ddp)
        if ddp and step in self.gates.thaw_steps():
            self.wrapped.wrap()
        rate = set_learning_rates(self.optimizer, config, step)
        # Dropout depends on (seed, step, rank) alone: there is no random state to save or to shift.
        torch.manual_seed(
            zlib.crc32(f"{config.seeds['data_seed']}/{step}/{self.group.rank}".encode())
        )

        pieces = list(zip(*(t.chunk(config.grad_accumulation) for t in batch), strict=True))
        total = torch.zeros((), device=self.group.device)
        for i, piece in enumerate(pieces):
            with self.wrapped.synchronised(i == len(pieces) - 1):
                with self.precision.autocast(self.group.device):
                    loss = self.wrapped.stepped(*piece) / len(pieces)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        if ddp:
            self.gates.drop_closed(step)

        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.model.parameters(), config.clip)
        good = self.guard.watch(step, norm, scaled=self.scaler.is_enabled())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

        self.window += torch.stack([torch.where(good, total, 0.0), good.to(total.dtype)])
        self.progress.step += 1
        self.progress.tokens += batch[0].numel() * self.group.world
        return rate, norm

    def log(self, rate: float, norm: Tensor) -> None:
        """One line of metrics: the mean loss since the line before."""
        p = self.progress
        self.guard.check(self.task.where())
        total, good = self.group.sum(self.window).tolist()
        self.window.zero_()
        self.clock.lap()
        if not good:
            return
        loss, norm_value = total / good, float(norm)
        recent = p.step_seconds[-self.config.log_interval :]
        pace = sum(recent) / len(recent)
        speed, ppl = p.tokens / p.step / pace, math.exp(min(loss, 700.0))
        self.record.metrics(
            "train", p.step, loss=loss, lr=rate,
            grad_norm=norm_value if math.isfinite(norm_value) else None,
            tokens=p.tokens, seconds=round(p.seconds, 6),
        )  # fmt: skip
        self.record.update(p.step, loss=loss, ppl=ppl, tokens_per_second=speed)
        self.console.step(p.step, loss, ppl, speed, (self.config.max_steps - p.step) * pace)

    def evaluate(self, split: str, *, full: bool) -> dict[str, Any]:
        """Metrics of a split; touches no random state and no weight."""
        began = time.perf_counter()
        self.model.eval()
        result = self.task.evaluate(self._forward, split, self.group, full=full)
        self.model.train()
        seconds = time.perf_counter() - began
        self.progress.validation_seconds += seconds
        self.record.metrics(
            "eval", self.progress.step, split=split, **result, seconds=round(seconds, 6), full=full
        )
        shown = "  ".join(f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float))
        log.info("step %d  %s%s: %s", self.progress.step, split, " (all)" if full else "", shown)
        return result

    def _forward(self, *batch: Tensor) -> Tensor:
        with torch.no_grad(), self.precision.autocast(self.group.device):
            result: Tensor = self.wrapped.compiled(*batch)
        return result

    def evaluate_and_keep_best(self) -> None:
        """Evaluate on the fixed stretch; the best weights so far become `best.pt`."""
        p = self.progress
        loss = self.evaluate("val", full=False)["loss"]
        if loss < p.best_loss:
            p.best_loss, p.best_step = loss, p.step
            if self.writer or self.wrapped.kind == "fsdp":
                content = {
                    "schema": 1,
                    "step": p.step,
                    "val_loss": loss,
                    "model": weights(self.model),
                }
                if self.writer:
                    self.writer.submit(BEST, content)

    def save(self) -> None:
        """Copy the state, and hand it to the writer: training waits for the copy only."""
        self.guard.check(self.task.where())
        frozen = hashes(self.model, self.plan.values.keys())
        if moved := [name for name, value in frozen.items() if value != self.first_hashes[name]]:
            raise RuntimeError(f"frozen tensors moved: {', '.join(moved)}")
        self.progress.wall_seconds = time.perf_counter() - self.began
        if self.writer or self.wrapped.kind == "fsdp":
            content = snapshot(
                self.model, self.optimizer, self.scaler, self.guard, self.window, self.progress
            )
            content |= {"first_hashes": self.first_hashes, "seeds": dict(self.config.seeds)}
            if self.writer and self.lock:
                self.lock.check()
                self.writer.submit(LAST, content)

    def flush(self) -> None:
        """Wait until what was saved is on disk."""
        if self.writer:
            self.writer.flush()

    def audit(self) -> dict[str, Any]:
        """The freeze audit of the model as it is trained, after all wrapping."""
        step = self.progress.step
        return audit(
            self.model,
            self.plan,
            optimizer=self.optimizer,
            before=self.first_hashes if step else None,
            thawed=self.gates.thawed_by(step),
        )

    def finish(self) -> None:
        """The full evaluations, the audit, the timings and a sample: what the report reads."""
        config, p, device = self.config, self.progress, self.group.device
        final = self.evaluate("val", full=True)
        if config.test:
            self.evaluate("test", full=True)
        self.gates.apply(p.step - 1, keep_every=True)
        proof = self.audit()
        self.record.json("freeze_audit.json", proof)
        flops = timing.step_flops(self.model, next(iter(self.task.batches(p.step - 1, self.group))))
        self.flush()
        if self.writer:
            best = self.task.build()
            best.load_state_dict(checkpoint.read(config.out_dir / BEST)["model"])
            self.record.json("samples.json", self.task.samples(best.eval()))
            p.wall_seconds = time.perf_counter() - self.began
            peak = timing.matmul_peak(device, self.precision.name)
            stats = timing.summary(config, p, flops, peak, device)
            results = {
                "final_perplexity": final.get("ppl"),
                "best_perplexity": math.exp(min(p.best_loss, 700.0)) if "ppl" in final else None,
                "final_accuracy": final.get("accuracy"),
                "checkpoint_bytes": (config.out_dir / LAST).stat().st_size,
            }
            self.record.json("timing_stats.json", {**stats, **results})
        self.record.update(p.step, **{k: final[k] for k in ("loss", "ppl") if k in final})
        if proof["verdict"] == "fail":
            raise RuntimeError(f"the freeze audit failed: {'; '.join(proof['problems'])}")


def _finished(config: TrainConfig) -> bool:
    try:
        state = json.loads((config.out_dir / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(state.get("state") == "finished")
