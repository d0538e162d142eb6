"""The matrices a projection can start from, each drawn from a stream of its own.

Every function takes `(out_features, in_features)`, the number of heads that the rows are divided
among, and a stream; it returns float32 of that shape. "Exact" says whether another machine rebuilds
the same bits from the same seed: integer arithmetic always does; Gaussian draws do on every platform
we know, though NumPy does not promise it; a QR depends on the LAPACK at hand.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Matrix = NDArray[np.float32]
Stream = np.random.Generator


def stream(seed: int, name: str) -> Stream:
    """The random stream of the tensor `name`: changing how one tensor is made changes no other."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def normal(shape: tuple[int, int], heads: int, source: Stream, std: float = 0.02) -> Matrix:
    """Gaussian of standard deviation `std`. Rows of length std·√in. Exact in practice."""
    return source.standard_normal(shape, dtype=np.float32) * np.float32(std)


def xavier(shape: tuple[int, int], heads: int, source: Stream) -> Matrix:
    """Gaussian of standard deviation √(2 / (in + out)). Exact in practice."""
    return normal(shape, heads, source, std=float(np.sqrt(2 / sum(shape))))


def matched(shape: tuple[int, int], heads: int, source: Stream) -> Matrix:
    """Gaussian of standard deviation 1/√in: the scale of orthonormal rows without their angles."""
    return normal(shape, heads, source, std=float(1 / np.sqrt(shape[1])))


def headwise(shape: tuple[int, int], heads: int, source: Stream) -> Matrix:
    """One Haar-distributed frame per head: orthonormal rows within a head, none promised between.

    Costs `heads` QRs of in × out/heads in float64. Exact for one LAPACK.
    """
    out, inner = shape
    if out % heads:
        raise ValueError(f"{out} rows cannot be divided among {heads} heads")
    frames = [haar_frame((out // heads, inner), source) for _ in range(heads)]
    return np.concatenate(frames)


def global_orthogonal(shape: tuple[int, int], heads: int, source: Stream) -> Matrix:
    """One Haar-distributed frame for all heads: their subspaces are orthogonal to each other too.

    Costs one QR of in × out in float64. Exact for one LAPACK.
    """
    return haar_frame(shape, source)


def haar_frame(shape: tuple[int, int], source: Stream) -> Matrix:
    """Orthonormal rows (columns where there are more rows than columns), uniformly distributed.

    QR alone is not uniform: the signs of R's diagonal must be moved into Q (Mezzadri 2007).
    """
    gaussian = source.standard_normal(shape)
    tall = gaussian if shape[0] > shape[1] else gaussian.T
    # One thread: quick enough, and the bits do not depend on how many cores a machine has.
    with threadpool_limits(1, user_api="blas"):
        q, r = np.linalg.qr(tall)
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    frame = q if shape[0] > shape[1] else q.T
    return np.ascontiguousarray(frame, dtype=np.float32)


def hadamard(shape: tuple[int, int], heads: int, source: Stream) -> Matrix:
    """Hadamard rows with a random sign per input channel: orthonormal, every entry ±1/√block.

    The block is the largest power of two that divides `in`; where that is not all of it, the matrix
    is block-diagonal. Exact anywhere: integers, signs and one correctly rounded square root.
    """
    out, inner = shape
    block = inner & -inner
    if out > inner:
        raise ValueError(f"a Hadamard projection has at most as many rows as columns, not {shape}")
    rows = np.arange(out)
    entry = np.float32(1) / np.sqrt(np.float32(block))
    within = rows[:, None] % block & np.arange(block)[None, :]
    values = np.where(_odd_bits(within), -entry, entry)
    matrix = np.zeros(shape, dtype=np.float32)
    columns = (rows // block * block)[:, None] + np.arange(block)[None, :]
    np.put_along_axis(matrix, columns, values, axis=1)
    return matrix * signs(inner, source)


def signs(n: int, source: Stream) -> Matrix:
    """n random signs from raw bits, so that they are the same anywhere."""
    return np.where(_raw(n, source) >> np.uint64(63), np.float32(-1), np.float32(1))


def identity(shape: tuple[int, int], heads: int, source: Stream) -> Matrix:
    """Head h reads its own slice of the input. The model does no product for it. Exact."""
    return np.eye(*shape, dtype=np.float32)


def identity_shift(shape: tuple[int, int], heads: int, source: Stream) -> Matrix:
    """Head h reads the slice of head h + 1, so that K differs from an identity Q. Exact."""
    return np.roll(np.eye(*shape, dtype=np.float32), -(shape[0] // heads), axis=0)


def identity_shuffle(shape: tuple[int, int], heads: int, source: Stream) -> Matrix:
    """Every row reads one channel, in an order drawn once. No product. Exact."""
    return np.eye(shape[1], dtype=np.float32)[channel_order(shape, source)]


def channel_order(shape: tuple[int, int], source: Stream) -> NDArray[np.int64]:
    """The channels that `identity_shuffle` reads: a random permutation, by sorting raw integers."""
    return np.argsort(_raw(shape[1], source), kind="stable")[: shape[0]].astype(np.int64)


def _raw(n: int, source: Stream) -> NDArray[np.uint64]:
    return np.asarray(source.bit_generator.random_raw(n), dtype=np.uint64)


def _odd_bits(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    parity = values.astype(np.uint64)
    for shift in (32, 16, 8, 4, 2, 1):
        parity ^= parity >> np.uint64(shift)
    return (parity & np.uint64(1)).astype(bool)


INITS: dict[str, Callable[[tuple[int, int], int, Stream], Matrix]] = {
    "normal": normal,
    "xavier": xavier,
    "matched": matched,
    "headwise": headwise,
    "global": global_orthogonal,
    "hadamard": hadamard,
    "identity": identity,
    "identity_shift": identity_shift,
    "identity_shuffle": identity_shuffle,
}


def make(
    init: str,
    shape: tuple[int, int],
    *,
    heads: int,
    seed: int,
    name: str,
    scale: float = 1.0,
    std: float = 0.02,
) -> torch.Tensor:
    """The initial value of the tensor `name`; `std` is that of `normal` where the model says so."""
    source = stream(seed, name)
    if init == "normal":
        matrix = normal(shape, heads, source, std)
    else:
        matrix = INITS[init](shape, heads, source)
    return torch.from_numpy(matrix * np.float32(scale))


def orthogonality_error(weight: torch.Tensor, heads: int) -> list[float]:
    """Per head, the largest entry of |W Wᵀ − c·I|/c (of WᵀW where W is tall), c the mean square norm."""
    errors = []
    for block in weight.detach().double().cpu().chunk(heads):
        frame = block if block.shape[0] <= block.shape[1] else block.T
        gram = frame @ frame.T
        size = gram.diagonal().mean()
        error = (gram / size - torch.eye(len(gram), dtype=gram.dtype)).abs().max()
        errors.append(float(error) if size > 0 else float("inf"))
    return errors
