import math

import pytest

from oelm.analysis.numbers import percent


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.098, "+9.8"),
        (-0.0583, "−5.8"),
        (0.0003, "+0.03"),
        (-0.00004, "−0.004"),
        (1e-9, "0.000"),
        (0.0, "0.0"),
    ],
)
def test_small_percentages_keep_a_digit_that_is_not_zero(share, text):
    assert percent(share) == text + "\u202f%"


def test_no_percentage():
    assert percent(None) == percent(math.nan) == "–"
