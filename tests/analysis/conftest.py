import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic import write_study


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory):
    """A whole study: six arms, five seeds, five claims. Read only."""
    return write_study(tmp_path_factory.mktemp("runs"))
