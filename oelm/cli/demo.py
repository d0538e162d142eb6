"""`oelm demo`: corpus, study, report, in a few minutes on a laptop."""

import time
from pathlib import Path

from oelm.cli.options import parse

CORPUS, TOKENIZER, STUDY = "sotu", "bpe:2048", "quickstart"


def demo(argv: list[str]) -> int:
    """Entry point of `oelm demo`."""
    return parse(_demo, argv, prog="oelm demo")


def _demo(*, runs: Path = Path("runs")) -> int:
    """Prepare the embedded corpus, run the study `quickstart`, and show what it found.

    Three arms × three seeds, about four minutes on two cores. The same command again continues
    what is unfinished, and repeats nothing.

    Args:
        runs: Where the study's folder goes.
    """
    from oelm.cli.report import report
    from oelm.cli.run import run
    from oelm.data.corpora import Sotu
    from oelm.data.prepare import prepare
    from oelm.study.engines.local import cores
    from oelm.study.gpus import chosen

    began = time.monotonic()
    dataset = prepare(Sotu(), TOKENIZER)
    splits = {k: f"{v['tokens']:,}" for k, v in dataset.meta["splits"].items()}
    print(f"dataset {dataset.name}: " + ", ".join(f"{n} tokens to {k}" for k, n in splits.items()))
    # Small runs side by side, each on few threads, use a CPU better than one after the other.
    slots = [] if chosen(None) else ["--slots", str(min(9, cores()))]
    code = run([STUDY, "--runs", str(runs), *slots])
    if code:
        return code
    code = report([str(runs / STUDY)])
    print(f"the demo took {time.monotonic() - began:.0f} s")
    return code
