"""Speed, memory and preparation, side by side with peers. `python -m benchmarks` runs them all."""

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """A number of rounds, rows and the like."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def output(text: str) -> Path:
    """A file to write when all is measured: better refused now than then."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {path} to")
    return path
