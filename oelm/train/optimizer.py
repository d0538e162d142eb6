"""AdamW with decay on matrices only, the learning-rate schedules, and the guard of each step."""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from oelm.freezing import Gates, plain_name
from oelm.kernels.functions import adamw_, plain, total_norm
from oelm.methods import Method
from oelm.train.config import TrainConfig
from oelm.train.errors import NonFiniteError

SCALER_SKIPS = 20  # in a row
WSD_DECAY = 0.2  # of training: the length of the decay at the end of `wsd`


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step (counted from 0), before any multiplier."""
    high, low, warmup = config.max_lr, config.last_lr, config.warmup_steps
    if step < warmup:
        return high * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.max_steps - 1 - warmup)
    if config.schedule == "cosine":
        return low + (high - low) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return high + (low - high) * progress
    if config.schedule == "wsd":
        start = (1 - WSD_DECAY) * (config.max_steps - 1)
        return high + (low - high) * max(0.0, (step - start) / (config.max_steps - 1 - start or 1))
    return high


def _undecorated(name: str) -> Any:
    method = getattr(torch.optim.AdamW, name)
    return getattr(method, "__wrapped__", method)


class AdamW(torch.optim.AdamW):
    """torch's, without the decorators that import its compiler: 70 MiB and a second of every run.

    Where our kernels can, they take the step, and clip gradients while they read them.
    """

    shrink = 1.0

    add_param_group = _undecorated("add_param_group")
    _step_by_torch = _undecorated("step")
    _zero_grad_by_torch = _undecorated("zero_grad")

    def zero_grad(self, set_to_none: bool = True) -> Any:
        """Forget the gradients, without looking for a profiler first."""
        if not set_to_none:
            return self._zero_grad_by_torch(set_to_none=False)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def clip(self, largest: float) -> Tensor:
        """Have the next step take the gradients at a norm of at most `largest` (0: as they are).

        Returns the norm before.
        """
        norm = total_norm(self._gradients())
        if hasattr(norm, "full_tensor"):  # FSDP: each rank holds a part of it
            norm = norm.full_tensor()
        if largest and norm.is_cpu:
            self.shrink = min(1.0, largest / (float(norm) + 1e-6))
        elif largest:  # a GPU is not asked for the norm: that would be to wait for it
            parameters = [p for group in self.param_groups for p in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return norm

    def _gradients(self) -> list[Tensor]:
        found = (p.grad for group in self.param_groups for p in group["params"])
        return [grad for grad in found if grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update everything that has a gradient, unless `found_inf` says that one is not finite."""
        groups = []
        shrink, self.shrink = self.shrink, 1.0
        for group in self.param_groups:
            lists = self._lists(group)
            groups.append((group, lists))
            # What the optimizer knows of a tensor is like that tensor.
            if not plain([*lists[0], *lists[1]]) or self._unusual(closure, group):
                if shrink < 1:
                    torch._foreach_mul_(self._gradients(), shrink)
                return self._step_by_torch(closure)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf:
            return None
        for group, lists in groups:
            settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            adamw_(*lists, shrink=shrink, **settings)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it, to look for hooks and a profiler

    def _lists(self, group: dict[str, Any]) -> tuple[list[Tensor], ...]:
        """The group's tensors that have a gradient, these, both averages, and their numbers of steps."""
        tensors = [p for p in group["params"] if p.grad is not None]
        states = [self.state[p] for p in tensors]
        if not all(states):
            lists: tuple[list[Tensor], ...] = ([], [], [], [], [])
            self._init_group(group, *lists[:4], [], lists[4])  # type: ignore[no-untyped-call, call-arg]
            return lists
        known = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        return tensors, [p.grad for p in tensors], *known

    def _unusual(self, closure: Any, group: dict[str, Any]) -> bool:
        """Whether something is asked for that only torch's step does."""
        scaled = getattr(self, "grad_scale", None) is not None
        return bool(closure or scaled or group["amsgrad"] or group["maximize"])


def build_optimizer(model: nn.Module, method: Method, gates: Gates, config: TrainConfig) -> AdamW:
    """Every parameter that ever trains, in groups that share decay, multiplier and thaw step."""
    groups: dict[tuple[bool, float, int], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        name = plain_name(name)
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        key = decays, _multiplier(name, method), gates.first_step(name)
        groups.setdefault(key, []).append(parameter)
    return AdamW(
        [
            {
                "params": parameters,
                "weight_decay": config.weight_decay if decays else 0.0,
                "multiplier": multiplier,
                "first_step": first_step,
            }
            for (decays, multiplier, first_step), parameters in groups.items()
        ],
        lr=config.max_lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


# Vectors that only a method adds, and the biases of q and k.
SMALL = re.compile(r"\.(gain|input_gain|temperature|kernel_[qk]|[qk]\.bias)$")


def _multiplier(name: str, method: Method) -> float:
    layer = re.search(r"\bblocks\.(\d+)\.", name)
    by_layer = method.lr_by_layer[int(layer[1])] if layer and method.lr_by_layer else 1.0
    return by_layer * (method.small_lr if SMALL.search(name) else 1.0)


def set_learning_rates(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> float:
    """Give each group its rate for this step; what has just thawed is warmed up on its own."""
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        since = step - group["first_step"]
        thawing = group["first_step"] > 0 and since < config.thaw_warmup
        warm = max(0, since + 1) / config.thaw_warmup if thawing else 1.0
        group["lr"] = rate * group["multiplier"] * warm
    return rate


class Guard:
    """Lets a step with a non-finite gradient change nothing, without waiting for the device.

    The fused optimizer reads the verdict on the device itself; the host looks at the count only
    when it reads results anyway, and always before a save.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        allowed: int,
        device: torch.device,
        *,
        scaled: bool = False,
    ) -> None:
        # With fp16 the scaler skips steps by itself, as part of finding its scale: only many in a
        # row mean that there is none.
        self.optimizer, self.scaled = optimizer, scaled
        self.allowed = max(allowed, SCALER_SKIPS) if scaled else allowed
        self.count = torch.zeros((), dtype=torch.long, device=device)
        self.latest = torch.full((), -1, dtype=torch.long, device=device)
        self.good = torch.ones((), dtype=torch.bool, device=device)

    def watch(self, step: int, norm: Tensor) -> Tensor:
        """Note whether this step is good (a boolean tensor); call between clipping and stepping."""
        if norm.is_cpu and not self.scaled and math.isfinite(norm):  # a CPU may be asked at once
            self.optimizer.found_inf = None  # type: ignore[attr-defined]
            return self.good
        good = norm.isfinite()
        if self.scaled:
            self.count *= ~good
        else:
            self.optimizer.found_inf = (~good).float()  # type: ignore[attr-defined]
        self.count += ~good
        self.latest = torch.where(good, self.latest, step)
        return good

    def check(self, batch: str) -> None:
        """Raise if there were more bad steps than allowed."""
        if (found := int(self.count)) > self.allowed:
            tolerated = f" ({found} such steps, {self.allowed} allowed)" if self.allowed else ""
            raise NonFiniteError(
                f"the gradient of step {int(self.latest) + 1} is not finite{tolerated}; "
                f"its batch is {batch.format(step=int(self.latest))}; last.pt is from before. "
                "Lower max_lr, lengthen the warm-up, or allow some with --skip_bad_steps"
            )
