"""Who trains when, how much is frozen, and the proof of both.

What should be so is a `Plan`, made from a configuration alone; what is so is read off the tensors.
The audit compares the two. Frozen weights are buffers, so everything here walks buffers too: a
count that walks `parameters()` only misses them, and freezing then looks as if it were not active.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oelm.methods import ORTHONORMAL, Method
from oelm.model.projection import Projection
from oelm.projections import orthogonality_error

Role = Literal["trained", "gated", "frozen"]
WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_checkpoint_wrapped_module)(?=\.)")


def plain_name(name: str) -> str:
    """A tensor's name without what DDP, compile and checkpointing put in front of it."""
    return WRAPPERS.sub("", name).lstrip(".")


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and every stored buffer once, by its plain name, in the model's order."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield plain_name(name), tensor


def roles(model: nn.Module) -> dict[str, Role]:
    """What each tensor of a freshly built model is: trained, gated or frozen."""
    gated = {name for name, _ in gated_parameters(model)}
    return {
        name: "gated" if name in gated else "trained" if isinstance(t, nn.Parameter) else "frozen"
        for name, t in weights(model)
    }


def gated_parameters(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """The matrices that train late or not in every step, with their projections."""
    for name, module in model.named_modules():
        if isinstance(module, Projection) and (module.trains_from > 0 or module.every > 1):
            for tensor in ("weight", "bias"):
                if isinstance(getattr(module, tensor), nn.Parameter):
                    if tensor == "bias" and module.treatment.bias:
                        continue  # added by the method: it trains from the start
                    yield plain_name(f"{name}.{tensor}"), module


class Gates:
    """Opens and closes the parameters that thaw late or train every N steps.

    They are in the optimizer from step 0; while closed they get no gradient, so it skips them:
    no decay, no moments, and the count of their Adam steps starts when they open.
    """

    def __init__(self, model: nn.Module, max_steps: int) -> None:
        parameters = {plain_name(name): p for name, p in model.named_parameters()}
        self.entries = [
            (
                name,
                parameters[name],
                math.ceil(projection.trains_from * max_steps),
                projection.every,
            )
            for name, projection in gated_parameters(model)
        ]

    def open_at(self, step: int) -> set[str]:
        """The gated parameters that train in this step (steps count from 0)."""
        return {n for n, _, first, every in self.entries if step >= first and step % every == 0}

    def thawed_by(self, step: int) -> set[str]:
        """The gated parameters that have trained in some step before this one."""
        return {
            name
            for name, _, first, every in self.entries
            if math.ceil(first / every) * every < step
        }

    def thaw_steps(self) -> list[int]:
        """The steps at which parameters thaw for good: where a wrapper must be made anew."""
        return sorted({first for _, _, first, _ in self.entries if first > 0})

    def first_step(self, name: str) -> int:
        """The step from which on a parameter may train; 0 for one that is not gated."""
        return next((first for n, _, first, _ in self.entries if n == name), 0)

    def apply(self, step: int, *, keep_every: bool = False) -> None:
        """Set `requires_grad` for this step; `keep_every` leaves every-N parameters on (for DDP)."""
        for _, parameter, first, every in self.entries:
            parameter.requires_grad_(step >= first and (keep_every or step % every == 0))

    def drop_closed(self, step: int) -> None:
        """Discard gradients of what is closed in this step (needed after `keep_every`)."""
        opened = self.open_at(step)
        for name, parameter, _, _ in self.entries:
            if name not in opened:
                parameter.grad = None


@dataclass(frozen=True)
class Plan:
    """What a model must hold: each tensor's shape and role and, where known, its frozen value."""

    shapes: Mapping[str, tuple[int, ...]]
    roles: Mapping[str, Role]
    values: Mapping[str, Tensor]
    freezes: bool
    """Whether the method says that something is frozen."""

    @staticmethod
    def of(model: nn.Module, method: Method, *, with_values: bool = True) -> "Plan":
        """The plan that a freshly built model embodies: build one from the configuration for this."""
        role = roles(model)
        return Plan(
            shapes={name: tuple(t.shape) for name, t in weights(model)},
            roles=role,
            values={
                name: t.detach()
                for name, t in weights(model)
                if with_values and role[name] == "frozen"
            },
            freezes=method.freezes,
        )


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all processes where FSDP has sharded it."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()


def sha256(tensor: Tensor) -> str:
    """The hash of a tensor's bytes, wherever it lives and however it is sharded."""
    data = whole(tensor).cpu().contiguous().view(torch.uint8) if tensor.numel() else torch.empty(0)
    return hashlib.sha256(data.numpy().data).hexdigest()


def hashes(model: nn.Module, only: Collection[str] | None = None) -> dict[str, str]:
    """SHA-256 of every weight, or of the named ones."""
    return {name: sha256(t) for name, t in weights(model) if only is None or name in only}


def count(model: nn.Module) -> dict[str, Any]:
    """Elements in total, trainable (now or later) and frozen, by layer too."""
    role = roles(model)
    totals: Counter[str] = Counter()
    by_layer: dict[str, Counter[str]] = {}
    frozen_bytes = 0
    for name, tensor in weights(model):
        if not tensor.is_floating_point():
            continue  # an order of channels is not a weight
        kind = "frozen" if role[name] == "frozen" else "trainable"
        totals[kind] += tensor.numel()
        by_layer.setdefault(_layer(name), Counter())[kind] += tensor.numel()
        if kind == "frozen":
            frozen_bytes += tensor.numel() * tensor.element_size()
    return {
        "total": totals.total(),
        "trainable": totals["trainable"],
        "frozen": totals["frozen"],
        "frozen_bytes": frozen_bytes,
        "by_layer": {
            layer: {"trainable": c["trainable"], "frozen": c["frozen"]}
            for layer, c in by_layer.items()
        },
    }


def _layer(name: str) -> str:
    match = re.search(r"(?:^|\.)(?:blocks|layers?|h|block)\.(\d+)\.", name)
    return f"layer {match[1]}" if match else name.split(".")[0]


def audit(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before: Mapping[str, str] | None = None,
    thawed: Collection[str] = (),
) -> dict[str, Any]:
    """Compare a model with its plan; `before` are the hashes from before some steps of training.

    `thawed` names the gated parameters that may have moved since. The verdict is `pass` when the
    list of problems is empty.
    """
    present = dict(weights(model))
    optimized = (
        {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else None
    )
    problems, notes = _compare_layout(present, plan)
    rows = []
    for name, tensor in present.items():
        role = plan.roles.get(name)
        after = sha256(tensor)
        row: dict[str, Any] = {
            "name": name,
            "kind": "parameter" if isinstance(tensor, nn.Parameter) else "buffer",
            "shape": list(tensor.shape),
            "role": role,
            "requires_grad": tensor.requires_grad,
            "in_optimizer": None if optimized is None else id(tensor) in optimized,
            "sha256_before": before.get(name) if before else None,
            "sha256_after": after,
            "moved": before[name] != after if before and name in before else None,
            "orthogonality_error": None,
        }
        rows.append(row)
        problems += _problems(row, thawed)
        if name in plan.values and row["moved"] is not True:
            verdict = _against_seed(tensor, plan.values[name], after)
            if verdict == "differs":
                problems.append(
                    f"{name} does not hold the value that its seed gives: it was overwritten"
                )
            elif verdict == "rounded":
                notes.append(
                    f"{name} equals its seed's value up to rounding (another LAPACK made it)"
                )
    _add_orthogonality(model, rows)
    return {
        "schema": 1,
        **count(model),
        "verdict": "fail" if problems else "pass",
        "problems": problems,
        "notes": notes,
        "tensors": rows,
    }


def _compare_layout(present: Mapping[str, Tensor], plan: Plan) -> tuple[list[str], list[str]]:
    problems = []
    for name, shape in plan.shapes.items():
        if name not in present:
            problems.append(
                f"{name} is missing: it is not stored, so counts and checkpoints leave it out"
            )
        elif tuple(present[name].shape) != shape:
            found = tuple(present[name].shape)
            problems.append(
                f"{name} is {found}, the configuration says {shape}: another model was built"
            )
    problems += [
        f"{name} is not part of the configured model" for name in present if name not in plan.shapes
    ]
    if plan.freezes and set(plan.roles.values()) == {"trained"}:
        problems.append("the method freezes, but no tensor of this model is frozen or gated")
    return problems, []


def _problems(row: Mapping[str, Any], thawed: Collection[str]) -> list[str]:
    """What is wrong with one tensor, given its role."""
    name, role = row["name"], row["role"]
    found = []
    if role == "frozen":
        if row["requires_grad"]:
            found.append(f"{name} is frozen but requires a gradient")
        if row["in_optimizer"]:
            found.append(f"{name} is frozen but the optimizer holds it (it would be decayed)")
        if row["moved"]:
            found.append(f"{name} is frozen but moved")
        return found
    if role is None:
        return found
    if row["kind"] == "buffer":
        found.append(f"{name} should train but is a buffer")
    if row["in_optimizer"] is False:
        found.append(f"{name} should train but the optimizer does not know it")
    if role == "trained" and not row["requires_grad"]:
        found.append(f"{name} should train but requires no gradient")
    if row["moved"] is False and (role == "trained" or name in thawed):
        found.append(f"{name} should train but did not move")
    if row["moved"] and role == "gated" and name not in thawed:
        found.append(f"{name} moved before its thaw")
    return found


def _against_seed(
    tensor: Tensor, expected: Tensor, found: str
) -> Literal["equal", "rounded", "differs"]:
    if found == sha256(expected):
        return "equal"
    same = tensor.shape == expected.shape
    if same and torch.allclose(
        tensor.detach().cpu().float(), expected.cpu().float(), atol=1e-6, rtol=1e-5
    ):
        return "rounded"
    return "differs"


def _add_orthogonality(model: nn.Module, rows: list[dict[str, Any]]) -> None:
    by_name = {row["name"]: row for row in rows}
    for name, module in model.named_modules():
        if not isinstance(module, Projection) or module.treatment.init not in ORTHONORMAL:
            continue
        row = by_name.get(plain_name(f"{name}.weight"))
        if row is not None and isinstance(module.weight, Tensor) and module.frozen_weight is None:
            heads = 1 if module.treatment.init == "global" else module.heads
            row["orthogonality_error"] = orthogonality_error(whole(module.weight), heads)
