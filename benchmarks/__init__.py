"""Speed, memory and preparation, side by side with peers. `python -m benchmarks` runs them all."""

import argparse


def positive(text: str) -> int:
    """A number of rounds, rows and the like."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)
