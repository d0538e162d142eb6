import math

import pytest

from oelm.analysis.numbers import axis_unit, percent


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


@pytest.mark.parametrize(
    ("unit", "most", "said"),
    [
        ("s", 0.05, (1e-3, "ms")),
        ("s", 300, (1, "s")),
        ("s", 3000, (60, "min")),
        ("s", 9000, (3600, "h")),
        ("bytes", 2**30, (2**20, "MiB")),
        ("bytes", 2**34, (2**30, "GiB")),
        ("tokens/s", 5000, (1, "")),
    ],
)
def test_an_axis_counts_in_a_unit_of_its_size(unit, most, said):
    assert axis_unit(unit, most) == said
