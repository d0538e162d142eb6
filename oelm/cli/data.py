"""`oelm data`: prepare, list and show datasets."""

from oelm.cli.options import parse
from oelm.errors import unknown


def prepare(corpus: str, /, tokenizer: str = "gpt2") -> int:
    """Tokenize a corpus into a dataset."""
    from oelm.data.corpora import corpus as find
    from oelm.data.prepare import prepare as run

    dataset = run(find(corpus), tokenizer)
    print(dataset.name, {k: v["tokens"] for k, v in dataset.meta["splits"].items()})
    return 0


ACTIONS = {"prepare": prepare}


def data(argv: list[str]) -> int:
    """Hand over to the action."""
    if not argv or argv[0] not in ACTIONS:
        raise unknown("action of oelm data", argv[0] if argv else "", ACTIONS)
    return parse(ACTIONS[argv[0]], argv[1:], prog=f"oelm data {argv[0]}")
