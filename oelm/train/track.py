"""Further sinks of the metrics: TensorBoard, W&B, trackio. `metrics.jsonl` stays the truth."""

import importlib
from pathlib import Path
from typing import Any

from oelm.config import to_mapping
from oelm.errors import UserError, unknown
from oelm.train.config import TrainConfig

SINKS = ("tensorboard", "wandb", "trackio")


class Tracker:
    """Hands each line of metrics to the sinks that the run asked for."""

    def __init__(self, config: TrainConfig) -> None:
        self._tensorboard: Any = None
        self._others: list[Any] = []
        for name in config.track:
            if name not in SINKS:
                raise unknown("tracker", name, SINKS)
            if name == "tensorboard":
                board = _imported("torch.utils.tensorboard", name)
                self._tensorboard = board.SummaryWriter(str(config.out_dir / "tensorboard"))
            else:
                sink = _imported(name, name)
                # The folder names the run, so that continuing it continues its curves too.
                folder = Path(config.out_dir)
                sink.init(
                    project="oelm", name=folder.name, config=to_mapping(config), resume="allow"
                )
                self._others.append(sink)

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line of metrics."""
        prefix = values.get("split", kind)
        numbers = {f"{prefix}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        for name, value in numbers.items():
            if self._tensorboard:
                self._tensorboard.add_scalar(name, value, step)
        for sink in self._others:
            sink.log(numbers, step=step)

    def close(self) -> None:
        """Flush and end."""
        if self._tensorboard:
            self._tensorboard.close()
        for sink in self._others:
            sink.finish()


def _imported(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{name} is not installed; pip install 'oelm[track]'") from None
