import json
import os
import re

import numpy as np
import pytest

from oelm.data.dataset import SPLITS, Dataset, data_home, installed
from oelm.data.files import Files
from oelm.data.inspect import check, duplicates, histogram, lengths
from oelm.data.prepare import prepare
from oelm.errors import UserError

TEXTS = [f"Number {n} is {'small' if n < 200 else 'large'}." for n in range(400)]


@pytest.fixture
def dataset(tmp_path):
    (tmp_path / "some.txt").write_text("<|endoftext|>".join(TEXTS))
    return prepare(Files([tmp_path / "some.txt"]), "bpe:300")


def edit(dataset: Dataset, file: str, change) -> None:
    path = dataset.path / file
    path.write_bytes(change(path.read_bytes()))


def test_found_by_name_by_path_and_by_corpus(dataset, home, tmp_path, monkeypatch):
    assert Dataset.open("some-bpe300").path == home / "some-bpe300" == dataset.path
    assert Dataset.open(dataset.path).name == "some-bpe300"
    assert Dataset.open("some").path == dataset.path
    assert installed() == {"some-bpe300": dataset.path}
    prepare(Files([tmp_path / "some.txt"]), "bytes")
    with pytest.raises(
        UserError, match="prepared more than once; choose from: some-bpe300, some-bytes"
    ):
        Dataset.open("some")
    with pytest.raises(
        UserError, match=r"no dataset 'some-bpe30' in .*did you mean 'some-bpe300'\?"
    ):
        Dataset.open("some-bpe30")
    monkeypatch.delenv("OELM_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_home().name == "oelm"
    assert tmp_path in data_home().parents
    with pytest.raises(UserError, match="`oelm data prepare CORPUS` makes one"):
        Dataset.open("some")


def test_tokens_and_documents(dataset):
    tokenizer = dataset.tokenizer()
    for split in SPLITS:
        tokens = dataset.tokens(split)
        assert isinstance(tokens, np.memmap)
        assert tokens.dtype == np.uint16
        assert tokens[-1] == dataset.eot == tokenizer.eot
        texts = [tokenizer.decode(ids.tolist()) for ids in dataset.documents(split)]
        assert set(texts) <= set(TEXTS)
        assert tokenizer.decode(dataset.document(split, 2).tolist()) == texts[2]
        assert lengths(dataset, split).tolist() == [len(ids) for ids in dataset.documents(split)]
    with pytest.raises(UserError, match=r"val of 'some-bpe300' has documents 0 to \d+, not 999"):
        dataset.document("val", 999)


def test_an_intact_dataset_passes(dataset):
    lines = list(check(dataset))
    assert len(lines) == 4
    for split, line in zip(SPLITS, lines[1:], strict=True):
        about = dataset.meta["splits"][split]
        assert line.startswith(
            f"{split}: hash, {about['tokens']:,} ids below 300, {about['documents']:,} "
        )


@pytest.mark.parametrize("split", SPLITS)
def test_a_truncated_or_longer_file_is_refused_at_once(dataset, split):
    size = dataset.meta["splits"][split]["tokens"] * 2
    edit(dataset, f"{split}.bin", lambda data: data[:-2])
    with pytest.raises(UserError, match=rf"{split}.bin has {size - 2:,} bytes instead of {size:,}"):
        Dataset.open("some")
    edit(dataset, f"{split}.bin", lambda data: data + b"\0\0\0\0")
    with pytest.raises(UserError, match=rf"{split}.bin has {size + 2:,} bytes"):
        Dataset.open("some")
    os.remove(dataset.path / f"{split}.bin")
    with pytest.raises(UserError, match=rf"{split}.bin has 0 bytes instead of {size:,}"):
        Dataset.open("some")


def test_altered_ids_are_found_by_check(dataset):
    data = (dataset.path / "val.bin").read_bytes()
    words = np.frombuffer(data, np.uint16).copy()

    def fault(change) -> str:
        altered = words.copy()
        change(altered)
        (dataset.path / "val.bin").write_bytes(altered.tobytes())
        with pytest.raises(UserError) as caught:
            list(check(Dataset.open("some")))
        assert "prepare the dataset again" in str(caught.value)
        return str(caught.value)

    def swap(ids):
        ids[[0, 1]] = ids[[1, 0]]

    assert "val.bin: altered since it was written" in fault(swap)
    assert "val.bin: id 300 at token 3 is beyond the vocabulary" in fault(
        lambda ids: ids.__setitem__(3, 300)
    )
    assert re.search(
        r"val.bin: \d+ documents instead of", fault(lambda ids: ids.__setitem__(0, dataset.eot))
    )
    assert "does not end a document" in fault(lambda ids: ids.__setitem__(-1, 5))


def test_ids_that_no_text_has_are_found_even_if_the_hash_is_right(dataset):
    """Made with another tokenizer than the one beside it: every hash agrees, and no document does."""
    import hashlib

    ids = np.fromfile(dataset.path / "val.bin", np.uint16)
    merged = dataset.tokenizer().encode("Number ")
    assert len(merged) < 7
    spelt = [i for letter in "Number " for i in dataset.tokenizer().encode(letter)]
    ids = np.concatenate([np.array([*spelt, dataset.eot], np.uint16), ids])
    ids.tofile(dataset.path / "val.bin")
    meta = dataset.meta
    meta["splits"]["val"].update(
        tokens=len(ids),
        documents=meta["splits"]["val"]["documents"] + 1,
        sha256=hashlib.sha256(ids.tobytes()).hexdigest(),
    )
    (dataset.path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(
        UserError, match=r"val.bin: document 0 does not give its own ids when encoded again"
    ):
        list(check(Dataset.open("some")))


def test_an_altered_tokenizer_or_meta_is_refused(dataset):
    edit(dataset, "tokenizer.json", lambda data: data.replace(b'"type":"BPE"', b'"type": "BPE"'))
    with pytest.raises(UserError, match=r"tokenizer.json was altered since it was written"):
        dataset.tokenizer()
    os.remove(dataset.path / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer.json is missing"):
        dataset.tokenizer()
    edit(dataset, "meta.json", lambda data: data.replace(b'"schema": 1', b'"schema": 99'))
    with pytest.raises(UserError, match="has schema 99, this version reads 1; prepare it again"):
        Dataset.open("some")
    for broken in (b"", b"{}", b"[]", b'{"schema": 1}'):
        edit(dataset, "meta.json", lambda _, broken=broken: broken)
        with pytest.raises(UserError, match="is not a whole dataset"):
            Dataset.open(dataset.path)


def test_another_vocabulary_is_refused(dataset):
    dataset.require_vocabulary(300)
    dataset.require_vocabulary(300, dataset.meta["tokenizer"]["sha256"])
    with pytest.raises(
        UserError, match=r"made for a vocabulary of 50,257 tokens, dataset .* has 300"
    ):
        dataset.require_vocabulary(50257)
    with pytest.raises(UserError, match="made for another tokenizer than 'bpe:300'"):
        dataset.require_vocabulary(300, "0" * 64)


def test_duplicates_between_official_splits(tmp_path):
    for split, texts in {"train": "abcd", "valid": "cdx", "test": "dxyz"}.items():
        (tmp_path / f"{split}.jsonl").write_text(
            "\n".join(json.dumps({"text": text}) for text in texts)
        )
    dataset = prepare(
        Files([tmp_path / f"{s}.jsonl" for s in ("train", "valid", "test")]), "bytes", name="d"
    )
    assert duplicates(dataset) == {"val and train": 2, "test and train": 1, "val and test": 2}


def test_histogram():
    rows = histogram(np.array([1, 5, 6, 8, 15, 16, 16]))
    assert rows == [(0, 1, 1), (2, 3, 0), (4, 7, 2), (8, 15, 2), (16, 31, 2)]
