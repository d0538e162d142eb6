"""`oelm data`: prepare, list and show datasets."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from oelm.cli.options import parse
from oelm.errors import UserError, unknown

if TYPE_CHECKING:
    from oelm.data.corpora import Corpus
    from oelm.data.dataset import Dataset
    from oelm.data.prepare import Progress

USAGE = """usage: oelm data ACTION [OPTIONS]

  prepare CORPUS   documents → tokens: train.bin, val.bin, test.bin, meta.json, tokenizer.json
  list             what is prepared, how large it is, and where
  show NAME        lengths, duplicates, documents decoded back; --check proves it intact

`oelm data ACTION --help` teaches each."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Tokenize a corpus into a dataset. Try: oelm data prepare sotu --tokenizer bpe:2048"""

    corpus: Annotated[Positional[tuple[str, ...]], arg(metavar="CORPUS [CORPUS ...]")]
    """sotu (embedded), tinystories, openwebtext, wikitext103, wikitext2 (from the hub), or local files and
    folders: .txt .jsonl .json .csv .tsv .parquet, also with .gz or .zst."""
    tokenizer: str = "gpt2"
    """gpt2, bpe:N (learnt from the training split), bytes, or the path of a Hugging Face tokenizer.json."""
    name: str | None = None
    """The dataset's name; CORPUS-TOKENIZER if not given."""
    out: Path | None = None
    """The dataset's folder; under $OELM_HOME/datasets if not given."""
    documents: Literal["auto", "eot", "blank-line", "file"] = "auto"
    """What a document is in .txt files: what <|endoftext|> separates, a paragraph, or a file. auto: the first
    where it occurs, else the paragraphs of a single file, or whole files."""
    field: str = "text"
    """The column or key that holds the text in JSON, CSV, TSV and parquet files."""
    errors: Literal["strict", "replace"] = "strict"
    """At invalid UTF-8, stop or go on with replacement characters."""
    source: Path | None = None
    """Read a hub corpus from this local copy of its repository."""
    val: float | None = None
    """The share of documents for val where there is no official split; 0.05, for openwebtext 0.005."""
    test: float | None = None
    """The same for test; tinystories, whose val is official, gives 0.005 of train."""
    max_tokens: int | None = None
    """Stop at the document with which the training split reaches this many tokens."""
    max_docs: int | None = None
    """Read at most this many documents of each official split."""
    workers: int | None = None
    """How many documents to tokenize at a time; one per core if not given."""
    force: bool = False
    """Make it again and replace what is there."""

    def find(self) -> "Corpus":
        """The corpus asked for."""
        from oelm.data.corpora import HUB, NAMES, Sotu, hub
        from oelm.data.files import Files

        first = self.corpus[0] if self.corpus else ""
        if len(self.corpus) == 1 and first in HUB:
            return hub(first, self.source)
        if self.source is not None:
            raise UserError(f"--source is for a corpus from the hub: {', '.join(HUB)}")
        if self.corpus == ("sotu",):
            return Sotu()
        if not first:
            raise UserError(f"which corpus? Name one of {', '.join(NAMES)}, or local files")
        if named := [c for c in self.corpus if c in NAMES and not Path(c).exists()]:
            raise UserError(
                f"{named[0]} is prepared by itself; other corpora need their own command"
            )
        if not Path(first).exists() and not Path(first).suffix and "/" not in first:
            raise unknown("corpus, and no file,", first, NAMES)
        paths = [Path(path).expanduser() for path in self.corpus]
        return Files(paths, documents=self.documents, field=self.field, errors=self.errors)


@dataclass(frozen=True, kw_only=True)
class List:
    """What is prepared, how large it is, and where."""

    json: bool = False
    """As JSON, for scripts."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Look into a dataset."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """The dataset's name or folder."""
    doc: int | None = None
    """Print this document, counted from 0, decoded back."""
    split: Literal["train", "val", "test"] = "train"
    """The split that --doc counts in."""
    check: bool = False
    """Prove it intact: hashes, ids below the vocabulary, a sample of documents encoded again."""
    json: bool = False
    """As JSON, for scripts."""


def prepare(argv: list[str]) -> int:
    """`oelm data prepare`."""
    options = parse(Prepare, argv, prog="oelm data prepare")
    from oelm.data.prepare import prepare as run

    try:
        with _progress() as progress:
            dataset = run(
                options.find(), options.tokenizer, name=options.name, out=options.out, val=options.val,
                test=options.test, max_tokens=options.max_tokens, max_docs=options.max_docs,
                workers=options.workers, force=options.force, progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        print("oelm: stopped; nothing of this attempt was kept", file=sys.stderr)
        return 130
    _summary(dataset)
    return 0


def list_(argv: list[str]) -> int:
    """`oelm data list`."""
    options = parse(List, argv, prog="oelm data list")
    from oelm.data.dataset import SPLITS, Dataset, data_home, installed

    rows = []
    for name, path in installed().items():
        try:
            meta = Dataset.open(path).meta
            tokens = {split: meta["splits"][split]["tokens"] for split in SPLITS}
            size = sum(file.stat().st_size for file in path.iterdir())
            rows.append(
                {
                    "name": name,
                    "tokenizer": meta["tokenizer"]["name"],
                    "tokens": tokens,
                    "bytes": size,
                }
            )
        except UserError as error:
            rows.append({"name": name, "fault": str(error)})
    if options.json:
        print(json.dumps({"home": str(data_home() / "datasets"), "datasets": rows}, indent=2))
        return 0
    if not rows:
        print(
            f"nothing in {data_home() / 'datasets'}; try `oelm data prepare sotu --tokenizer bpe:2048`"
        )
        return 0
    wide = max(len(str(row["name"])) for row in rows)
    print(f"{'name':<{wide}}  {'tokenizer':<10} {'train':>14} {'val':>12} {'test':>12} {'MB':>9}")
    for row in rows:
        if "fault" in row:
            print(f"{row['name']:<{wide}}  unusable: {row['fault']}")
            continue
        counts = row["tokens"]
        numbers = f"{counts['train']:>14,} {counts['val']:>12,} {counts['test']:>12,}"
        print(f"{row['name']:<{wide}}  {row['tokenizer']:<10} {numbers} {row['bytes'] / 1e6:>9.1f}")
    print(f"tokens per split; in {data_home() / 'datasets'}")
    return 0


def show(argv: list[str]) -> int:
    """`oelm data show`."""
    options = parse(Show, argv, prog="oelm data show")
    from oelm.data import inspect
    from oelm.data.dataset import SPLITS, Dataset

    dataset = Dataset.open(options.name)
    if options.doc is not None:
        print(dataset.tokenizer().decode(dataset.document(options.split, options.doc).tolist()))
        return 0
    if options.check:
        for line in inspect.check(dataset):
            print(line)
        return 0
    rows = {split: inspect.histogram(inspect.lengths(dataset, split)) for split in SPLITS}
    shared = inspect.duplicates(dataset)
    if options.json:
        print(json.dumps({**dataset.meta, "lengths": rows, "duplicates": shared}, indent=2))
        return 0
    _summary(dataset)
    print("documents of train by length in tokens")
    most = max(count for _, _, count in rows["train"])
    for low, high, count in rows["train"]:
        print(f"  {low:>9,} – {high:<9,} {count:>10,} {'█' * round(40 * count / most)}")
    print(
        "documents in two splits: "
        + ", ".join(f"{pair} {count:,}" for pair, count in shared.items())
    )
    return 0


def _summary(dataset: "Dataset") -> None:
    meta = dataset.meta
    print(
        f"{dataset.name}: {meta['tokenizer']['name']}, {dataset.vocab_size:,} tokens; in {dataset.path}"
    )
    print(f"{'':<6} {'tokens':>14} {'documents':>11} {'bytes of text':>15} {'bytes/token':>12}")
    for split, about in meta["splits"].items():
        ratio = about["bytes"] / about["tokens"]
        counts = f"{about['tokens']:>14,} {about['documents']:>11,} {about['bytes']:>15,}"
        print(f"{split:<6} {counts} {ratio:>12.2f}")
    print(f"split: {meta['split_rule']}")


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A bar on a terminal, silence elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, share: float | None, documents: int, tokens: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=None, counts="")
            elapsed = bar.tasks[-1].elapsed or 0.0
            rate = f", {tokens / elapsed:,.0f} tokens/s" if tokens and elapsed else ""
            bar.update(
                tasks[what],
                total=None if share is None else 1.0,
                completed=share or 0.0,
                counts=f"{documents:,} documents{rate}",
            )

        yield report


ACTIONS: dict[str, Callable[[list[str]], int]] = {"prepare": prepare, "list": list_, "show": show}


def data(argv: list[str]) -> int:
    """Hand over to the action."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] not in ACTIONS:
        raise unknown("action of oelm data", argv[0], ACTIONS)
    return ACTIONS[argv[0]](argv[1:])
