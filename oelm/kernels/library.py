"""The C files, compiled for this very processor on first use and kept in the user's cache.

A C compiler that torch's OpenMP runtime understands (gcc on Linux) is all it takes: two seconds, once.
Where there is none, or with OELM_KERNELS=torch in the environment, everything is computed by torch.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import platformdirs
import torch

log = logging.getLogger(__name__)

SWITCH = "OELM_KERNELS"
UNITS = ("cpu", "embedding", "head", "block", "token", "update")
HEADERS = ("cpu.h", "vectors.h", "tiles.h")
# Sums are computed as they are written, and NaN and infinity, by which a diverging run is noticed, are kept.
FLAGS = (
    "-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros",
)  # fmt: skip


_pointer, _long, _int = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_float, _double = ctypes.c_float, ctypes.c_double
_SIGNATURES = {
    "attention": [_pointer] * 5 + [_long] * 4 + [_pointer, _long, _float, _int, _int],
    "attention_backward": [_pointer] * 9 + [_long] * 4 + [_pointer, _long, _float, _int, _int],
    "embed": [_pointer] * 4 + [_long] * 4 + [_int],
    "embed_backward": [_pointer] * 4 + [_long] * 4 + [_int],
    "gelu": [_pointer] * 3 + [_long, _int, _int],
    "gelu_backward": [_pointer] * 4 + [_long, _int, _int],
    "cross_entropy": [_pointer, _long, _pointer, _pointer, _long, _long, _int, _int],
    "head_loss": [_pointer] * 3 + [_long] + [_pointer] * 3 + [_long] * 3 + [_int],
    "product": [_pointer] * 5 + [_long, _pointer] + [_long] * 4 + [_int],
    "multiply_by": [_pointer],
    "linear": [_pointer] * 4 + [_long] * 3 + [_int],
    "linear_backward": [_pointer] * 4 + [_int] + [_pointer] * 2 + [_int] + [_long] * 3 + [_int],
    "few_rows": [_pointer] * 3 + [_long] * 3 + [_int],
    "blocks_forward": [_pointer, _long, _long],
    "blocks_backward": [_pointer, _long, _long, _pointer, _long],
    "next_logits": [_pointer],
    "sum_of_squares": [_pointer, _pointer, _long, _int],
    "adamw": [_pointer] * 6 + [_long] + [_double] * 6 + [_int],
}  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where torch must do."""
    if os.environ.get(SWITCH, "").lower() == "torch":
        return None
    try:
        kernels = ctypes.CDLL(str(build()))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.info("CPU kernels are not in use: %s", detail.strip().splitlines()[-1])
        return None
    for name, arguments in _SIGNATURES.items():
        getattr(kernels, name).argtypes = arguments
    kernels.sum_of_squares.restype = _double
    kernels.multiply_by(blas())
    return kernels


@functools.cache
def blas() -> ctypes.c_void_p | None:
    """The address of the product in Intel's BLAS, a part of torch, where it is the quickest.

    That is on Intel's processors, but for those with AVX-512 and a large L2, where ours is no slower.
    """
    ours = "avx512f" in processor() and l2_is_large()
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if "GenuineIntel" not in processor() or ours or not has_mkl:
        return None
    try:
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torchs.sgemm_, ctypes.c_void_p)
    except (OSError, AttributeError):  # a torch that was built in another way
        return None


@functools.cache
def products_pay() -> bool:
    """Whether products are the kernels' to compute, so that blocks need one call instead of twenty.

    On AMD's processors ours beat torch's, since MKL is slower there than it could be. With AVX-512 they
    are nearly as fast, and where they are not, the kernels call MKL as torch does.
    """
    ours = any(x in processor() for x in ("AuthenticAMD", "avx512f"))
    return library() is not None and (ours or blas() is not None)


def in_use() -> str:
    """Whose kernels compute on a CPU: `own` or `torch`."""
    return "torch" if library() is None else "own"


def build() -> Path:
    """Compile unless that was done before, for this source, compiler and processor."""
    files = resources.files("oelm.kernels")
    sources = {
        name: files.joinpath(name).read_bytes()
        for name in (*HEADERS, *(f"{unit}.c" for unit in UNITS))
    }
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FileNotFoundError("no C compiler was found; install gcc to have them")
    flags = [*FLAGS, f"-DL2_IS_LARGE={int(l2_is_large())}"]
    if "avx512f" in processor():
        # Unless they are told, compilers take vectors half as wide in loops.
        flags.append("-mprefer-vector-width=512")
    about = repr((sources, compiler, flags, processor()))
    folder = Path(platformdirs.user_cache_dir("oelm")) / "kernels"
    target = folder / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            for name, source in sources.items():
                (Path(place) / name).write_bytes(source)
            run = functools.partial(
                subprocess.run, cwd=place, check=True, capture_output=True, text=True
            )
            run([compiler, *flags, "-c", *(f"{unit}.c" for unit in UNITS)])
            # Linked without -fopenmp: a second OpenMP runtime beside torch's would fight it for cores.
            objects = [f"{unit}.o" for unit in UNITS]
            run([compiler, "-shared", *objects, "-lm", "-o", "cpu.so"])
            os.replace(Path(place) / "cpu.so", target)  # at once, should others build it too
    return target


def l2_is_large() -> bool:
    """Whether a core's second cache has 2 MiB, by which products choose what they copy at a time."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text()
        return int(size.strip().rstrip("K")) >= 2048
    except (OSError, ValueError):
        return False


def processor() -> str:
    """What -march=native depends on: a cache may be shared by the unlike nodes of a cluster."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    first = cpuinfo.read_text().split("\n\n")[0].splitlines()
    about = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first if line.startswith(about))
