import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data import encode
from oelm.data.corpora import Sotu
from oelm.data.dataset import SPLITS, Dataset
from oelm.data.files import Files
from oelm.data.prepare import dataset_name, prepare, split_of
from oelm.data.tokenizers import train_bpe
from oelm.errors import UserError

TEXTS = [f"Document {n} says: " + "word " * (n % 17) + f"and {n * n}." for n in range(400)]


def corpus(folder: Path, texts: list[str] = TEXTS, name: str = "some.jsonl") -> Files:
    file = folder / name
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Files([file])


def texts_of(dataset: Dataset, split: str) -> list[str]:
    tokenizer = dataset.tokenizer()
    return [tokenizer.decode(ids.tolist()) for ids in dataset.documents(split)]


def files_of(dataset: Dataset) -> dict[str, bytes]:
    return {split: (dataset.path / f"{split}.bin").read_bytes() for split in SPLITS}


@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes", "bpe:300"])
def test_a_dataset_holds_its_documents_and_says_so(tmp_path, home, tokenizer):
    dataset = prepare(corpus(tmp_path), tokenizer)
    assert dataset.path == home / dataset_name("some", tokenizer)
    found = {split: texts_of(dataset, split) for split in SPLITS}
    assert sorted(text for texts in found.values() for text in texts) == sorted(TEXTS)
    for number, split in enumerate(SPLITS):
        assert found[split] == [t for t in TEXTS if split_of(t, 0.05, 0.05) == number], "in order"
        about = dataset.meta["splits"][split]
        raw = (dataset.path / f"{split}.bin").read_bytes()
        assert about == {
            "tokens": len(dataset.tokens(split)),
            "documents": len(found[split]),
            "bytes": sum(len(text.encode()) for text in found[split]),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
        assert dataset.text_bytes(split) == about["bytes"]
    assert dataset.meta["schema"] == 1
    assert dataset.meta["dtype"] == "uint16"
    assert dataset.meta["tokenizer"]["sha256"] == dataset.tokenizer().sha256
    assert not list(home.glob(".*")), "nothing is left beside it"


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0, 0.5), st.floats(0, 0.4))
def test_a_split_depends_on_the_document_alone(text, val, test):
    assert split_of(text, val, test) == split_of(text, val, test)
    assert split_of(text, val, 0) in (0, 1)
    assert (split_of(text, val, test) == 1) == (split_of(text, val, 0) == 1), (
        "test takes nothing from val"
    )
    assert split_of(text, 0, 0) == 0


def test_a_growing_corpus_moves_no_document(tmp_path):
    small = prepare(corpus(tmp_path, TEXTS[:300], "small.jsonl"), "bytes")
    large = prepare(corpus(tmp_path, [*TEXTS, *TEXTS[:50]], "large.jsonl"), "bytes")
    for split in SPLITS:
        assert set(texts_of(small, split)) == set(texts_of(large, split)) & set(TEXTS[:300])
    assert not set(texts_of(large, "train")) & set(texts_of(large, "val")), (
        "equal documents stay together"
    )


def test_the_result_does_not_depend_on_workers_or_chunks(tmp_path, monkeypatch):
    results = []
    for workers, chunk, name in ((1, 2**18, "a"), (2, 100, "b"), (5, 1, "c")):
        monkeypatch.setattr(encode, "CHUNK", chunk)
        dataset = prepare(corpus(tmp_path), "gpt2", workers=workers, max_tokens=3000, name=name)
        results.append(files_of(dataset))
    assert results[0] == results[1] == results[2]


def test_limits_keep_whole_documents(tmp_path):
    dataset = prepare(corpus(tmp_path), "bytes", max_tokens=5000, name="few")
    tokens = dataset.meta["splits"]["train"]["tokens"]
    last = len(texts_of(dataset, "train")[-1]) + 1
    assert tokens - last < 5000 <= tokens
    some = prepare(corpus(tmp_path), "bytes", max_docs=100, name="some")
    assert sorted(text for split in SPLITS for text in texts_of(some, split)) == sorted(TEXTS[:100])


def test_a_bpe_learns_from_the_training_split_only(tmp_path):
    held_out = [text for text in TEXTS if split_of(text, 0.3, 0.3)]
    train = [text for text in TEXTS if not split_of(text, 0.3, 0.3)]
    whole = prepare(corpus(tmp_path), "bpe:400", val=0.3, test=0.3)
    assert whole.tokenizer().sha256 == train_bpe(400, train).sha256
    assert whole.tokenizer().sha256 != train_bpe(400, train + held_out).sha256


def test_a_large_vocabulary_is_stored_in_uint32(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    backend = Tokenizer(WordLevel({"[UNK]": 70_000, "says:": 69_999, "</s>": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    (tmp_path / "words").mkdir()
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    dataset = prepare(corpus(tmp_path), str(tmp_path / "words"))
    assert dataset.name == "some-words"
    assert (dataset.vocab_size, dataset.tokens("train").dtype) == (70_001, np.uint32)
    assert set(np.unique(dataset.tokens("train"))) == {3, 69_999, 70_000}


def test_made_alike_is_opened_and_otherwise_refused(tmp_path):
    first = prepare(corpus(tmp_path), "bytes")
    stamp = (first.path / "meta.json").stat().st_mtime_ns
    source = Files([tmp_path / "some.jsonl"])
    assert (prepare(source, "bytes").path / "meta.json").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="was made with other val, max_docs; `--force` replaces it"):
        prepare(source, "bytes", val=0.2, max_docs=300)
    again = prepare(source, "bytes", val=0.2, force=True)
    assert again.path == first.path
    assert again.meta["recipe"]["val"] == 0.2


def test_an_out_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="mine holds other files; choose an empty or a new folder"):
        prepare(corpus(tmp_path), "bytes", out=tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    dataset = prepare(corpus(tmp_path), "bytes", out=tmp_path / "new")
    assert dataset.path == tmp_path / "new"
    assert Dataset.open(tmp_path / "new").name == "new"


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "the corpus is empty: no document with any text in it"),
        (["", "  "], {}, "the corpus is empty"),
        (
            TEXTS[:3],
            {},
            r"split 'val' would hold no document \(there are 3 in all\); give more text, larger --val",
        ),
        (TEXTS, {"test": 0.0}, "split 'test' would hold no document"),
        (TEXTS, {"val": 0.5, "test": 0.5}, "must be shares that leave some text for train"),
        (TEXTS, {"val": -0.1}, "must be shares that leave some text for train"),
        (TEXTS, {"max_docs": 0}, "max_docs must be at least 1, not 0"),
        (TEXTS, {"workers": 0}, "workers must be at least 1, not 0"),
        (TEXTS, {"tokenizer": "gpt5"}, "unknown tokenizer 'gpt5'"),
    ],
)
def test_bad_input_leaves_nothing_and_loses_nothing(tmp_path, home, texts, options, message):
    earlier = files_of(prepare(corpus(tmp_path), "bytes", name="kept"))
    options = {"tokenizer": "bytes", **options}
    with pytest.raises(UserError, match=message) as caught:
        prepare(corpus(tmp_path, texts), name="kept", force=True, **options)
    assert "\n" not in str(caught.value)
    assert files_of(Dataset.open("kept")) == earlier
    assert [path.name for path in home.iterdir()] == ["kept"]


def test_names_and_places_that_cannot_be(tmp_path, home):
    with pytest.raises(UserError, match="a dataset's name has no '/', as 'a/b' has"):
        prepare(corpus(tmp_path), "bytes", name="a/b")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file is a file; choose a new folder"):
        prepare(corpus(tmp_path), "bytes", out=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def child(home: Path, code: str) -> list[str]:
    """A process that prepares `some.jsonl` as bytes under the name `kept`, again."""
    program = (
        "import sys; from pathlib import Path; from oelm.cli import main; "
        f"{code}; main(['data', 'prepare', {str(home.parent.parent / 'some.jsonl')!r}, "
        "'--tokenizer', 'bytes', '--name', 'kept', '--force'])"
    )
    return [sys.executable, "-c", program]


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, home):
    earlier = files_of(prepare(corpus(tmp_path), "bytes", name="kept"))
    limit = len(earlier["train"]) // 2
    limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
    done = subprocess.run(child(home, "pass"), preexec_fn=limited, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"oelm: no room to write {home / 'kept'} (File too large); free some space"
    )
    assert done.stderr.count("\n") == 1
    assert files_of(Dataset.open("kept")) == earlier
    assert [path.name for path in home.iterdir()] == ["kept"]


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_preparation_leaves_nothing_that_loads(tmp_path, home, stop):
    earlier = files_of(prepare(corpus(tmp_path), "bytes", name="kept"))
    slow = (
        "import time; import oelm.data.formats as f; t = f._text; "
        "f._text = lambda *a: (time.sleep(0.05), t(*a))[1]"
    )
    # A shell that runs the tests in its background has them, and all that they start, ignore SIGINT.
    heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(
        child(home, slow), stderr=subprocess.PIPE, text=True, preexec_fn=heeds
    )
    partial = home / ".kept.partial"
    try:
        while not (partial / "train.bin").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        with pytest.raises(UserError, match="kept is being prepared by another process"):
            prepare(Files([tmp_path / "some.jsonl"]), "bytes", name="kept", force=True)
    finally:
        process.send_signal(stop)
        errors = process.communicate()[1]
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert errors == "oelm: stopped; nothing of this attempt was kept\n"
        assert not partial.exists()
    assert files_of(Dataset.open("kept")) == earlier
    with pytest.raises(UserError, match="no dataset"):
        Dataset.open(".kept.partial")
    again = prepare(Files([tmp_path / "some.jsonl"]), "bytes", name="kept", force=True)
    assert files_of(again) == earlier
    assert [path.name for path in home.iterdir()] == ["kept"], "what was left is cleared"


def test_killed_between_the_two_renames(tmp_path, home):
    dataset = prepare(corpus(tmp_path), "bytes", name="kept")
    earlier = files_of(dataset)
    os.rename(home / "kept", home / ".kept.old")
    with pytest.raises(UserError, match="the corpus is empty"):
        prepare(corpus(tmp_path, []), "bytes", name="kept")
    assert files_of(Dataset.open("kept")) == earlier


def test_sotu_splits_are_of_a_sensible_size_and_known(home):
    dataset = prepare(Sotu(), "bytes")
    documents = {split: about["documents"] for split, about in dataset.meta["splits"].items()}
    assert documents == {"train": 228, "val": 11, "test": 10}
    total = sum(dataset.text_bytes(split) for split in SPLITS)
    for split in ("val", "test"):
        assert 0.02 < dataset.text_bytes(split) / total < 0.06
