"""`oelm train`: one run, from options or from a YAML file with overrides."""

import dataclasses
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml

from oelm.cli.options import parse
from oelm.config import from_mapping, load_yaml
from oelm.errors import UserError
from oelm.methods import freeze_qk
from oelm.train.config import TrainConfig
from oelm.train.errors import RunError

SPEC = str | dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options(TrainConfig):
    """Train one method on one dataset with one seed, into one folder.

    The same command again continues what is there. SIGTERM, SIGINT and SIGUSR1 save and stop.
    Exit codes: 0 finished, 1 failed, 2 wrong input, 3 stopped by a signal and saved, 4 the loss or
    the gradient is not finite, 5 another trainer holds the folder.
    """

    config: Path | None = None
    """A YAML file with any of these options (a run's config.yaml is one); options given here win."""
    freeze_qk: bool | None = None
    """Freeze or train Q and K whatever the method says, as the source scripts did."""


def train(argv: Sequence[str]) -> int:
    """Run the command; one of several processes that fails leaves at once, lest the others wait."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return _train(argv)
    try:
        code = _train(argv)
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _train(argv: Sequence[str]) -> int:
    try:
        config = parse_config(argv)
        # Imported late: wrong options are refused before torch is loaded.
        from oelm.train.loop import train as run

        run(config)
    except UserError as error:
        return _say(error, 2)
    except RunError as error:
        return _say(error, error.exit_code)
    return 0


def parse_config(argv: Sequence[str]) -> TrainConfig:
    """The configuration that the options and the file they name come to."""
    default = None
    for i, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name == "--config" and (equals or i + 1 < len(argv)):
            path = Path(value if equals else argv[i + 1])
            given = load_yaml(path)
            for key in ("schema", "resolved"):  # a run's own config.yaml says more than options do
                given.pop(key, None)
            default = from_mapping(Options, given, what=str(path))
    with _registry:
        options = parse(Options, argv, prog="oelm train", default=default)
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(TrainConfig)}
    if options.freeze_qk is not None:
        if not isinstance(options.method, str):
            raise UserError("--freeze_qk goes with a method named in one word, not with a mapping")
        fields["method"] = freeze_qk(options.method, options.freeze_qk)
    return TrainConfig(**fields)


_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _spec(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """A method or model is one word on the command line, though YAML may spell it as a mapping."""
    if info.type != SPEC:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="SPEC",
        instance_from_str=lambda args: args[0],
        is_instance=lambda value: isinstance(value, str | dict),
        str_from_instance=lambda value: [
            value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
        ],
    )


def _say(error: Exception, code: int) -> int:
    if os.environ.get("RANK", "0") == "0":  # for all ranks
        print(f"oelm: {error}", file=sys.stderr)
    return code
