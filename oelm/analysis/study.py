"""A study as the report sees it: arms, their runs, the claims, and how the arms relate."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.analysis.claims import Claim
from oelm.analysis.runs import Run
from oelm.analysis.words import Text
from oelm.methods import ORTHONORMAL


@dataclass
class Arm:
    """An arm's runs by the point of its grid; a study's numbers are those of the chosen point."""

    name: str
    points: dict[str, list[Run]] = field(default_factory=dict)
    chosen: str = ""

    @property
    def runs(self) -> list[Run]:
        """The runs at the chosen point."""
        return self.points.get(self.chosen, [])

    @property
    def label(self) -> str:
        """The arm, with the point it was tuned to."""
        return f"{self.name} ({self.chosen})" if self.chosen else self.name

    def values(self, name: str, seeds: Sequence[int], point: str | None = None) -> dict[int, float]:
        """A metric of the finished runs among `seeds`, by seed."""
        found = {}
        for run in self.points.get(self.chosen if point is None else point, []):
            value = run.value(name) if run.finished and run.seed in seeds else None
            if value is not None:
                found[run.seed] = value
        return found


@dataclass
class Study:
    """Everything a report is made from."""

    name: str
    arms: dict[str, Arm]
    seeds: tuple[int, ...]
    question: str = ""
    claims: tuple[Claim, ...] = ()
    confounds: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Text] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    path: Path | None = None
    source: str = ""
    """Where quoted numbers come from; empty for our own runs."""

    @property
    def runs(self) -> list[Run]:
        """Every run at every point."""
        return [run for arm in self.arms.values() for runs in arm.points.values() for run in runs]

    @property
    def classifies(self) -> bool:
        """Whether its runs are classifiers rather than language models."""
        return any(run.config.get("task") == "classification" for run in self.runs)

    @property
    def primary(self) -> str:
        """The metric that arms are tuned, ordered and drawn by."""
        return "accuracy" if self.classifies else "ppl"

    @property
    def reference(self) -> Arm:
        """The arm the others are held against: the baseline or, without one, the claims' `vs`."""
        for arm in self.arms.values():
            if method_of(arm).get("name") == "baseline" or arm.name in ("baseline", "gpt"):
                return arm
        named = [claim.vs for claim in self.claims if claim.vs in self.arms]
        return self.arms[max(named, key=named.count)] if named else next(iter(self.arms.values()))

    @property
    def unfinished(self) -> bool:
        """Whether planned runs are still to come or under way."""
        return not self.source and any(
            r.state in ("running", "waiting", "missing") for r in self.runs
        )

    def all_problems(self) -> list[Text]:
        """What is wrong with the study and with each of its runs."""
        return [*self.problems, *(p for run in self.runs for p in run.problems)]


def method_of(arm: Arm) -> dict[str, Any]:
    """The resolved method of an arm's runs; empty if no run recorded it."""
    return next((run.method for run in arm.runs if run.method), {})


def chain(study: Study) -> list[Arm]:
    """From the baseline to frozen random Q/K, one change after another, as far as there are arms."""
    steps: dict[str, Arm] = {}
    for arm in study.arms.values():
        q = method_of(arm).get("q", {})
        k = method_of(arm).get("k", {})
        added = [t.get(extra) for t in (q, k) for extra in ("rank", "bias", "gain", "input_gain")]
        added += [method_of(arm).get(extra) for extra in ("temperature", "kernel")]
        scaled = any(t.get("scale", 1) != 1 for t in (q, k))
        if not q or any(added) or scaled or q.get("init") != k.get("init"):
            continue
        made = {"normal": "normal", "xavier": "normal", "matched": "matched"}.get(
            str(q.get("init"))
        )
        made = made or ("orthogonal" if q.get("init") in ORTHONORMAL else "other")
        both = (q.get("trains"), k.get("trains"))
        when = {("always", "always"): "trained", ("never", "never"): "frozen"}.get(both, "partly")
        steps.setdefault(f"{when} {made}", arm)
    order = (
        "trained normal",
        "trained orthogonal",
        "frozen orthogonal",
        "frozen matched",
        "frozen normal",
    )
    found = [steps[name] for name in order if name in steps]
    return found if len(found) > 2 and found[0] is steps.get("trained normal") else []
