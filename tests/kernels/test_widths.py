"""The kernels with vectors of eight numbers, where the processor has such of sixteen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.kernels import library
from tests.kernels import needs_compiler


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif("avx512f" not in library.processor(), reason="needs AVX-512")
def test_the_kernels_pass_their_tests_without_avx512_too(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -mno-avx512f\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", str(Path(__file__).parent)],
        env=os.environ | {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
