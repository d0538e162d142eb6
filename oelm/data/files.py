"""Local files and folders as a corpus: text, JSON, CSV, TSV, parquet; plain, gzipped or zstd."""

import codecs
import gzip
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

from oelm.data.corpora import Corpus
from oelm.data.formats import BLOCK, Reading, read
from oelm.data.tokenizers import EOT
from oelm.errors import UserError

KINDS = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
COMPRESSED = (".gz", ".zst")
EARLY = 2**22  # how far into a text file to look for the end-of-text token
SPLITS_BY_NAME = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


class Files(Corpus):
    """Local files and folders, in order of their paths.

    If every file is named after a split (`train-00.parquet`, `stories_valid.txt`), those are the splits.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        documents: Literal["auto", "eot", "blank-line", "file"] = "auto",
        field: str = "text",
        errors: Literal["strict", "replace"] = "strict",
    ) -> None:
        found = [file for path in paths for file in _files_at(path)]
        named = [_split_named(file) for file in found]
        if "train" not in named or None in named:
            named = ["train"] * len(found)
        self._files: dict[str, list[Path]] = {
            split: [file for name, file in zip(named, found, strict=True) if name == split]
            for split in ("train", "val", "test")
            if split in named
        }
        self.splits = tuple(self._files)
        self.name = re.sub(r"[^\w-]+", "-", paths[0].resolve().name.split(".")[0])
        self._how = Reading(
            _documents_in(found) if documents == "auto" else documents, field, errors
        )

    def documents(self, split: str) -> Iterator[str]:
        """The documents of the files of a split; what holds only white space is left out."""
        files = self._files[split]
        total, before = sum(file.stat().st_size for file in files) or 1, 0
        for file in files:
            with _faults_of(file), open(file, "rb") as raw, _decompressed(file, raw) as stream:
                for text in read(_kind(file), stream, self._how):
                    if text and not text.isspace():
                        yield text
                    if not raw.closed:  # as it is once a compressed parquet file has been unpacked
                        self.done = (before + raw.tell()) / total
            before += file.stat().st_size
            self.done = before / total

    def origin(self) -> dict[str, Any]:
        """The files, how they were read, and enough to notice that they changed."""
        files = [file for files in self._files.values() for file in files]
        return {
            "name": self.name,
            "files": [str(file.resolve()) for file in files],
            "file_bytes": sum(file.stat().st_size for file in files),
            "modified": max(int(file.stat().st_mtime) for file in files),
            "documents": self._how.documents,
            "field": self._how.field,
            "errors": self._how.errors,
        }


@contextmanager
def _faults_of(file: Path) -> Iterator[None]:
    """Names the file in whatever goes wrong in reading it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{file}: invalid UTF-8{_first_invalid(file)}; "
            "`--errors replace` goes on with replacement characters"
        ) from None
    except PermissionError:
        raise UserError(f"{file}: not readable by this user") from None
    except (EOFError, zlib.error, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the disk's fault, not the file's
            raise
        raise UserError(f"{file}: truncated or damaged ({error})") from None


def _documents_in(files: list[Path]) -> Literal["eot", "blank-line", "file"]:
    """By the end-of-text token if a text file soon shows one; else the paragraphs of one, or whole files."""
    texts = [file for file in files if _kind(file) == "txt"]
    for file in texts:
        with _faults_of(file), open(file, "rb") as raw, _decompressed(file, raw) as stream:
            if EOT.encode() in stream.read(EARLY):
                return "eot"
    return "blank-line" if len(texts) == 1 else "file"


def _hidden(file: Path, below: Path) -> bool:
    """Whether it, or a folder it lies in, is what editors and tools keep for themselves."""
    return any(part.startswith(".") for part in file.relative_to(below).parts)


def _files_at(path: Path) -> list[Path]:
    known = ", ".join(KINDS) + " (also with .gz or .zst)"
    if path.is_dir():
        files = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file() and _suffix(file) in KINDS and not _hidden(file, path)
        ]
        if not files:
            raise UserError(f"no file in {path} ends in one of {known}")
        return files
    if not path.is_file():
        raise UserError(f"no file or folder at {path}")
    if _suffix(path) not in KINDS:
        raise UserError(f"cannot tell what {path} is; its name must end in one of {known}")
    return [path]


def _suffix(file: Path) -> str:
    """`a.jsonl.gz` → `.jsonl`."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _kind(file: Path) -> str:
    """The format; a `.json` that does not open a list holds JSON lines, as many do."""
    kind = KINDS[_suffix(file)]
    if kind == "json":
        with _faults_of(file), open(file, "rb") as raw, _decompressed(file, raw) as stream:
            start = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        return "json" if start.startswith(b"[") else "jsonl"
    return kind


def _split_named(file: Path) -> str | None:
    """`train-00000-of-00002.parquet` → `train`; None if the name names no split, or several."""
    words = re.split(r"[^a-z]+", file.name.split(".")[0].lower())
    splits = {SPLITS_BY_NAME[word] for word in words if word in SPLITS_BY_NAME}
    return splits.pop() if len(splits) == 1 else None


def _decompressed(file: Path, raw: IO[bytes]) -> IO[bytes]:
    suffix = file.suffix.lower()
    if suffix not in COMPRESSED:
        return raw
    stream: Any
    if suffix == ".gz":
        stream = gzip.GzipFile(fileobj=raw)
    else:
        import pyarrow

        # Unlike zstandard's own reader, this one notices a truncated file.
        stream = pyarrow.CompressedInputStream(raw, "zstd")
    if _suffix(file) == ".parquet":
        # Parquet is read from its end, which a compressed stream cannot do.
        whole = tempfile.TemporaryFile()  # noqa: SIM115
        shutil.copyfileobj(stream, whole)
        return cast(IO[bytes], whole)
    return cast(IO[bytes], stream)


def _first_invalid(file: Path) -> str:
    """` at byte n`: the first, in the decompressed text, that is no UTF-8; nothing for parquet."""
    if _suffix(file) == ".parquet":
        return ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with open(file, "rb") as raw, _decompressed(file, raw) as stream:
        while True:
            block = stream.read(BLOCK)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f" at byte {offset - pending + error.start}"
            offset += len(block)
