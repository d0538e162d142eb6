"""The kernels as they are compiled for other processors that this one can stand for."""

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
@pytest.mark.parametrize(
    "option",
    ["-mno-avx512f", f"-UL2_IS_LARGE -DL2_IS_LARGE={int(not library.l2_is_large())}"],
    ids=["vectors of eight numbers", "another L2"],
)
def test_the_kernels_pass_their_tests_as_compiled_for_others_too(tmp_path, option):
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec cc "$@" {option}\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", str(Path(__file__).parent)],
        env=os.environ | {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
