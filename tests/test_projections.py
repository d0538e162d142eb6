import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.projections import INITS, hadamard, make, orthogonality_error, stream

HADAMARD_DIGESTS = ["2d7daa3523d6d1d4", "7d8b9e7492098bb6", "f3ee24e7b6198a60"]


@given(
    heads=st.integers(1, 6),
    d_head=st.integers(1, 16),
    more=st.integers(0, 40),
    seed=st.integers(0, 2**63),
)
@settings(max_examples=40, deadline=None)
def test_headwise_rows_are_orthonormal_in_each_head(heads, d_head, more, seed):
    shape = (heads * d_head, d_head + more)  # non-square, as grouped-query keys are
    weight = make("headwise", shape, heads=heads, seed=seed, name="q")
    assert weight.shape == shape
    for block in weight.double().chunk(heads):
        assert (block @ block.T - torch.eye(d_head)).abs().max() < 1e-6


@given(rows=st.integers(1, 48), columns=st.integers(1, 48))
@settings(max_examples=40, deadline=None)
def test_a_global_frame_is_orthonormal_on_its_shorter_side(rows, columns):
    weight = make("global", (rows, columns), heads=1, seed=0, name="q").double()
    frame = weight if rows <= columns else weight.T
    assert (frame @ frame.T - torch.eye(len(frame))).abs().max() < 1e-6


@given(columns=st.integers(1, 96), data=st.data())
@settings(max_examples=40, deadline=None)
def test_hadamard_rows_are_orthonormal_and_of_one_size(columns, data):
    rows = data.draw(st.integers(1, columns))
    weight = make("hadamard", (rows, columns), heads=1, seed=3, name="q").double()
    assert (weight @ weight.T - torch.eye(rows)).abs().max() < 1e-6
    block = columns & -columns
    assert set(np.unique(np.abs(weight.numpy()))) <= {
        0.0,
        np.float64(np.float32(1) / np.sqrt(np.float32(block))),
    }


def test_hadamard_is_rebuilt_bit_for_bit_anywhere():
    digests = [
        hashlib.sha256(
            hadamard(shape, 1, stream(7, "blocks.0.attention.q.weight")).tobytes()
        ).hexdigest()[:16]
        for shape in ((64, 64), (64, 128), (96, 96))
    ]
    assert digests == HADAMARD_DIGESTS


def test_frames_are_haar_distributed():
    # Without the sign fix the diagonal of a QR's Q leans to one side; with it, entries have mean 0.
    corner = [float(make("global", (4, 4), heads=1, seed=s, name="q")[0, 0]) for s in range(2000)]
    assert abs(np.mean(corner)) < 0.04
    assert np.var(corner) == pytest.approx(1 / 4, abs=0.02)


def test_scales():
    shape = (512, 512)
    assert make("normal", shape, heads=8, seed=0, name="q").std().item() == pytest.approx(
        0.02, rel=0.01
    )
    assert make("matched", shape, heads=8, seed=0, name="q").std().item() == pytest.approx(
        512**-0.5, rel=0.01
    )
    assert make("headwise", shape, heads=8, seed=0, name="q").std().item() == pytest.approx(
        512**-0.5, rel=0.01
    )
    assert make("xavier", (512, 128), heads=1, seed=0, name="q").std().item() == pytest.approx(
        (2 / 640) ** 0.5, rel=0.01
    )
    once, twice = (make("headwise", shape, heads=8, seed=0, name="q", scale=s) for s in (1.0, 2.0))
    assert torch.equal(2 * once, twice)


def test_each_tensor_has_a_stream_of_its_own():
    a, b, c = (
        make("normal", (8, 8), heads=1, seed=s, name=n) for s, n in ((0, "q"), (0, "k"), (1, "q"))
    )
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(a, make("normal", (8, 8), heads=1, seed=0, name="q"))
    # The matched arm is the random arm at another scale: the same draw, so that the two are paired.
    matched = make("matched", (8, 8), heads=1, seed=0, name="q")
    assert torch.allclose(matched * (0.02 * 8**0.5), a)


def test_identities_are_permutation_matrices():
    for init in ("identity", "identity_shift", "identity_shuffle"):
        weight = make(init, (12, 12), heads=3, seed=0, name="k")
        assert torch.equal(weight.sum(0), torch.ones(12))
        assert torch.equal(weight.sum(1), torch.ones(12))
    shifted = make("identity_shift", (12, 12), heads=3, seed=0, name="k")
    x = torch.arange(12.0)
    assert (shifted @ x).tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3]


@pytest.mark.parametrize("init", INITS)
def test_grouped_query_shapes_work(init):
    assert make(init, (32, 64), heads=2, seed=0, name="k").shape == (32, 64)


def test_orthogonality_error_tells_frames_from_noise():
    assert max(orthogonality_error(make("headwise", (64, 64), heads=4, seed=0, name="q"), 4)) < 1e-6
    assert min(orthogonality_error(make("matched", (64, 64), heads=4, seed=0, name="q"), 4)) > 0.1
    assert max(orthogonality_error(3 * torch.eye(8), 1)) == 0
