"""A run folder read back: its model built anew from its configuration, or as its checkpoint holds it."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from oelm.config import from_mapping, load_yaml
from oelm.data.dataset import Dataset
from oelm.errors import UserError
from oelm.freezing import Plan, audit
from oelm.methods import Method
from oelm.model.config import ModelConfig
from oelm.model.gpt import GPT
from oelm.train import checkpoint
from oelm.train.classification import ClassificationTask
from oelm.train.config import TrainConfig


class SavedRun:
    """What a run's folder says of it."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} is no run folder: it has no config.yaml")
        self.folder = folder
        self.config = load_yaml(folder / "config.yaml")
        resolved = self.config.get("resolved")
        if not isinstance(resolved, dict):
            raise UserError(f"{folder / 'config.yaml'} does not say what it was resolved to")
        self.resolved = resolved
        self.method = from_mapping(Method, resolved["method"], what="the run's method")
        self.seeds: dict[str, int] = resolved["seeds"]

    def build(self) -> nn.Module:
        """The model as it was before training."""
        if self.config.get("task") == "classification":
            fields = {k: v for k, v in self.config.items() if k not in ("schema", "resolved")}
            config = from_mapping(TrainConfig, fields, what="the run's configuration")
            return ClassificationTask(config).build()
        return self.language_model()

    def language_model(self) -> GPT:
        """The GPT as it was before training."""
        shape = from_mapping(ModelConfig, self.resolved["model"], what="the run's model")
        return GPT(shape, self.method, self.seeds["init_seed"], self.seeds["frozen_seed"])

    def dataset(self) -> Dataset:
        """The dataset that it trained on, or else the one of that name that was prepared here."""
        about = self.resolved["dataset"]
        return Dataset.open(about["path"] if Path(about["path"]).exists() else about["name"])

    def weights(self, name: str = checkpoint.BEST) -> dict[str, Tensor]:
        """The stored tensors of one of the run's checkpoints."""
        path = self.folder / name
        if not path.is_file():
            raise UserError(
                f"{self.folder} has no {name} yet; let the run go on to its first evaluation"
            )
        try:
            content: dict[str, Any] = checkpoint.read(path)
        except checkpoint.DamagedError as damage:
            raise UserError(str(damage)) from None
        model: dict[str, Tensor] = content["model"]
        return model


def audit_checkpoint(path: Path) -> dict[str, Any]:
    """Compare a checkpoint (of a folder, the best) with what the run's configuration says."""
    if not path.exists():
        raise UserError(f"there is nothing at {path}; give a run folder or one of its .pt files")
    run = SavedRun(path if path.is_dir() else path.parent)
    stored = run.weights(checkpoint.BEST if path.is_dir() else path.name)
    plan = Plan.of(run.build(), run.method)
    model = run.build()
    # What does not fit is reported rather than loaded.
    own = model.state_dict()
    fitting = {n: t for n, t in stored.items() if n in own and own[n].shape == t.shape}
    model.load_state_dict(fitting, strict=False)
    result = audit(model, plan)
    wrong = [f"{n} is missing from the checkpoint" for n in own if n not in stored]
    for name, tensor in stored.items():
        if name not in own:
            wrong.append(f"{name} is in the checkpoint but not part of the configured model")
        elif own[name].shape != tensor.shape:
            found, expected = tuple(tensor.shape), tuple(own[name].shape)
            wrong.append(f"{name} is {found} in the checkpoint, the configuration says {expected}")
    problems = wrong + result["problems"]
    return {**result, "verdict": "fail" if problems else "pass", "problems": problems}
