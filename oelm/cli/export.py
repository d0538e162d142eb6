"""`oelm export`: a finished run as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import tyro

from oelm.cli.options import parse


def export(argv: list[str]) -> int:
    """Entry point of `oelm export`."""
    return parse(_export, argv, prog="oelm export")


def _export(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")], /, *, to: Path
) -> int:
    """Write a finished run's best weights as a Hugging Face folder.

    It loads with AutoModelForCausalLM and AutoTokenizer once `oelm.hf` is imported.

    Args:
        run: The run's folder.
        to: The folder to write; it must not exist or be empty.
    """
    from oelm.train.saved import SavedRun

    SavedRun(run)  # says what is wrong with it before transformers is loaded, which takes seconds
    from oelm.hf.export import export as write

    folder = write(run, to)
    print(f"{folder}: load it with AutoModelForCausalLM.from_pretrained after `import oelm.hf`")
    return 0
