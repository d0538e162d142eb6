import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from synthetic import write_study

from oelm.analysis.document import document
from oelm.analysis.sources import read_study
from oelm.analysis.words import Words


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory):
    """A whole study: six arms, five seeds, five claims. Read only."""
    return write_study(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def doc(study_folder):
    return document([read_study(study_folder)], Words("en"))
