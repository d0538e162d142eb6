import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.batches import IGNORE, Batches, evaluation_windows
from oelm.errors import UserError

SHAPES = {
    "length": st.integers(2, 700),
    "seq_len": st.integers(1, 40),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 1000),
}


def windows_of_epoch(batches: Batches, epoch: int) -> np.ndarray:
    n = batches.windows_per_epoch
    return batches.starts(np.arange(epoch * n, (epoch + 1) * n, dtype=np.uint64))


@given(**SHAPES)
@settings(deadline=None)
def test_an_epoch_sees_each_token_once_but_for_fewer_than_two_windows(length, seq_len, seed, epoch):
    if length <= seq_len:
        return
    batches = Batches(np.arange(length), 1, seq_len, seed)
    starts = windows_of_epoch(batches, epoch)
    seen = (starts[:, None] + np.arange(seq_len)).ravel()
    assert len(set(seen.tolist())) == len(seen) == batches.tokens_per_epoch
    assert seen.min() >= 0
    assert seen.max() + 1 < length, "the last token has no target"
    assert length - len(seen) < 2 * seq_len
    assert len(set((starts % seq_len).tolist())) == 1, "one phase per epoch"


@given(t=st.integers(0, 10**6), world=st.sampled_from([1, 2, 3, 4, 6, 12]), seed=st.integers(0, 99))
@settings(deadline=None)
def test_a_batch_is_the_same_for_any_number_of_processes(t, world, seed):
    batches = Batches(np.arange(1000), 12, 8, seed)
    whole_x, whole_y = batches.batch(t)
    parts = [batches.batch(t, rank, world) for rank in range(world)]
    assert np.array_equal(np.concatenate([x for x, _ in parts]), whole_x)
    assert np.array_equal(np.concatenate([y for _, y in parts]), whole_y)
    assert np.array_equal(whole_y, whole_x + 1)
    assert whole_x.dtype == whole_y.dtype == np.int64
    assert whole_x.shape == (12, 8)


def test_batch_t_never_changes():
    """Recorded numbers: a changed permutation would change every paired comparison."""
    batches = Batches(np.arange(10_000, dtype=np.uint16), 4, 16, data_seed=7)
    assert [batches.batch(t)[0][:, 0].tolist() for t in (0, 1, 155, 156, 10**9)] == [
        [4473, 3673, 4761, 6713],
        [8441, 5641, 4281, 4665],
        [7849, 4377, 5161, 9289],
        [853, 3621, 2117, 8789],
        [1020, 1676, 7564, 4204],
    ]


def test_epochs_seeds_and_phases_differ():
    tokens = np.arange(64 * 100)
    orders = {
        (seed, epoch): windows_of_epoch(Batches(tokens, 1, 64, seed), epoch)
        for seed in range(4)
        for epoch in range(4)
    }
    assert len({tuple((order // 64).tolist()) for order in orders.values()}) == 16
    assert len({int(order[0] % 64) for order in orders.values()}) > 8


def test_the_order_is_no_worse_than_a_shuffle():
    """Over many epochs each place sees all windows equally often, and neighbours are seldom neighbours."""
    batches = Batches(np.zeros(101 * 8, np.uint8), 1, 8, 3)
    n = batches.windows_per_epoch
    orders = np.array([windows_of_epoch(batches, epoch) // 8 for epoch in range(2000)])
    for place in (0, 1, n // 2, n - 1):
        counts = np.bincount(orders[:, place], minlength=n)
        chi2 = ((counts - 2000 / n) ** 2 / (2000 / n)).sum()
        assert chi2 < n + 5 * np.sqrt(2 * n)
    assert (np.diff(orders, axis=1) == 1).mean() * n == pytest.approx(1, abs=0.1)


def test_prefetch_gives_the_same_batches_and_stops_early():
    batches = Batches(np.arange(5000), 4, 8, 1)
    for rank in range(2):
        for t, (x, y) in enumerate(batches.prefetch(3, 140, rank, 2), 3):
            expected_x, expected_y = batches.batch(t, rank, 2)
            assert np.array_equal(x, expected_x)
            assert np.array_equal(y, expected_y)
        assert t == 139
    endless = batches.prefetch(0, 10**9)
    next(endless)
    endless.close()
    assert list(batches.prefetch(5, 5)) == []


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(
        UserError, match=r"8 tokens, too few for one window of 8 .* smaller seq_len"
    ):
        Batches(np.arange(8), 1, 8, 0)
    x, y = Batches(np.arange(9), 2, 8, 0).batch(5)
    assert x.tolist() == [list(range(8))] * 2
    assert y.tolist() == [list(range(1, 9))] * 2


def test_an_uneven_share_is_refused():
    with pytest.raises(UserError, match="batch_size 4 cannot be shared equally by 3 processes"):
        Batches(np.arange(100), 4, 8, 0).batch(0, 0, 3)


@given(
    length=st.integers(2, 300),
    seq_len=st.integers(1, 20),
    batch_size=st.integers(1, 5),
    limit=st.none() | st.integers(1, 400),
)
@settings(deadline=None)
def test_evaluation_walks_every_token_once_in_order(length, seq_len, batch_size, limit):
    total = min(length - 1, limit or length)
    inputs, targets, counted = [], [], 0
    for x, y, count in evaluation_windows(
        np.arange(length, dtype=np.uint16), seq_len, batch_size, limit
    ):
        assert x.shape == y.shape
        assert x.shape[0] <= batch_size
        real = y != IGNORE
        inputs += x[real].tolist()
        targets += y[real].tolist()
        counted += count
    assert targets == list(range(1, total + 1))
    assert inputs == list(range(total))
    assert counted == total


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(UserError, match="fewer than two tokens"):
        next(evaluation_windows(np.arange(1), 8, 1))
