"""The threshold of success and how it is judged: by hand, by simulation, and against SciPy."""

import math

import numpy as np
import pytest
import scipy.stats

from vla_rlaif.metrics import score_interval, wilson
from vla_rlaif.success_threshold import clustered_interval, cross_fit, negatives_needed, threshold_at


def test_threshold_by_hand():
    # 0.25 * 11 is 2.75: of ten negatives the second largest, which one of eleven may exceed at the rate 2 / 11.
    assert threshold_at(np.arange(10) / 10, 0.25) == pytest.approx(0.8)
    # The largest of ten is exceeded at the rate 1 / 11, which is more than 0.05; that of 19 at 1 / 20.
    assert math.isnan(threshold_at(np.arange(10) / 10, 0.05))
    assert math.isnan(threshold_at(np.arange(18) / 18, 0.05))
    assert threshold_at(np.arange(19) / 19, 0.05) == pytest.approx(18 / 19)
    assert math.isnan(threshold_at(np.empty(0), 0.5))
    # 0.29 * 100 is 28.999999999999996 in floating point.
    assert threshold_at(np.arange(99.0), 0.29) == 99 - 29


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.1, 0.2, 0.29, 0.5, 0.9])
def test_as_many_negatives_as_are_needed_and_no_fewer(rate):
    num = negatives_needed(rate)
    assert math.isfinite(threshold_at(np.arange(num, dtype=float), rate))
    assert num == 1 or math.isnan(threshold_at(np.arange(num - 1, dtype=float), rate))


def test_a_further_negative_exceeds_it_at_the_rate():
    """Of uniform numbers the k-th largest of K is Beta(K + 1 - k, k), and is exceeded at the mean rate k / (K + 1)."""
    rng = np.random.default_rng(0)
    found = [1 - threshold_at(rng.random(29), 0.1) for _ in range(4000)]  # k = 3
    beta = scipy.stats.beta(3, 27)
    assert np.mean(found) == pytest.approx(beta.mean(), abs=4 * beta.std() / 4000**0.5)
    assert beta.mean() == pytest.approx(0.1)
    assert scipy.stats.kstest(found, beta.cdf).pvalue > 0.001


# Sources 0 and 1 have two negatives, 2 and 3 one: 0 and 2 are dealt to the first half, 1 and 3 to the second.
NEGATIVE = np.array([0.6, 0.1, 0.5, 0.2, 0.7, 0.3])
SOURCE = np.array([0, 0, 1, 1, 2, 3])


def test_each_half_is_judged_by_the_other_by_hand():
    # At 0.25 three negatives give the largest: 0.7 of the first half, 0.5 of the second.
    found = cross_fit(NEGATIVE, SOURCE, 0.25)
    assert found.above is not None
    assert found.above.tolist() == [True, False, False, False, True, False]
    assert (found.sizes, found.needed) == ((3, 3), 3)
    few = cross_fit(NEGATIVE, SOURCE, 0.2)
    assert few.above is None and (few.sizes, few.needed) == ((3, 3), 4)
    assert cross_fit(np.empty(0), np.empty(0, int), 0.2).above is None
    # All of one start state are one half.
    assert cross_fit(NEGATIVE, np.zeros(6, int), 0.25).sizes == (6, 0)


def test_a_source_is_never_split():
    rng = np.random.default_rng(0)
    source = rng.integers(0, 30, 200)
    value = source + 0.0  # all of a source alike: whether it is above says which half it is in
    above = cross_fit(value, source, 0.2).above
    assert above is not None and above.any()
    assert all(len(set(above[source == s])) == 1 for s in range(30))


def test_cross_fitting_measures_the_rate_that_it_promises():
    """2,000 draws of 2 * 19 independent negatives: the mean of what is measured is the promise, 1 / 20."""
    rng = np.random.default_rng(0)
    rates = [cross_fit(rng.normal(size=38), np.arange(38), 0.05).above for _ in range(2000)]
    found = [float(above.mean()) for above in rates if above is not None]
    assert len(found) == 2000
    assert np.mean(found) == pytest.approx(0.05, abs=4 * np.std(found) / 2000**0.5)


def test_the_interval_is_wilsons_where_sources_are_independent():
    for hits, num in ((0, 7), (3, 40), (40, 40)):
        result = scipy.stats.binomtest(hits, num).proportion_ci(method="wilson")
        assert wilson(hits, num) == pytest.approx((result.low, result.high))
        assert score_interval(hits / num, num) == pytest.approx((result.low, result.high))
    # An end is where the rate is 1.96 standard deviations away, for a number of trials that is not whole, too.
    for end in score_interval(0.3, 5.4):
        assert abs(end - 0.3) == pytest.approx(scipy.stats.norm.ppf(0.975) * (end * (1 - end) / 5.4) ** 0.5)
    rng = np.random.default_rng(0)
    hits = rng.random(4000) < 0.1
    assert clustered_interval(hits, np.arange(4000)) == pytest.approx(wilson(int(hits.sum()), 4000), rel=1e-3)


def test_the_interval_counts_what_is_alike_once():
    # By hand, hits 1 0 | 0 0 | 1 | 0: their share is 1/3, residuals of sources are 1/3 -2/3 2/3 -1/3, squared in all
    # 10/9. Variance 4/3 * 10/9 / 36 over (2/9) / 6 is 10/9, so the six count as 5.4.
    hits = np.array([True, False, False, False, True, False])
    assert clustered_interval(hits, SOURCE) == pytest.approx(score_interval(1 / 3, 5.4))
    # Ten copies of each are worth no more than one.
    rng = np.random.default_rng(1)
    each = rng.random(300) < 0.2
    copies = clustered_interval(np.repeat(each, 10), np.repeat(np.arange(300), 10))
    assert copies == pytest.approx(clustered_interval(each, np.arange(300)), rel=0.01)
    # Where nothing varies, sources are counted.
    assert clustered_interval(np.zeros(12, bool), np.repeat(np.arange(3), 4)) == pytest.approx(wilson(0, 3))


def test_coverage_of_clusters_by_simulation():
    """50 sources of four alike negatives: the interval holds the rate in 95 % of 1,000 draws, Wilson's in too few."""
    rng = np.random.default_rng(0)
    source, rate = np.repeat(np.arange(50), 4), 0.2
    held, naive = 0, 0
    for _ in range(1000):
        hits = np.repeat(rng.random(50) < rate, 4)
        low, high = clustered_interval(hits, source)
        held += low <= rate <= high
        low, high = wilson(int(hits.sum()), 200)
        naive += low <= rate <= high
    assert 930 <= held <= 975 and naive < 750
