"""Paired statistics against scipy, and against numbers worked out by hand."""

import numpy as np
import pytest
import scipy.stats

from vla_rlaif.metrics import wilson
from vla_rlaif.paired import bootstrap, compare, interval, sign_test


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (1, 0), (5, 5), (9, 2), (2, 9), (40, 13), (0, 400), (1200, 1100)]
)
def test_the_exact_test_is_the_binomial_one(first, second):
    expected = scipy.stats.binomtest(first, first + second, 0.5).pvalue if first + second else 1.0
    assert sign_test(first, second) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_by_hand():
    """A wins 3 starts alone and B none, of 8: p = 2 * (1/2)^3 = 0.25; the rates are 5/8 and 2/8."""
    a = np.array([[1, 1, 1, 1, 1, 0, 0, 0]], bool)
    b = np.array([[1, 1, 0, 0, 0, 0, 0, 0]], bool)
    found = compare(a, b)
    assert (found.better, found.worse, found.p_value, found.difference) == (3, 0, 0.25, 0.375)
    back = compare(b, a)
    assert (back.better, back.worse, back.p_value, back.difference) == (0, 3, 0.25, -0.375)
    assert found.low < 0.375 < found.high


def test_repetitions_of_a_start_count_once():
    """Two seeds of A, one of B: start 0 is won 2 of 2 against 0, start 1 is a draw of 1/2 against 1, ..."""
    a = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], bool)
    b = np.array([[0, 1, 0, 0]], bool)
    found = compare(a, b)
    assert (found.better, found.worse) == (1, 1)
    assert found.difference == pytest.approx((1 - 0.5) / 4)
    assert found.p_value == 1.0
    same = np.repeat(a[:1], 5, axis=0)
    assert compare(same, b).p_value == compare(a[:1], b).p_value
    assert interval(same) == interval(a[:1])


@pytest.mark.parametrize("num", [12, 60, 400])
@pytest.mark.parametrize("shares", [(0.3, 0.1), (0.02, 0.2), (0.5, 0.45)])
def test_the_bootstrap_is_scipys(num, shares):
    """The same method with other draws: the ends agree within the noise of 10,000 resamples."""
    up, down = shares
    rng = np.random.default_rng(num)
    values = rng.choice([1.0, -1.0, 0.0, 0.5], num, p=[up * 0.8, down, 1 - up - down, up * 0.2])
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1), batch=500
    ).confidence_interval
    scale = values.std() / np.sqrt(num)
    np.testing.assert_allclose(bootstrap(values, bounds=(-1.0, 1.0)), theirs, atol=0.12 * scale + 1.01 / num / 2)


def test_the_bootstrap_covers_the_truth():
    """Of 200 samples of 80 starts, about 95 % of the intervals hold the true difference 0.1: 91 to 99 %, by chance."""
    rng = np.random.default_rng(5)
    draws = rng.choice([1.0, -1.0, 0.0], (200, 80), p=[0.25, 0.15, 0.6])
    ends = np.array([bootstrap(row, bounds=(-1.0, 1.0)) for row in draws])
    assert 0.91 <= np.mean((ends[:, 0] <= 0.1) & (ends[:, 1] >= 0.1)) <= 0.99


def test_without_spread_the_interval_is_an_exact_bound():
    """None of 30 starts tells the two apart. A share p of all starts that do would be missed with (1 - p)^30, which is
    0.025 at Clopper and Pearson's upper end for 0 of 30."""
    p = scipy.stats.binomtest(0, 30).proportion_ci(0.95, method="exact").high
    same = np.ones((1, 30), bool)
    found = compare(same, same)
    assert (found.low, found.high) == (pytest.approx(-p), pytest.approx(p)) and found.p_value == 1
    apart = compare(same, ~same)  # a share p could be lost in place of won: 1 - 2 p
    assert (apart.low, apart.high) == (pytest.approx(1 - 2 * p), 1)
    assert interval(np.ones((2, 30), bool)) == (pytest.approx(1 - p), 1)


@pytest.mark.parametrize(("won", "num"), [(0, 8), (3, 8), (8, 8), (237, 400)])
def test_one_policys_interval_is_scipys_wilson(won, num):
    theirs = scipy.stats.binomtest(won, num).proportion_ci(0.95, method="wilson")
    assert wilson(won, num) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
