"""The methods: what an arm does to a model's projections. Pure data; imports nothing heavy.

To add a method, add one entry to `METHODS`. A method names, for each of the six projections of a
block, how its matrix is made (`init`, a function of `oelm/projections.py`) and when it trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from oelm.config import from_mapping, split_spec, to_mapping
from oelm.errors import UserError, unknown

PROJECTIONS = ("q", "k", "v", "o", "up", "down")

Init = Literal[
    "normal", "xavier", "matched", "headwise", "global", "hadamard",
    "identity", "identity_shift", "identity_shuffle", "keep",
]  # fmt: skip
Trains = Literal["always", "never", "layers", "ratio", "late", "every"]

# Projections made of nothing: the model reads slices of its input instead of multiplying.
PARAMETER_FREE = ("identity", "identity_shift", "identity_shuffle")
ORTHONORMAL = ("headwise", "global", "hadamard")
# Inits whose rows have about unit length, against 0.02·√d for `normal`.
UNIT_ROWS = ("matched", *ORTHONORMAL, *PARAMETER_FREE)


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """How one projection is made and when it trains."""

    init: Init = "normal"
    """How the matrix is made; `keep` leaves the values that a converted model came with."""
    scale: float = 1.0
    """A factor on the initial matrix."""
    trains: Trains = "always"
    """always · never · layers (only in `layers`) · ratio (all but `freeze_ratio`) · late (from
    `thaw_at` on) · every (each `every` steps)."""
    layers: tuple[int, ...] = ()
    """With `trains: layers`: the layers, counted from 0, in which it trains."""
    freeze_ratio: float | None = None
    """With `trains: ratio`: the share that is frozen, the lowest layers or heads first."""
    ratio_of: Literal["layers", "heads"] = "layers"
    """With `trains: ratio`: whether the share is one of layers or of each layer's heads."""
    thaw_at: float | None = None
    """With `trains: late`: the fraction of training after which it trains."""
    thaw_by_layer: bool = False
    """With `trains: late`: thaw one layer after the other, the last layer at `thaw_at`."""
    every: int | None = None
    """With `trains: every`: it trains in steps divisible by this number only."""
    rank: int = 0
    """Rank of a trained update added to the matrix; 0 for none."""
    bias: bool = False
    """Whether a trained bias is added, even where the matrix is frozen."""
    gain: bool = False
    """Whether a trained factor per output channel multiplies the result."""
    input_gain: bool = False
    """Whether a trained factor per input channel chooses what is read."""

    def __post_init__(self) -> None:
        needs = {"layers": "layers", "ratio": "freeze_ratio", "late": "thaw_at", "every": "every"}
        for mode, key in needs.items():
            given = getattr(self, key) not in (None, ())
            if self.trains == mode and not given:
                raise UserError(f"trains: {mode} needs `{key}`")
            if self.trains != mode and given:
                raise UserError(
                    f"`{key}` says that it trains in part, but trains: {self.trains} says otherwise; "
                    f"write trains: {mode} or drop `{key}`"
                )
        if self.thaw_by_layer and self.trains != "late":
            raise UserError("`thaw_by_layer` goes with trains: late")
        if self.ratio_of == "heads" and self.trains != "ratio":
            raise UserError("`ratio_of` goes with trains: ratio")
        if self.freeze_ratio is not None and not 0 < self.freeze_ratio <= 1:
            raise UserError(f"freeze_ratio must be above 0 and at most 1, not {self.freeze_ratio}")
        if self.thaw_at is not None and not 0 < self.thaw_at < 1:
            raise UserError(f"thaw_at must lie between 0 and 1, not {self.thaw_at}")
        if self.every is not None and self.every < 2:
            raise UserError(f"every must be 2 or more, not {self.every}")
        if self.rank < 0:
            raise UserError(f"rank must not be negative, not {self.rank}")
        if not self.scale > 0:
            raise UserError(f"scale must be above 0, not {self.scale}")
        if self.init in PARAMETER_FREE and self.trains != "never":
            raise UserError(f"init: {self.init} has nothing to train; write trains: never")
        if self.rank and self.trains == "always":
            raise UserError("a low-rank update on a matrix that trains anyway changes nothing")

    @property
    def frozen(self) -> bool:
        """Whether the whole matrix never trains."""
        return self.trains == "never" or self.freeze_ratio == 1

    def frozen_in(self, layer: int, n_layers: int) -> bool:
        """Whether the whole matrix never trains in this layer."""
        if self.trains == "layers":
            return layer not in self.layers
        if self.trains == "ratio" and self.ratio_of == "layers":
            return layer < round(self.freeze_ratio_ * n_layers)
        return self.frozen

    def frozen_heads(self, n_heads: int) -> int:
        """How many heads, from head 0 on, are frozen while the rest of the matrix trains."""
        if self.trains == "ratio" and self.ratio_of == "heads" and not self.frozen:
            return round(self.freeze_ratio_ * n_heads)
        return 0

    def trains_from(self, layer: int, n_layers: int) -> float:
        """The fraction of training from which on it trains in this layer; 0 if from the start."""
        if self.trains != "late":
            return 0.0
        assert self.thaw_at is not None
        return self.thaw_at * (layer + 1) / n_layers if self.thaw_by_layer else self.thaw_at

    @property
    def freeze_ratio_(self) -> float:
        """`freeze_ratio`, where it is known to be given."""
        assert self.freeze_ratio is not None
        return self.freeze_ratio


TRAINED = Treatment()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A named set of treatments."""

    name: str
    about: str = ""
    q: Treatment = field(default=TRAINED)
    k: Treatment = field(default=TRAINED)
    v: Treatment = field(default=TRAINED)
    o: Treatment = field(default=TRAINED)
    up: Treatment = field(default=TRAINED)
    down: Treatment = field(default=TRAINED)
    temperature: bool = False
    """A learned factor per head on the attention logits."""
    kernel: bool = False
    """A learned kernel of distance in each head: a trained vector is added to its queries and one to
    its keys, both turned by position as in RoPE, whatever tells the model its positions."""
    small_lr: float = 1.0
    """Learning-rate multiplier of the vectors that stand in for frozen matrices: gains, temperatures,
    kernels, and the biases of q and k. AdamW moves each number by at most the learning rate per step,
    which is much for a matrix entry of 0.02 and little for a gain of 1."""
    lr_by_layer: tuple[float, ...] = ()
    """Learning-rate multipliers, one per layer from the bottom; empty for none."""

    def __post_init__(self) -> None:
        for name in ("v", "o", "up", "down"):
            if getattr(self, name).init in PARAMETER_FREE:
                raise UserError(f"{name}: init {getattr(self, name).init} is for q and k only")
        if not self.small_lr > 0:
            raise UserError(f"small_lr must be above 0, not {self.small_lr}")
        if any(not m > 0 for m in self.lr_by_layer):
            raise UserError("lr_by_layer must hold numbers above 0; to freeze a layer, treat it")

    def treatment(self, projection: str) -> Treatment:
        """The treatment of one of `PROJECTIONS`."""
        treatment = getattr(self, projection)
        assert isinstance(treatment, Treatment)
        return treatment

    @property
    def freezes(self) -> bool:
        """Whether any matrix is frozen somewhere or for some time (an absent one is not)."""
        treatments = [self.treatment(p) for p in PROJECTIONS]
        return any(t.trains != "always" and t.init not in PARAMETER_FREE for t in treatments)

    def check(self, n_layers: int, n_heads: int) -> None:
        """Refuse a method that cannot mean anything in a model of this shape."""
        for p in PROJECTIONS:
            t = self.treatment(p)
            where = f"method {self.name}, {p}"
            if outside := [i for i in t.layers if not 0 <= i < n_layers]:
                raise UserError(
                    f"{where}: layers {outside} match nothing; the model has layers 0 to {n_layers - 1}"
                )
            if t.trains == "ratio" and t.ratio_of == "heads" and p not in ("q", "k", "v"):
                raise UserError(f"{where}: only q, k and v have heads; write ratio_of: layers")
            if t.trains == "ratio":
                of = n_heads if t.ratio_of == "heads" else n_layers
                if round(t.freeze_ratio_ * of) == 0:
                    raise UserError(
                        f"{where}: freeze_ratio {t.freeze_ratio} of {of} {t.ratio_of} freezes nothing; "
                        f"use at least {0.5 / of:.2g}"
                    )
        if self.lr_by_layer and len(self.lr_by_layer) != n_layers:
            raise UserError(
                f"method {self.name}: lr_by_layer has {len(self.lr_by_layer)} entries for {n_layers} layers"
            )


def _qk(name: str, about: str, *, temperature: bool = False, **treatment: Any) -> Method:
    """A method that treats Q and K alike and leaves the rest alone."""
    both = Treatment(**treatment)
    return Method(name=name, about=about, q=both, k=both, temperature=temperature)


FROZEN = Treatment(init="headwise", trains="never")
IDENTITY = Treatment(init="identity", trains="never")
NEIGHBOUR = Treatment(init="identity_shift", trains="never")
# At the rate of the matrices a kernel is still growing when training ends.
KERNEL: dict[str, Any] = {"kernel": True, "small_lr": 10.0}

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(name="baseline", about="everything trains, Q/K from normal(0.02): the reference"),
        Method(
            name="oelm_v2",
            about="Q/K head-wise orthogonal and frozen: the method",
            q=FROZEN,
            k=FROZEN,
        ),
        _qk(
            "oelm_random",
            "Q/K normal(0.02) and frozen: is orthogonality what helps?",
            trains="never",
        ),
        _qk("oelm", "v1: Q/K one global orthogonal matrix, frozen", init="global", trains="never"),
        _qk("oelm_no_freeze", "Q/K start as in oelm_v2 and train: its twin", init="headwise"),
        _qk("oelm_v1_no_freeze", "Q/K start as in oelm (v1) and train: its twin", init="global"),
        _qk(
            "random_matched",
            "Q/K normal with std 1/√d, frozen: oelm_v2's scale without its orthogonality",
            init="matched",
            trains="never",
        ),
        _qk(
            "oelm_hadamard",
            "Q/K signed Hadamard rows, frozen: orthonormal, rebuilt exactly from a seed",
            init="hadamard",
            trains="never",
        ),
        Method(name="oelm_q_only", about="Q frozen as in oelm_v2, K trains", q=FROZEN),
        Method(name="oelm_k_only", about="K frozen as in oelm_v2, Q trains", k=FROZEN),
        Method(
            name="identity_q", about="Q reads the stream itself (no matrix), K trains", q=IDENTITY
        ),
        Method(
            name="identity_qk",
            about="neither Q nor K has a matrix: Q reads its slice, K its neighbour's",
            q=IDENTITY,
            k=NEIGHBOUR,
        ),
        Method(
            name="identity_lowrank",
            about="Q identity, K a fixed shuffle of channels, each with a trained rank-8 update",
            q=Treatment(init="identity", trains="never", rank=8),
            k=Treatment(init="identity_shuffle", trains="never", rank=8),
        ),
        _qk(
            "oelm_temperature",
            "oelm_v2 with a learned temperature per head",
            init="headwise",
            trains="never",
            temperature=True,
        ),
        _qk(
            "oelm_gain",
            "oelm_v2 with learned gains per channel of q and k, and temperatures",
            init="headwise",
            trains="never",
            gain=True,
            temperature=True,
        ),
        _qk(
            "oelm_bias",
            "oelm_v2 with trained biases on q and k (with RoPE: a learned kernel of distance)",
            init="headwise",
            trains="never",
            bias=True,
        ),
        Method(
            name="oelm_kernel",
            about="oelm_v2 with a trained kernel of distance in each head",
            q=FROZEN,
            k=FROZEN,
            **KERNEL,
        ),
        Method(
            name="identity_kernel",
            about="identity_qk with a trained kernel of distance in each head: no Q/K matrix at all",
            q=IDENTITY,
            k=NEIGHBOUR,
            **KERNEL,
        ),
        Method(
            name="identity_q_kernel",
            about="identity_q with a trained kernel of distance in each head",
            q=IDENTITY,
            **KERNEL,
        ),
        Method(
            name="baseline_kernel",
            about="baseline with a trained kernel of distance in each head: what the kernel alone gives",
            **KERNEL,
        ),
        _qk(
            "oelm_lowrank",
            "oelm_v2 with a trained rank-8 update of Q and K",
            init="headwise",
            trains="never",
            rank=8,
        ),
        _qk(
            "oelm_thaw",
            "oelm_v2 until half of training, then Q/K train",
            init="headwise",
            trains="late",
            thaw_at=0.5,
        ),
        _qk(
            "oelm_layers",
            "oelm_v2 in the lower half of the layers, Q/K train in the upper half",
            init="headwise",
            trains="ratio",
            freeze_ratio=0.5,
        ),
        Method(
            name="qk_ffn",
            about="oelm_v2 with the MLP frozen as well",
            q=FROZEN,
            k=FROZEN,
            up=Treatment(init="global", trains="never"),
            down=Treatment(trains="never"),
        ),
    )
}
ALIASES = {"gpt": "baseline"}


def method(spec: str | Mapping[str, Any] | Method, **overrides: Any) -> Method:
    """A method by name, by text (`oelm_v2,q.rank=4,k.rank=4`) or as a mapping with a `base`."""
    if isinstance(spec, Method):
        return spec if not overrides else _override(spec, overrides, label=f"{spec.name}*")
    if isinstance(spec, str):
        name, given = split_spec(spec)
        label = spec
    else:
        given = dict(spec)
        name = given.pop("base", "baseline")
        label = given.pop("name", f"{name}*" if given else name)
    name = ALIASES.get(name, name)
    if name not in METHODS:
        raise unknown("method", name, [*METHODS, *ALIASES])
    given |= overrides
    return _override(METHODS[name], given, label=label) if given else METHODS[name]


def _override(base: Method, overrides: Mapping[str, Any], label: str) -> Method:
    """`base` with some fields changed; `qk: {…}` stands for the same change of q and of k."""
    data = {**to_mapping(base), "name": label}
    overrides = dict(overrides)
    if both := overrides.pop("qk", None):
        if not isinstance(both, Mapping):
            raise UserError(f"qk has fields, as in qk.init=headwise; it cannot be {both!r} itself")
        overrides = {
            "q": {**both, **overrides.get("q", {})},
            "k": {**both, **overrides.get("k", {})},
        } | {key: value for key, value in overrides.items() if key not in ("q", "k")}
    for key, value in overrides.items():
        if key in PROJECTIONS and isinstance(value, Mapping):
            value = {**data[key], **_completed(value)}
        data[key] = value
    return from_mapping(Method, data, what=f"method {label}")


def _completed(treatment: Mapping[str, Any]) -> dict[str, Any]:
    """Saying *when* anew drops what the base said about it, so that the two cannot contradict."""
    given = dict(treatment)
    if "trains" in given:
        cleared = {"layers": (), "freeze_ratio": None, "ratio_of": "layers", "thaw_at": None}
        return {**cleared, "thaw_by_layer": False, "every": None, **given}
    return given


def freeze_qk(spec: str, frozen: bool) -> str:
    """`spec` with Q and K frozen or trained, under the name of the method that this is, if it has one."""
    wanted = method(f"{spec},qk.trains={'never' if frozen else 'always'}")
    for known in METHODS.values():
        if replace(wanted, name=known.name, about=known.about) == known:
            return known.name
    return wanted.name
