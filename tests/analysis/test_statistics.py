import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from oelm.analysis.statistics import (
    MOST_SEEDS,
    Estimate,
    compare,
    estimate,
    holm,
    intervals_by_column,
    seeds_needed,
)

A = {0: 4.9, 1: 5.2, 2: 5.05, 3: 5.4, 4: 5.1}
B = {0: 4.6, 1: 4.8, 2: 4.85, 3: 4.9, 4: 4.7}


def logs(values):
    return np.log(list(values.values()))


def test_paired_comparison_equals_scipy():
    result = compare(A, B, log=True)
    reference = stats.ttest_rel(logs(A), logs(B))
    interval = reference.confidence_interval(0.95)
    assert result.p_differs() == pytest.approx(reference.pvalue)
    assert result.interval() == pytest.approx((interval.low, interval.high))
    one_sided = stats.ttest_1samp(logs(A) - logs(B), math.log(1.05), alternative="less")
    assert result.p_below(math.log(1.05)) == pytest.approx(one_sided.pvalue)


def test_tost_equals_statsmodels():
    low, high = math.log(0.9), math.log(1.1)
    expected = ttost_paired(logs(A), logs(B), low, high)[0]
    assert compare(A, B, log=True).p_within(low, high) == pytest.approx(expected)


def test_arms_without_a_common_seed_fall_back_to_welch():
    other = {seed + 10: value for seed, value in B.items()}
    result = compare(A, other, log=False)
    reference = stats.ttest_ind(list(A.values()), list(B.values()), equal_var=False)
    assert not result.paired
    assert result.p_differs() == pytest.approx(reference.pvalue)
    interval = reference.confidence_interval(0.95)
    assert result.interval() == pytest.approx((interval.low, interval.high))


def test_only_common_seeds_are_compared():
    assert compare({0: 2.0, 1: 4.0, 7: 100.0}, {0: 1.0, 1: 2.0, 8: 5.0}, log=True) == Estimate(
        math.log(2), 0.0, 1, 2
    )


def test_one_seed_gives_a_point_and_no_interval():
    one = compare({0: 4.685668571}, {0: 4.269209111}, log=True)
    assert math.expm1(one.mean) == pytest.approx(0.0975, abs=1e-4)
    assert one.interval() is None
    assert math.isnan(one.p_below(1.0))
    assert math.isnan(one.p_outside(-1.0, 1.0))
    assert not estimate([]).decidable


def test_values_that_never_vary_are_compared_exactly():
    same = estimate([3.0, 3.0, 3.0])
    assert (same.p_below(4), same.p_below(3), same.p_above(2)) == (0.0, 1.0, 0.0)
    assert (same.p_outside(4, 5), same.p_outside(2, 4)) == (0.0, 1.0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_equals_statsmodels(p_values):
    expected = multipletests(p_values, method="holm")[1]
    assert holm(p_values) == pytest.approx(list(expected))


def test_holm_leaves_out_what_was_not_tested():
    assert holm([0.01, math.nan, 0.04])[::2] == pytest.approx([0.02, 0.04])
    assert math.isnan(holm([0.01, math.nan, 0.04])[1])


def test_seeds_needed_reaches_its_power_and_not_one_seed_less():
    sd, distance, rng = 0.02, 0.03, np.random.default_rng(0)
    n = seeds_needed(sd, distance)

    def decided(n):
        x = rng.normal(-distance, sd, (20_000, n))
        t = x.mean(1) / (x.std(1, ddof=1) / math.sqrt(n))
        return np.mean(t < stats.t.ppf(0.05, n - 1))

    assert decided(n) >= 0.895
    assert decided(n - 1) < 0.9
    assert seeds_needed(0.0, 0.01) == 2
    assert seeds_needed(0.02, 0.0) == MOST_SEEDS + 1


def test_intervals_by_column_equal_those_of_each_column():
    values = np.random.default_rng(0).normal(size=(4, 5))
    values[0, 2] = np.nan
    values[1:, 3] = np.nan
    values[:, 4] = np.nan
    mean, low, high = intervals_by_column(values)
    for column in (0, 2):
        seen = estimate(values[~np.isnan(values[:, column]), column])
        assert mean[column] == pytest.approx(seen.mean)
        assert (low[column], high[column]) == pytest.approx(seen.interval())
    assert mean[3] == values[0, 3]
    assert np.isnan([low[3], high[3], mean[4]]).all()
