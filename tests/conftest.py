"""What several rooms' tests share: a dataset that is made in no time, and a second thread."""

import os
import random

import pytest

# Set before anything imports torch: tests run side by side, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def two_threads():
    """For a test that is not to run on one alone."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory):
    """The path of a dataset of 60 short texts, as bytes."""
    from oelm.data.corpora import Corpus
    from oelm.data.prepare import prepare

    class Sentences(Corpus):
        name = "sentences"

        def documents(self, split):
            draw = random.Random(0)
            words = ["the", "of", "and", "to", "a", "in", "that", "we", "have", "seen", "years"]
            for _ in range(60):
                yield " ".join(draw.choice(words) for _ in range(100)) + "."

        def origin(self):
            return {"name": self.name}

    out = tmp_path_factory.mktemp("data") / "sentences"
    prepare(Sentences(), "bytes", out=out, val=0.1, test=0.1, workers=1)
    return out
