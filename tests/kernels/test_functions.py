"""The kernels against torch's own operations in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from oelm.kernels import functions, library
from tests.kernels import needs_compiler

pytestmark = needs_compiler
any_seed = st.integers(0, 10**6)


def normal(*shape, seed, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def heads(B, H, T, E, seed, scale=1.0):
    """[B, H, T, E] as attention has it: a view of [B, T, H · E]."""
    return normal(B, T, H, E, seed=seed, scale=scale).transpose(1, 2).requires_grad_()


def exact_attention(q, k, v, *, causal):
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)


@pytest.fixture(autouse=True, scope="module")
def products_of_our_own():
    """On any processor, and not torch's BLAS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "products_pay", lambda: True)
        functions.kernels().multiply_by(None)
        yield
        functions.kernels().multiply_by(library.blas())


# Around what the kernel takes at a time: tiles of 6 × 16 or 8 × 32, with few columns of 12 × 8 or 16 × 16,
# strips of 96 rows and 512 columns, 256 or 512 deep; and what it copies, instead of reading it where it lies.
any_length = st.one_of(
    st.integers(1, 40), st.integers(90, 100), st.sampled_from([255, 300, 511, 530, 1030])
)


def laid_out(x, by_columns):
    return x.T.contiguous().T if by_columns else x


@settings(deadline=None, max_examples=100)
@example(  # large enough for BLAS
    M=530, N=300, K=511, columns_of_a=True, columns_of_b=True, start="other", gap=3, by_blas=True, seed=0
)  # fmt: skip
@given(
    M=any_length, N=st.just(8) | any_length, K=any_length,
    columns_of_a=st.booleans(), columns_of_b=st.booleans(),
    start=st.sampled_from([None, "bias", "out", "other"]), gap=st.integers(0, 9),
    by_blas=st.booleans(), seed=any_seed,
)  # fmt: skip
def test_a_product_is_torchs_wherever_its_numbers_lie(
    M, N, K, columns_of_a, columns_of_b, start, gap, by_blas, seed
):
    a = laid_out(normal(M, K, seed=seed), columns_of_a)
    b = laid_out(normal(K, N, seed=seed + 1), columns_of_b)
    room = normal(M, N + gap, seed=seed + 3)
    out, beyond = room[:, :N], room[:, N:].clone()
    added = {
        None: None,
        "bias": normal(N, seed=seed + 2),
        "out": out,
        "other": normal(M, N + 1, seed=seed + 2)[:, 1:],
    }[start]
    expected = a.double() @ b.double() + (0 if added is None else added.double())
    functions.kernels().multiply_by(library.blas() if by_blas else None)
    found = functions.product(a, b, added, out=out)
    functions.kernels().multiply_by(None)
    assert found.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6 * K)
    assert torch.equal(room[:, N:], beyond)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(7,), (3, 5), (2, 3, 17), (1, 300)]), inputs=any_length, outputs=any_length,
    bias=st.booleans(), frozen=st.sampled_from([None, 0, 1]), seed=any_seed,
)  # fmt: skip
def test_linear_and_its_gradients_are_torchs(shape, inputs, outputs, bias, frozen, seed):
    given = [normal(*shape, inputs, seed=seed), normal(outputs, inputs, seed=seed + 1)]
    given += [normal(outputs, seed=seed + 2)] if bias else []
    for i, x in enumerate(given):
        x.requires_grad_(i != frozen)
    wanted = [x for x in given if x.requires_grad]
    y, expected = functions.linear(*given), F.linear(*(x.double() for x in given))
    assert "_Linear" in type(y.grad_fn).__name__
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-6 * inputs)
    grad = normal(*shape, outputs, seed=seed + 3)
    ours = torch.autograd.grad(y, wanted, grad)
    theirs = torch.autograd.grad(expected, wanted, grad.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=1e-4, atol=1e-3)


@settings(deadline=None, max_examples=40)
@given(
    shape=st.sampled_from([(7,), (3, 5), (1, 130)]), inputs=st.integers(1, 60), outputs=st.integers(1, 60),
    rank=st.integers(1, 20), seed=any_seed,
)  # fmt: skip
def test_a_low_rank_update_and_its_gradients_are_torchs(shape, inputs, outputs, rank, seed):
    sizes = [(*shape, inputs), (rank, inputs), (outputs, rank), (*shape, outputs)]
    given = [normal(*size, seed=seed + i).requires_grad_() for i, size in enumerate(sizes)]
    y = functions.low_rank(*given)
    assert "_LowRank" in type(y.grad_fn).__name__
    x, a, b, base = (t.double() for t in given)
    expected = base + x @ a.T @ b.T
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    grad = normal(*shape, outputs, seed=seed + 4)
    ours = torch.autograd.grad(y, given, grad)
    theirs = torch.autograd.grad(expected, given, grad.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=1e-4, atol=1e-3)


def test_a_row_of_a_product_depends_neither_on_the_threads_nor_on_the_rows_beside_it():
    x, w, before = normal(200, 300, seed=0), normal(530, 300, seed=1), torch.get_num_threads()
    alone = torch.cat([functions.linear(x[i : i + 1], w) for i in range(200)])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(functions.linear(x, w), alone)
    finally:
        torch.set_num_threads(before)


@settings(deadline=None, max_examples=60)
@given(
    B=st.integers(1, 4), T=st.integers(1, 40), D=st.integers(1, 70), V=st.integers(1, 60),
    start=st.integers(0, 3), more=st.integers(0, 3), placed=st.booleans(),
    frozen=st.sampled_from(["", "weight", "positions"]), threads=st.integers(1, 3), seed=any_seed,
)  # fmt: skip
def test_embeddings_and_their_gradients_are_torchs(
    B, T, D, V, start, more, placed, frozen, threads, seed
):
    weight, positions = normal(V, D, seed=seed), normal(start + T + more, D, seed=seed + 1)
    weight.requires_grad_(frozen != "weight")
    positions.requires_grad_(frozen != "positions")
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        y = functions.embed(ids, weight, positions if placed else None, start)
    finally:
        torch.set_num_threads(before)
    exact = F.embedding(ids, weight)
    if placed:
        exact = exact + positions[start : start + T]
    assert torch.equal(y, exact)
    trained = [x for x in (weight, positions) if x.requires_grad and (placed or x is weight)]
    if not trained:
        assert not y.requires_grad
        return
    dy = normal(B, T, D, seed=seed + 2)
    for own, theirs in zip(
        torch.autograd.grad(y, trained, dy), torch.autograd.grad(exact, trained, dy), strict=True
    ):
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("token", [-1, 5])
def test_a_token_without_a_row_is_refused(token):
    with pytest.raises(IndexError, match="a token is not one of the 5"):
        functions.embed(torch.tensor([[1, token]]), torch.ones(5, 4), None)


def test_a_product_whose_last_part_has_few_columns_does_not_depend_on_the_threads():
    # With two threads the second has eight or sixteen columns, which are computed in another way.
    before = torch.get_num_threads()
    try:
        for columns in (24, 48):
            a, b, found = normal(20, 700, seed=0), normal(700, columns, seed=1), []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(functions.product(a, b))
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)


def test_products_of_nothing_are_zero():
    x, w = torch.empty(0, 4, requires_grad=True), normal(5, 4, seed=0).requires_grad_()
    y = functions.linear(x, w)
    assert y.shape == (0, 5)
    assert torch.autograd.grad(y.sum(), w)[0].tolist() == [[0.0] * 4] * 5


def test_of_nothing_two_threads_make_nothing(two_threads):
    x = torch.empty(0, requires_grad=True)
    (dx,) = torch.autograd.grad(functions.gelu(x, by_tanh=False).sum(), x)
    q = torch.empty(0, 2, 8, 16, requires_grad=True)
    y = functions.attention(q, q, q, None, causal=True, dropout=0.0)
    (dq,) = torch.autograd.grad(y.sum(), q)
    assert (dx.shape, y.shape, dq.shape) == (x.shape, q.shape, q.shape)


def test_operations_are_counted():
    x, w = normal(3, 4, seed=0), normal(5, 4, seed=1)
    with FlopCounterMode(display=False) as counter:
        functions.linear(x, w)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5


@settings(deadline=None, max_examples=60)
@given(
    B=st.integers(1, 3), H=st.integers(1, 3), T=st.integers(1, 150), E=st.sampled_from([16, 32, 64]),
    causal=st.booleans(), scale=st.sampled_from([0.1, 1.0, 3.0]), seed=any_seed,
)  # fmt: skip
def test_attention_and_its_gradient_are_torchs(B, H, T, E, causal, scale, seed):
    q, k, v = (heads(B, H, T, E, seed + i, scale) for i in range(3))
    grad = normal(B, H, T, E, seed=seed + 3)
    y = functions.attention(q, k, v, None, causal=causal, dropout=0.0)
    assert "_Attention" in type(y.grad_fn).__name__
    expected = exact_attention(q, k, v, causal=causal)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=2e-5 * scale)
    ours = torch.autograd.grad(y, (q, k, v), grad)
    theirs = torch.autograd.grad(expected, (q, k, v), grad.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=1e-3, atol=1e-4 * scale * scale)


def test_attention_does_not_depend_on_the_number_of_threads_nor_on_the_layout():
    q, k, v = (heads(2, 3, 70, 32, seed) for seed in range(3))
    grad = normal(2, 3, 70, 32, seed=3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = functions.attention(q, k, v, None, causal=True, dropout=0.0)
            found.append([y, *torch.autograd.grad(y, (q, k, v), grad)])
    finally:
        torch.set_num_threads(before)
    columns = [x.detach().transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert columns[0].stride(-1) != 1
    laid_out_anew = functions.attention(*columns, None, causal=True, dropout=0.0)
    assert torch.equal(laid_out_anew, found[0][0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad):
    for which in range(3):
        tensors = [heads(1, 1, 20, 16, seed).detach() for seed in range(3)]
        tensors[which][0, 0, 7, 3] = bad
        y = functions.attention(*tensors, None, causal=True, dropout=0.0)
        assert not y[0, 0, 7:].isfinite().all()
    logits = normal(4, 50, seed=0)
    logits[2, 9] = bad
    loss = functions.cross_entropy_(logits, torch.arange(4), gradient=True)
    assert loss.isfinite().tolist() == [True, True, False, True]
    x = torch.tensor([1.0, bad])
    for by_tanh in (False, True):
        assert functions.gelu(x, by_tanh=by_tanh).isfinite().tolist() == [True, False]


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 10_000), scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]), by_tanh=st.booleans(),
    seed=any_seed,
)  # fmt: skip
def test_gelu_and_its_gradient_are_torchs(n, scale, by_tanh, seed):
    x = normal(n, seed=seed, scale=scale).requires_grad_()
    y = functions.gelu(x, by_tanh=by_tanh)
    expected = F.gelu(x.double(), approximate="tanh" if by_tanh else "none")
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    grad = normal(n, seed=seed + 1)
    (ours,) = torch.autograd.grad(y, x, grad)
    (theirs,) = torch.autograd.grad(expected, x, grad.double())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 20), classes=st.integers(1, 3000), gap=st.integers(0, 9), seed=any_seed)
def test_the_loss_of_rows_that_need_not_touch_is_torchs(rows, classes, gap, seed):
    logits = normal(rows, classes + gap, seed=seed, scale=10.0)[:, :classes]
    target = torch.arange(rows) * 7 % classes
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="none")
    expected.sum().backward()
    only_loss = functions.cross_entropy_(logits.clone(), target, gradient=False)
    loss = functions.cross_entropy_(logits, target.int(), gradient=True)  # of any width
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(only_loss, loss)


@pytest.mark.parametrize("target", [-1, 5])
def test_a_target_that_is_no_class_is_refused_and_nothing_is_touched(target):
    logits = normal(2, 5, seed=0)
    before = logits.clone()
    with pytest.raises(IndexError, match="not one of the 5 classes"):
        functions.cross_entropy_(logits, torch.tensor([0, target]), gradient=True)
    assert torch.equal(logits, before)


@settings(deadline=None, max_examples=40)
@given(
    B=st.integers(1, 9), inner=st.integers(1, 20).map(lambda n: 8 * n), outer=st.integers(1, 70),
    threads=st.integers(1, 3), seed=any_seed,
)  # fmt: skip
def test_a_product_with_few_rows_is_torchs(B, inner, outer, threads, seed):
    x, w, before = (
        normal(B, inner, seed=seed),
        normal(outer, inner, seed=seed + 1),
        torch.get_num_threads(),
    )
    alone = torch.cat([functions.few_rows(row[None], w) for row in x])
    try:
        torch.set_num_threads(threads)
        y = functions.few_rows(x, w)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, alone)
    torch.testing.assert_close(y.double(), x.double() @ w.T.double(), rtol=1e-5, atol=2e-6 * inner)


@pytest.mark.filterwarnings("ignore")  # tracing is of yesterday, and says so
def test_other_work_goes_to_torch():
    q = heads(1, 2, 12, 16, 0)
    others = {
        "precision": (q.double(), None, 0.0),
        "bias": (q, torch.zeros(12, 12), 0.0),
        "dropout": (q, None, 0.5),
        "channels": (heads(1, 2, 12, 24, 0), None, 0.0),
    }
    for x, bias, dropout in others.values():
        y = functions.attention(x, x, x, bias, causal=bias is None, dropout=dropout)
        assert "_Attention" not in type(y.grad_fn).__name__
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not functions.applies(q)
    traced = torch.jit.trace(
        lambda x: functions.attention(x, x, x, None, causal=True, dropout=0.0), q.detach()
    )
    other = heads(1, 2, 12, 16, 1).detach()
    expected = exact_attention(other, other, other, causal=True).float()
    torch.testing.assert_close(traced(other), expected)
    with FakeTensorMode() as mode:
        assert not functions.applies(mode.from_tensor(q))


def test_torchs_compiler_is_not_led_into_what_reads_files(monkeypatch):
    def never():
        raise AssertionError

    monkeypatch.setattr(functions, "products_pay", never)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not functions.ours_multiply(torch.ones(2, 2))
