import gzip
import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from oelm.data import formats
from oelm.data.files import Files, _files_at
from oelm.errors import UserError

TEXTS = [
    "First, with a “quote” and, a comma.",
    'Second\nhas\n\n"lines"',
    "",
    "   \n",
    "日本語 third",
    "x" * 9000,
]
REAL = [text for text in TEXTS if text.strip()]


def table(delimiter: str, texts: list[str]) -> bytes:
    import csv

    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([["id", "text"], *enumerate(texts)])
    return out.getvalue().encode()


def parquet(texts: list[str | None], name: str = "text") -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), name: texts}), out, row_group_size=2)
    return out.getvalue()


def rows(texts: list[str]) -> list[dict[str, object]]:
    return [{"id": number, "text": text} for number, text in enumerate(texts)]


CONTENT = {
    ".txt": "\n<|endoftext|>\n".join(TEXTS).encode(),
    ".jsonl": "\n".join(json.dumps(row) for row in rows(TEXTS)).encode(),
    ".json": json.dumps(rows(TEXTS), indent=1).encode(),
    ".csv": table(",", TEXTS),
    ".tsv": b"id\ttext\n"
    + b"".join(b"%d\t%s\n" % (i, t.replace("\n", " ").encode()) for i, t in enumerate(TEXTS)),
    ".parquet": parquet([*TEXTS[:2], None, *TEXTS[2:]]),
}
PACK = {"": lambda data: data, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def read(path: Path, split: str = "train", **options) -> list[str]:
    return list(Files([path], **options).documents(split))


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("suffix", CONTENT)
def test_every_format_gives_its_documents(tmp_path, suffix, packed):
    file = tmp_path / f"some text{suffix}{packed}"
    file.write_bytes(PACK[packed](CONTENT[suffix]))
    corpus = Files([file])
    texts = list(corpus.documents("train"))
    expected = [text.replace("\n", " ") for text in REAL] if suffix == ".tsv" else REAL
    assert texts == expected
    assert corpus.done == 1
    assert corpus.name == "some-text"


def test_documents_cut_anywhere_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK", 7)
    for suffix in (".txt", ".json"):
        file = tmp_path / f"a{suffix}"
        file.write_bytes(CONTENT[suffix])
        assert read(file, documents="eot") == REAL


def test_text_by_paragraph_and_by_file(tmp_path):
    first = tmp_path / "a.txt"
    first.write_bytes("\ufeffOne\r\nline\r\n\r\n  \r\n\r\nTwo\r\n".encode())
    assert read(first) == ["One\r\nline", "Two"], (
        "a single file without end-of-text: its paragraphs"
    )
    assert read(first, documents="file") == ["One\r\nline\r\n\r\n  \r\n\r\nTwo\r\n"]
    (tmp_path / "b.txt").write_text("Three\n\nFour")
    assert read(tmp_path) == [*read(first, documents="file"), "Three\n\nFour"], (
        "several: whole files"
    )
    assert read(tmp_path, documents="blank-line") == ["One\r\nline", "Two", "Three", "Four"]


def test_files_named_after_splits_are_the_splits(tmp_path):
    for name in (
        "train-00000-of-00002",
        "train-00001-of-00002",
        "validation-00000-of-00001",
        "stories_test",
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    (tmp_path / "README.md").write_text("not data")
    corpus = Files([tmp_path])
    assert corpus.splits == ("train", "val", "test")
    assert read(tmp_path, "train") == ["train-00000-of-00002", "train-00001-of-00002"]
    assert read(tmp_path, "val") == ["validation-00000-of-00001"]
    (tmp_path / "other.jsonl").write_text('{"text": "other"}')
    assert Files([tmp_path]).splits == ("train",), (
        "one file of another name, and the names mean nothing"
    )
    assert len(read(tmp_path)) == 5


def test_what_editors_and_tools_keep_is_no_text(tmp_path):
    for place in ("a.txt", ".hidden.txt", ".ipynb_checkpoints/a-checkpoint.txt", "b/.venv/c.txt"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("text")
    assert [file.name for file in _files_at(tmp_path)] == ["a.txt"]


def test_json_as_strings_or_lines_and_another_field(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('["one", "two"]')
    assert read(file) == ["one", "two"]
    file.write_text('\n{"body": "one"}\n\n{"body": "two"}')
    assert read(file, field="body") == ["one", "two"]
    file.write_text("[]")
    assert read(file) == []


def test_long_fields_of_a_table(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(table(",", ["y" * 300_000]))
    assert read(file) == ["y" * 300_000]


FAULTS = {
    "a.txt": (b"good \xff bad", r"a.txt: invalid UTF-8 at byte 5; `--errors replace`"),
    "cut.txt": ("é".encode()[:1], r"cut.txt: invalid UTF-8 at byte 0;"),
    "a.txt.gz": (gzip.compress(b"x" * 2**21 + b"\xe9!"), r"invalid UTF-8 at byte 2097152;"),
    "a.csv": (b"text\nok\n\xe9\n", r"invalid UTF-8 at byte 8;"),
    "a.jsonl": (b'{"text": "ok"}\n{"text": \n', r"a.jsonl: line 2 is not JSON"),
    "b.jsonl": (b'{"body": "ok", "id": 3}', r"no field 'text'; choose one with --field: body, id"),
    "c.jsonl": (b'{"text": 5}', r"row 1 holds int where text is expected; see --field"),
    "d.jsonl": (b'{"text": "\\ud800"}', r"row 1 holds half a surrogate pair; `--errors replace`"),
    "a.json": (b'[{"text": "ok"}, {"text"', r"element 2 of the list is not JSON"),
    "b.json": (b'["ok"', r"element 1 of the list is not JSON: the list has no end"),
    "b.csv": (b"title,body\n1,2\n", r"no field 'text'; choose one with --field: title, body"),
    "a.parquet": (b"PAR1 not at all", r"a.parquet: not readable as parquet text"),
    "b.parquet": (parquet(["x"], "body"), r"no field 'text'; choose one with --field: id, body"),
    "b.txt.gz": (gzip.compress(b"x" * 1000)[:-9], r"b.txt.gz: truncated or damaged"),
    "c.txt.gz": (b"plain text", r"c.txt.gz: truncated or damaged"),
    "a.txt.zst": (b"plain text", r"a.txt.zst: truncated or damaged"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_the_file_and_the_place(tmp_path, name):
    data, message = FAULTS[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_truncated_zstd_file_is_no_shorter_text(tmp_path):
    file = tmp_path / "a.txt.zst"
    file.write_bytes(PACK[".zst"](bytes(range(32, 127)) * 999)[:-20])
    with pytest.raises(UserError, match="truncated or damaged"):
        read(file)


def test_replacement_goes_on(tmp_path):
    for name in ("a.txt", "a.csv", "d.jsonl"):
        (tmp_path / name).write_bytes(FAULTS[name][0])
    assert read(tmp_path / "a.txt", errors="replace") == ["good \ufffd bad"]
    assert read(tmp_path / "a.csv", errors="replace") == ["ok", "\ufffd"]
    assert read(tmp_path / "d.jsonl", errors="replace") == ["\ufffd"]


def test_invalid_strings_in_parquet(tmp_path):
    file = tmp_path / "a.parquet"
    column = pa.array([b"ok", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), file)
    with pytest.raises(UserError, match=r"a.parquet: invalid UTF-8; `--errors replace`"):
        read(file)
    assert read(file, errors="replace") == ["ok", "\ufffd"]
    pq.write_table(pa.table({"text": [1.5]}), file)
    with pytest.raises(UserError, match="not readable as parquet text"):
        read(file)


def test_paths_that_hold_nothing(tmp_path):
    known = re.escape(".txt, .jsonl, .ndjson, .json, .csv, .tsv, .parquet (also with .gz or .zst)")
    with pytest.raises(UserError, match=f"no file in .* ends in one of {known}"):
        Files([tmp_path])
    with pytest.raises(UserError, match="no file or folder at"):
        Files([tmp_path / "none.txt"])
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(UserError, match=f"cannot tell what .*a.docx is; .* {known}"):
        Files([tmp_path / "a.docx"])
