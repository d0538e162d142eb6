"""Building the kernels, once, and going on without them."""

import os
import subprocess
import sys

import pytest
import torch

from oelm.kernels import library
from tests.kernels import needs_compiler

ASK = "from oelm.kernels import library; print(library.in_use())"


def ask(cache, **environment):
    """Whose kernels a fresh process uses, and what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", f"import logging; logging.basicConfig(level='INFO'); {ASK}"],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)} | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


@needs_compiler
def test_the_library_is_built_once_and_others_find_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = library.build()
    first = built.stat().st_mtime_ns
    assert [p.name for p in built.parent.iterdir()] == [built.name]
    assert library.build() == built
    assert built.stat().st_mtime_ns == first
    assert ask(tmp_path)[0] == "own"
    assert [p.name for p in built.parent.iterdir()] == [built.name]
    monkeypatch.setattr(library, "processor", lambda: "another")
    assert library.build() != built


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"OELM_KERNELS": "torch"}, ""),
        ({"CC": "no-such-compiler"}, "no C compiler was found"),
        ({"CC": "false"}, "non-zero exit status"),
    ],
)
def test_without_a_compiler_or_by_wish_torch_computes(tmp_path, environment, reason):
    answer, log = ask(tmp_path, **environment)
    assert answer == "torch"
    assert reason in log
    assert "Traceback" not in log


@needs_compiler
def test_a_cache_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "oelm").write_text("not a folder")
    assert ask(tmp_path)[0] == "torch"


@pytest.mark.parametrize(
    ("about", "large", "taken"),
    [
        ("vendor_id: GenuineIntel\nflags: avx2", False, True),
        ("vendor_id: GenuineIntel\nflags: avx2", True, True),
        ("vendor_id: GenuineIntel\nflags: avx2 avx512f", False, True),
        ("vendor_id: GenuineIntel\nflags: avx2 avx512f", True, False),
        ("vendor_id: AuthenticAMD\nflags: avx2 avx512f", False, False),
    ],
)
def test_intels_blas_multiplies_where_ours_is_slower(monkeypatch, about, large, taken):
    monkeypatch.setattr(library, "processor", lambda: about)
    monkeypatch.setattr(library, "l2_is_large", lambda: large)
    taken = taken and torch.backends.mkl.is_available()
    assert (library.blas.__wrapped__() is not None) == taken
