import pytest
import torch

from oelm.train import timing


@pytest.mark.parametrize(
    ("seconds", "products", "peak"), [(0.5, 9, 2 * 2048**3 / 0.5), (2.0, 1, 2 * 1024**3 / 2.0)]
)
def test_a_precision_that_the_processor_only_imitates_is_tried_once(
    monkeypatch, seconds, products, peak
):
    done = []
    monkeypatch.setattr(timing, "timed", lambda work, device: done.append(work) or seconds)
    assert timing.matmul_peak(torch.device("cpu"), "bf16") == peak
    assert len(done) == products
