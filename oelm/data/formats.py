"""One reader per file format: an open file → the texts of its documents, one at a time."""

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from oelm.data.tokenizers import EOT
from oelm.errors import UserError

FIELD_SIZE = 2**31 - 1  # csv's own limit refuses texts beyond 128 kB

BLOCK = 2**17


@dataclass(frozen=True)
class Reading:
    """How to find documents in a file."""

    documents: Literal["eot", "blank-line", "file"]
    field: str
    errors: Literal["strict", "replace"]


def read(kind: str, stream: IO[bytes], how: Reading) -> Iterator[str]:
    """The documents of a file of that kind."""
    if kind == "parquet":
        return _parquet(stream, how)
    text = io.TextIOWrapper(stream, "utf-8-sig", how.errors, newline="")
    if kind == "txt":
        return _texts(text, how.documents)
    rows = _ROWS[kind](text)
    return (_text(row, number, how) for number, row in enumerate(rows, 1))


def _texts(stream: IO[str], documents: str) -> Iterator[str]:
    if documents == "file":
        yield stream.read()
    elif documents == "eot":
        rest = ""
        while block := stream.read(max(BLOCK, len(rest))):  # doubling, for long documents
            *texts, rest = (rest + block).split(EOT)
            yield from (text.strip("\r\n") for text in texts)
        yield rest.strip("\r\n")
    else:
        lines: list[str] = []
        for line in stream:
            if line.isspace():
                yield "".join(lines).rstrip("\r\n")
                lines = []
            else:
                lines.append(line)
        yield "".join(lines).rstrip("\r\n")


def _json_lines(stream: IO[str]) -> Iterator[Any]:
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"line {number} is not JSON: {error}") from None


def _json(stream: IO[str]) -> Iterator[Any]:
    """The elements of a list, one by one, so that the list need not fit in memory."""
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    buffer = stream.read(BLOCK)
    at = buffer.index("[") + 1
    for number in itertools.count(1):
        while True:
            at = between.match(buffer, at).end()  # type: ignore[union-attr]
            if buffer.startswith("]", at):
                return
            try:
                row, end = decoder.raw_decode(buffer, at)
                if end < len(buffer):  # else a number may go on
                    break
                fault = "the list has no end"
            except ValueError as error:
                fault = str(error)
            more = stream.read(max(BLOCK, len(buffer) - at))  # doubling, for long elements
            if not more:
                raise UserError(f"element {number} of the list is not JSON: {fault}")
            buffer, at = buffer[at:] + more, 0
        yield row
        at = end


def _table(stream: IO[str], **style: Any) -> Iterator[Any]:
    csv.field_size_limit(FIELD_SIZE)
    try:
        yield from csv.DictReader(stream, **style)
    except csv.Error as error:
        raise UserError(f"not readable as a table: {error}") from None


def _tsv(stream: IO[str]) -> Iterator[Any]:
    # As people write these files, a quotation mark is just a character.
    return _table(stream, delimiter="\t", quoting=csv.QUOTE_NONE)


_ROWS: dict[str, Callable[[IO[str]], Iterator[Any]]] = {
    "jsonl": _json_lines,
    "json": _json,
    "csv": _table,
    "tsv": _tsv,
}


def _parquet(stream: IO[bytes], how: Reading) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        if how.field not in names:
            raise _no_field(how.field, names)
        for batch in table.iter_batches(256, columns=[how.field], use_threads=False):
            # Arrow does not check its strings: decode them here, where a fault can be handled.
            for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                yield (value or b"").decode(errors=how.errors)
    except pyarrow.ArrowException as error:
        raise UserError(f"not readable as parquet text: {str(error).splitlines()[0]}") from None


def _text(row: Any, number: int, how: Reading) -> str:
    """The document in a row: the field of a mapping, or the string itself."""
    if isinstance(row, dict):
        if how.field not in row:
            raise _no_field(how.field, [str(key) for key in row])
        row = row[how.field]
    if row is None:
        return ""
    if not isinstance(row, str):
        raise UserError(
            f"row {number} holds {type(row).__name__} where text is expected; see --field"
        )
    try:
        row.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which is no text
        if how.errors == "strict":
            raise UserError(
                f"row {number} holds half a surrogate pair; `--errors replace` goes on"
            ) from None
        return row.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return row


def _no_field(field: str, known: Sequence[str]) -> UserError:
    return UserError(f"no field '{field}'; choose one with --field: {', '.join(known)}")
