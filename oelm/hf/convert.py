"""Give any Hugging Face transformer a method's treatment, in one call."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oelm import freezing
from oelm.config import to_mapping
from oelm.errors import UserError
from oelm.freezing import Plan
from oelm.hf import layout
from oelm.hf.layout import Site
from oelm.methods import PROJECTIONS, TRAINED, Method, method
from oelm.model.projection import Projection

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Conversion:
    """What was done to a model: found as `model.oelm` on the result."""

    method: Method
    matched: dict[str, str]
    """Module name → the projections treated there, such as `q` or `q, k`."""
    plan: Plan = field(repr=False)
    frozen: dict[str, str] = field(repr=False)
    """SHA-256 of every frozen tensor when it was converted."""


class Split(nn.Module):
    """A fused projection as three, which can be frozen apart; its output is laid out as before."""

    def __init__(self, parts: Mapping[str, nn.Module], site: Site) -> None:
        super().__init__()
        self.q, self.k, self.v = (parts[name] for name in "qkv")
        self.interleaved, self.head_width = site.fusion == "interleaved", site.head_width

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, 3 · out]."""
        parts = [self.q(x), self.k(x), self.v(x)]
        if not self.interleaved:
            return torch.cat(parts, dim=-1)
        by_head = [part.view(*x.shape[:-1], -1, self.head_width) for part in parts]
        return torch.cat(by_head, dim=-1).flatten(-2)


def convert(
    model: Model,
    spec: str | Mapping[str, Any] | Method,
    *,
    seed: int = 0,
    frozen_seed: int | None = None,
) -> Model:
    """Treat the model's projections as the method says; `model.oelm` tells what was matched.

    A projection that the method leaves at its default is not touched, so `baseline` changes nothing.
    `init: keep` (as in `oelm_v2,qk.init=keep`) freezes the values that the model came with. The model
    is changed in place and returned; nothing is changed if any part of the method does not fit.
    A method that thaws during training needs `callbacks=[oelm.hf.Thaw()]` in the plain `Trainer`.
    """
    from oelm.hf.loading import TreatmentConfig

    chosen, fixed_seed = method(spec), seed if frozen_seed is None else frozen_seed
    matched = rebuild(model, chosen, seed, fixed_seed)
    conclude(model, chosen, matched)
    if isinstance(model, PreTrainedModel):  # kept by `save_pretrained`, read by `from_pretrained`
        model.config.quantization_config = TreatmentConfig(
            method=to_mapping(chosen), seed=seed, frozen_seed=fixed_seed
        )
    log.info("%s: %d modules treated: %s", chosen.name, len(matched), ", ".join(matched))
    return model


def rebuild(
    model: nn.Module, chosen: Method, seed: int | None, frozen_seed: int = 0
) -> dict[str, str]:
    """Put treated projections in place; without a seed their values are left to be loaded."""
    if isinstance(getattr(model, "oelm", None), Conversion):
        raise UserError("this model is converted already; convert a freshly loaded one")
    sites = layout.find(model)
    _check(model, chosen, sites)
    replacements = dict(_replacements(model, chosen, sites, seed, frozen_seed))
    for name, module in replacements.items():
        model.set_submodule(name, module)
    treated = {s.name: [p for p in s.projections if chosen.treatment(p) != TRAINED] for s in sites}
    return {name: ", ".join(treated[name]) for name in replacements}


def conclude(model: nn.Module, chosen: Method, matched: dict[str, str]) -> None:
    """Remember what a model with all its values must stay like."""
    plan = Plan.of(model, chosen, with_values=False)
    fixed = {name for name, role in plan.roles.items() if role == "frozen"}
    model.oelm = Conversion(chosen, matched, plan, freezing.hashes(model, fixed))  # type: ignore[assignment]


def audit(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The freeze audit of a converted model: its frozen tensors against their values at conversion."""
    conversion = getattr(model, "oelm", None)
    if not isinstance(conversion, Conversion):
        raise UserError("the model was not converted by oelm.hf.convert; there is nothing to audit")
    return freezing.audit(model, conversion.plan, optimizer=optimizer, before=conversion.frozen)


def _check(model: nn.Module, chosen: Method, sites: list[Site]) -> None:
    """Refuse what cannot be carried over to somebody else's attention, or matches nothing."""
    if chosen.temperature:
        raise UserError(
            f"method {chosen.name}: a temperature per head is part of OELM's own attention; for a converted "
            "model write temperature=false (a gain on q, as in q.gain=true, can do the same)"
        )
    if chosen.kernel:
        raise UserError(
            f"method {chosen.name}: a kernel of distance is part of OELM's own attention; for a converted "
            "model write kernel=false,small_lr=1 (with RoPE, qk.bias=true is a kernel)"
        )
    if chosen.lr_by_layer or chosen.small_lr != 1:
        raise UserError(
            f"method {chosen.name}: lr_by_layer and small_lr are for OELM's own models; a converted model's "
            "rates are set in its trainer's parameter groups"
        )
    layers = layout.depth(sites)
    for site in sites:
        if site.head_width:
            rows = layout.shape(model.get_submodule(site.name))[0] // len(site.projections)
            chosen.check(layers[site.stack], rows // site.head_width)
    present = {p for site in sites for p in site.projections}
    for projection in PROJECTIONS:
        if chosen.treatment(projection) != TRAINED and projection not in present:
            raise UserError(
                f"method {chosen.name} treats `{projection}`, but no module of {type(model).__name__} "
                "is recognised as that; nothing was converted"
            )


def _replacements(
    model: nn.Module, chosen: Method, sites: list[Site], seed: int | None, frozen_seed: int
) -> Iterator[tuple[str, nn.Module]]:
    layers = layout.depth(sites)
    shared = _sharing(model)
    done: dict[int, nn.Module] = {}
    for site in sites:
        if all(chosen.treatment(p) == TRAINED for p in site.projections):
            continue
        old = model.get_submodule(site.name)
        _check_ties(site, old, shared, sites, chosen)
        if id(old.weight) in done:  # tied to one before: it stays so
            yield site.name, done[id(old.weight)]
            continue
        parts: dict[str, nn.Module] = {}
        for projection, (weight, bias) in _matrices(old, site).items():
            label = f"{site.name}.{projection}" if site.fusion else site.name
            treatment = chosen.treatment(projection)
            if treatment == TRAINED:
                parts[projection] = _linear(weight, bias)
                continue
            with torch.device(weight.device):
                new = Projection(
                    weight.shape[1],
                    weight.shape[0],
                    treatment,
                    heads=weight.shape[0] // site.head_width if site.head_width else 1,
                    layer=site.layer,
                    n_layers=layers[site.stack],
                    bias=bias is not None,
                ).to(weight.dtype)
            if seed is not None:
                _fill(new, weight, bias, f"{label}.weight", seed, frozen_seed)
            parts[projection] = new
        module = Split(parts, site) if site.fusion else parts[site.projections[0]]
        done[id(old.weight)] = module.train(old.training)
        yield site.name, module


def _fill(
    new: Projection, weight: Tensor, bias: Tensor | None, name: str, seed: int, frozen_seed: int
) -> None:
    """The values that the treatment asks for: made anew, or those of the model."""
    try:
        new.init_weights(name, seed, frozen_seed, std=0.02)
    except ValueError as error:
        raise UserError(f"{name}: {error}; choose another init for it") from None
    if new.treatment.init == "keep":
        if new.bias is not None:
            nn.init.zeros_(new.bias)  # one that the method adds to a model without
        new.adopt(weight, bias)


def _matrices(old: nn.Module, site: Site) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weight [out, in] and bias of each projection in a module."""
    assert isinstance(old, nn.Linear | Conv1D)
    weight = old.weight.detach()
    weight = weight.T if isinstance(old, Conv1D) else weight
    bias = None if old.bias is None else old.bias.detach()
    if site.fusion is None:
        return {site.projections[0]: (weight, bias)}

    def rows(tensor: Tensor) -> list[Tensor]:
        if site.fusion == "blocks":
            return list(tensor.chunk(3))
        by_head = tensor.view(-1, 3, site.head_width, *tensor.shape[1:])
        return [by_head[:, i].flatten(0, 1) for i in range(3)]

    biases = [None] * 3 if bias is None else rows(bias)
    return dict(zip(site.projections, zip(rows(weight), biases, strict=True), strict=True))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A plain trained part of a split projection, which other libraries (PEFT) know how to treat."""
    linear = nn.Linear(
        weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype
    )
    linear.weight = nn.Parameter(weight.clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone())
    return linear


def _sharing(model: nn.Module) -> dict[int, list[str]]:
    """The modules that hold each parameter."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return owners


def _check_ties(
    site: Site, old: nn.Module, shared: Mapping[int, list[str]], sites: list[Site], chosen: Method
) -> None:
    """A matrix tied to one that is treated otherwise can be neither frozen nor left."""
    layers = layout.depth(sites)

    def fate(s: Site) -> list[tuple[str, bool, float]]:
        place = s.layer, layers[s.stack]
        found = [(p, chosen.treatment(p)) for p in s.projections]
        return [(p, t.frozen_in(*place), t.trains_from(*place)) for p, t in found]

    alike = {s.name for s in sites if fate(s) == fate(site)}
    for owner in shared.get(id(old.weight), []):
        if owner not in alike:
            raise UserError(
                f"{site.name} shares its matrix with {owner}, which the method treats otherwise; "
                "untie them before converting"
            )
