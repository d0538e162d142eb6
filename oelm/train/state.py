"""Everything that a run continues from, gathered into one mapping and put back."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from oelm.freezing import plain_name
from oelm.train.optimizer import Guard


@dataclass
class Progress:
    """How far a run is. Plain numbers, all in the checkpoint."""

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


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's stored tensors on the CPU, whole even where they are sharded."""
    return {plain_name(name): _whole(t) for name, t in model.state_dict().items()}


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    guard: Guard,
    window: Tensor,
    progress: Progress,
) -> dict[str, Any]:
    """The full state as CPU tensors and plain values; under FSDP all processes must call it."""
    moments = {
        plain_name(name): {key: _whole(value) for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    return {
        "schema": 1,
        "step": progress.step,
        "model": weights(model),
        # By name rather than by number, so that any number of processes can read it.
        "optimizer": moments,
        "scaler": scaler.state_dict(),
        "bad_steps": [int(guard.count), int(guard.latest)],
        "window": _whole(window),
        "progress": dataclasses.asdict(progress),
    }


def restore(
    content: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    guard: Guard,
    window: Tensor,
) -> Progress:
    """Put a snapshot back, into a model on any device and sharded in any way."""
    own = {plain_name(name): t for name, t in model.state_dict(keep_vars=True).items()}
    if own.keys() != content["model"].keys():
        differing = sorted(own.keys() ^ content["model"].keys())
        raise RuntimeError(f"the checkpoint is of another model; differing: {differing[:4]}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_like(content["model"][name], tensor))
        window.copy_(content["window"])
        guard.count.fill_(content["bad_steps"][0])
        guard.latest.fill_(content["bad_steps"][1])
    for name, parameter in model.named_parameters():
        if moments := content["optimizer"].get(plain_name(name)):
            optimizer.state[parameter] = {
                # Adam's count of steps is a number of the optimizer's own, never sharded.
                key: value.to(parameter.device) if value.ndim == 0 else _like(value, parameter)
                for key, value in moments.items()
            }
    scaler.load_state_dict(content["scaler"])
    return Progress(**content["progress"])


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", copy=True)


def _like(value: Tensor, target: Tensor) -> Tensor:
    """`value` where `target` lives, and cut as `target` is."""
    value = value.to(target.device)
    if isinstance(target, DTensor):
        return distribute_tensor(value, target.device_mesh, target.placements)
    return value.clone() if value.ndim else value
