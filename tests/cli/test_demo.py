import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_demo_decides_its_claims_and_repeats_nothing(tmp_path: Path) -> None:
    def demo() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "oelm", "demo"],
            cwd=tmp_path,
            env={**os.environ, "OELM_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = demo()
    assert (tmp_path / "runs/quickstart/report.html").exists()
    assert "report.html" in first
    assert "undecided" not in first
    assert "started" not in demo()
