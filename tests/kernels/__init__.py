import os
import shutil
import sys

import pytest

# By what the machine has, not by whether the build works: a source that does not compile must fail.
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux"
    or shutil.which(os.environ.get("CC", "cc")) is None
    or os.environ.get("OELM_KERNELS", "").lower() == "torch",
    reason="the kernels need a C compiler on Linux, and leave to be used",
)
