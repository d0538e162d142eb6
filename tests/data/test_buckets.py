import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data.classification import Buckets, LabelledDataset, OwnEncoding, in_order
from oelm.data.labelled import Labelled, Row
from oelm.errors import UserError

LENGTHS = st.lists(st.integers(1, 500), min_size=8, max_size=300).map(np.array)


@given(LENGTHS, st.integers(1, 8), st.integers(0, 2**40))
def test_an_epoch_visits_a_row_at_most_once_and_misses_less_than_a_batch(lengths, batch, seed):
    buckets = Buckets(lengths, batch, seed)
    for epoch in (0, 3):
        first = epoch * buckets.batches_per_epoch
        seen = np.concatenate([buckets.rows(first + t) for t in range(buckets.batches_per_epoch)])
        assert len(np.unique(seen)) == len(seen)
        assert len(lengths) - len(seen) < batch


@given(LENGTHS, st.integers(0, 100))
def test_batch_t_depends_on_seed_and_t_alone(lengths, t):
    one, two = (Buckets(lengths, 4, 7) for _ in range(2))
    two.rows(0)
    two.rows(t + 50)
    assert np.array_equal(one.rows(t), two.rows(t))


def test_seeds_and_epochs_differ_and_the_order_is_the_same_anywhere():
    lengths = np.arange(64)
    buckets = Buckets(lengths, 4, 0)
    assert buckets.rows(0).tolist() == [1, 4, 5, 9]
    assert not np.array_equal(buckets.rows(0), Buckets(lengths, 4, 1).rows(0))
    assert not np.array_equal(buckets.rows(0), buckets.rows(16))


def test_sorting_in_pools_leaves_little_padding():
    lengths = np.random.default_rng(0).lognormal(4, 1, 20_000).astype(np.int64) + 1
    padding = Buckets(lengths, 16, 0).padding()
    assert padding["unsorted"] > 0.5
    assert padding["bucketed"] < 0.2


def test_too_few_rows():
    with pytest.raises(UserError, match="3 rows, too few for a batch of 4"):
        Buckets(np.ones(3, np.int64), 4, 0)


@given(LENGTHS, st.integers(1, 9))
def test_evaluation_walks_every_row_once(lengths, batch):
    rows = np.arange(0, len(lengths), 2)
    found = np.concatenate(list(in_order(lengths, rows, batch)))
    assert sorted(found.tolist()) == rows.tolist()
    assert (np.diff(lengths[found]) >= 0).all()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(8, 30))
def test_what_is_too_long_loses_its_end_the_longer_text_first(a, b, limit):
    encoding = OwnEncoding("bytes", limit)
    encoding.learn([])
    ids, second, cut = encoding.encode(Row(("x" * a, "y" * b), "0", ""))
    kept_a, kept_b = ids.count(ord("x")), ids.count(ord("y"))
    assert cut == (a + b + 3 > limit)
    assert len(ids) == min(limit, a + b + 3)
    assert ids[0] == ids[-1] == 256
    assert ids[second - 1] == 256
    assert second == kept_a + 2
    if cut:
        assert kept_a == a or kept_b == b or abs(kept_a - kept_b) <= 1
        assert kept_a >= min(a, (limit - 3) // 2)
        assert kept_b >= min(b, (limit - 3) // 2)


def test_one_text_is_cut_and_counted():
    encoding = OwnEncoding("bytes", 8)
    encoding.learn([])
    assert encoding.encode(Row(("abcdefghij",), "0", "")) == ([256, *b"abcdef", 256], 8, True)
    assert encoding.encode(Row(("abc",), "0", "")) == ([256, *b"abc", 256], 5, False)


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "home"))
    file = tmp_path / "reviews.tsv"
    rows = [f"{'good' if i % 2 else 'bad'} {'film ' * (i % 9)}{i}\t{i % 2}" for i in range(120)]
    file.write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    return file


def test_a_dataset_is_made_once_and_again_when_the_rows_change(reviews):
    first = LabelledDataset(str(reviews), OwnEncoding("bytes", 24))
    train = first.examples("train")
    assert first.classes == ["0", "1"]
    assert train.lengths.max() == 24
    long = [
        row for row in Labelled.parse(str(reviews)).read()[0]["train"] if len(row.texts[0]) > 22
    ]
    assert first.meta["splits"]["train"]["truncated"] == len(long) > 0
    made = (first.path / "meta.json").stat().st_mtime_ns
    again = LabelledDataset(str(reviews), OwnEncoding("bytes", 24))
    assert (again.path / "meta.json").stat().st_mtime_ns == made
    assert LabelledDataset(str(reviews), OwnEncoding("bytes", 32)).path != first.path
    reviews.write_text(reviews.read_text() + "new film\t1\n")
    assert LabelledDataset(str(reviews), OwnEncoding("bytes", 24)).path != first.path


def test_batches_hold_the_texts_and_mark_padding_and_parts(reviews):
    dataset = LabelledDataset(str(reviews), OwnEncoding("bytes", 32))
    examples = dataset.examples("train")
    rows = np.array([0, 5, 9])
    tokens, parts, labels = examples.batch(rows, dataset.pad)
    assert tokens.shape == parts.shape == (3, examples.lengths[rows].max())
    for i, row in enumerate(rows):
        length = examples.lengths[row]
        assert tokens[i, 0] == tokens[i, length - 1] == 256
        assert parts[i].tolist() == [1] * length + [0] * (tokens.shape[1] - length)
        text = bytes(tokens[i, 1 : length - 1].tolist()).decode()
        assert text.startswith("good" if labels[i] else "bad")
    part = examples.batch(rows, dataset.pad, slice(1, 3))
    assert np.array_equal(part[0], tokens[1:])


def test_a_bpe_is_learnt_from_the_training_rows_and_kept(reviews):
    dataset = LabelledDataset(str(reviews), OwnEncoding("bpe:300", 32))
    assert dataset.vocab_size == 300
    stored = json.loads((dataset.path / "tokenizer.json").read_text())
    assert len(stored["model"]["vocab"]) == 300


@pytest.mark.parametrize(
    ("spec", "length", "match"),
    [
        ("word", 32, "unknown tokenizer 'word'"),
        ("bpe:x", 32, "bpe:N"),
        ("bytes", 4, "use 8 or more"),
    ],
)
def test_encodings_that_make_no_sense(spec, length, match):
    with pytest.raises(UserError, match=match):
        OwnEncoding(spec, length)
