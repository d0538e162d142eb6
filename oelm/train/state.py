"""Everything that a run continues from, gathered into one mapping and put back."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.freezing import plain_name, whole
from oelm.train.optimizer import Guard


@dataclass
class Progress:
    """How far a run is, in plain numbers."""

    step: int = 0
    tokens: int = 0
    best_loss: float = float("inf")
    best_step: int = 0
    seconds: float = 0.0
    """Training time, without evaluation and saving."""
    wall_seconds: float = 0.0
    validation_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    """Of each step since the start, for the statistics of step times."""


@dataclass
class State:
    """The parts of a run that change while it trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    guard: Guard
    window: Tensor
    """Sum of losses and number of good steps since the last line of metrics."""
    first_hashes: dict[str, str]
    """SHA-256 of every weight at step 0, against which the audit is held."""
    progress: Progress = field(default_factory=Progress)

    def weights(self) -> dict[str, Tensor]:
        """A copy of the stored tensors on the CPU, whole even where they are sharded."""
        return {plain_name(name): _copied(t) for name, t in self.model.state_dict().items()}

    def snapshot(self) -> dict[str, Any]:
        """The full state as CPU tensors and plain values; under FSDP all processes must call it."""
        moments = {
            plain_name(name): {k: _copied(v) for k, v in self.optimizer.state[p].items()}
            for name, p in self.model.named_parameters()
            if p in self.optimizer.state
        }
        return {
            "schema": 1,
            "step": self.progress.step,
            "model": self.weights(),
            # By name rather than by number, so that any number of processes can read it.
            "optimizer": moments,
            "scaler": self.scaler.state_dict(),
            "bad_steps": [int(self.guard.count), int(self.guard.latest)],
            "window": _copied(self.window),
            "first_hashes": self.first_hashes,
            "progress": dataclasses.asdict(self.progress),
        }

    def restore(self, content: dict[str, Any]) -> None:
        """Put a snapshot back, into a model on any device and sharded in any way."""
        own = {plain_name(name): t for name, t in self.model.state_dict(keep_vars=True).items()}
        if differing := own.keys() ^ content["model"].keys():
            raise RuntimeError(f"the checkpoint is of another model; see {sorted(differing)[:4]}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(_like(content["model"][name], tensor))
            self.window.copy_(content["window"])
            self.guard.count.fill_(content["bad_steps"][0])
            self.guard.latest.fill_(content["bad_steps"][1])
        for name, parameter in self.model.named_parameters():
            if moments := content["optimizer"].get(plain_name(name)):
                self.optimizer.state[parameter] = {
                    key: _like(value, parameter) for key, value in moments.items()
                }
        self.scaler.load_state_dict(content["scaler"])
        self.first_hashes = content["first_hashes"]
        self.progress = Progress(**content["progress"])


def _copied(tensor: Tensor) -> Tensor:
    return whole(tensor).to("cpu", copy=True)


def _like(value: Tensor, target: Tensor) -> Tensor:
    """`value` where `target` lives, and cut as `target` is (but for Adam's count, a scalar)."""
    value = value.to(target.device)
    if hasattr(target, "placements") and value.ndim:
        from torch.distributed.tensor import (
            distribute_tensor,
        )  # slow to import, needed by FSDP only

        return distribute_tensor(value, target.device_mesh, target.placements)  # type: ignore[attr-defined]
    return value
