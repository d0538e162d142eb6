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


def test_the_peak_is_that_of_the_quicker_products(monkeypatch):
    # The first shape by torch and by us, and the others.
    seconds = iter([0.4] * 3 + [0.2] * 3 + [0.4] * 12)
    monkeypatch.setattr(timing, "timed", lambda work, device: next(seconds))
    monkeypatch.setattr(timing, "ours_multiply", lambda *tensors: True)
    monkeypatch.setattr(timing, "CPU_SHAPES", ((64, 64, 64), (32, 32, 32), (16, 16, 16)))
    rates = timing.matmul_rates(torch.device("cpu"), "fp32")
    assert rates == {"torch": 2 * 64**3 / 0.4, "own": 2 * 64**3 / 0.2}


def test_the_rate_of_reading_is_that_of_the_quickest_way(monkeypatch):
    seconds = iter([0.5] * 3 + [0.1, 0.2, 0.3] + [0.5] * 9)  # the second way's three
    monkeypatch.setattr(timing, "timed", lambda work, device: next(seconds))
    assert timing.reading_rate(torch.device("cpu"), 3) == pytest.approx(4 * 16384 * 4096 / 0.2)
