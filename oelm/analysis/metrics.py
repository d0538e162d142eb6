"""The metrics a claim can name: their units, and which direction is better."""

import math
from dataclasses import dataclass
from typing import Literal

from oelm.errors import UserError, unknown

Unit = Literal["", "nats", "bits", "%", "parameters", "steps/h", "s", "tokens/s", "bytes"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One recorded number of a run."""

    name: str
    unit: Unit = ""
    better: Literal["less", "greater"] = "less"
    exact: bool = False
    """A property of the method, equal for every seed: decided by comparison, not by a test."""

    @property
    def share(self) -> bool:
        """Whether it lies between 0 and 1 and is shown in per cent, so that a point is 0.01."""
        return self.unit == "%"

    @property
    def ratio(self) -> bool:
        """Whether two values are compared by their ratio rather than their difference."""
        return self.unit not in ("%", "nats", "bits") and not self.name.startswith("probe:")


METRICS = {
    m.name: m
    for m in (
        Metric(name="ppl"),
        Metric(name="best_ppl"),
        Metric(name="test_ppl"),
        Metric(name="loss", unit="nats"),
        Metric(name="test_loss", unit="nats"),
        Metric(name="bpb", unit="bits"),
        Metric(name="test_bpb", unit="bits"),
        Metric(name="accuracy", unit="%", better="greater"),
        Metric(name="test_accuracy", unit="%", better="greater"),
        Metric(name="macro_f1", unit="%", better="greater"),
        Metric(name="test_macro_f1", unit="%", better="greater"),
        Metric(name="trainable", unit="parameters", exact=True),
        Metric(name="frozen", unit="parameters", better="greater", exact=True),
        Metric(name="frozen_share", unit="%", better="greater", exact=True),
        Metric(name="steps_per_hour", unit="steps/h", better="greater"),
        Metric(name="step_time", unit="s"),
        Metric(name="tokens_per_second", unit="tokens/s", better="greater"),
        Metric(name="wall_time", unit="s"),
        Metric(name="peak_memory", unit="bytes"),
        Metric(name="checkpoint_bytes", unit="bytes", exact=True),
    )
}


def metric(name: str) -> Metric:
    """Look a metric up; `time_to_ppl:30` and `probe:copy` are made from their argument."""
    kind, colon, argument = name.partition(":")
    if kind == "probe" and argument:
        return Metric(name=name)
    if kind == "time_to_ppl" and colon:
        try:
            target = float(argument)
        except ValueError:
            target = math.nan
        if not (target > 1 and math.isfinite(target)):
            raise UserError(f"metric '{name}': write a perplexity above 1, as in time_to_ppl:30")
        return Metric(name=name, unit="s")
    if name not in METRICS:
        raise unknown("metric", name, [*METRICS, "time_to_ppl:30", "probe:NAME"])
    return METRICS[name]


def other_split(name: str) -> str | None:
    """The metric on `test` that one on `val` has, and the other way round; None if there is none."""
    twin = name.removeprefix("test_") if name.startswith("test_") else f"test_{name}"
    return twin if twin in METRICS else None
