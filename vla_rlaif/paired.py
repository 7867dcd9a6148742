"""Two policies on the same start states: how much better one is, with an interval, and whether that may be chance.

Axes: N start states, R repetitions of all of them by one side (policies x evaluation seeds; the sides may differ in R).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float

RESAMPLES = 10_000
BLOCK = 64  # resamples that are drawn at a time: bounds the memory


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A against B."""

    difference: float  # of the success rates, A - B
    low: float  # of its 95 % interval
    high: float
    better: int  # start states on which A succeeds more often than B; with R = 1: A wins, B fails
    worse: int
    p_value: float  # exact, two-sided


def compare(a: Bool[np.ndarray, "R N"], b: Bool[np.ndarray, "Q N"]) -> Comparison:
    """With R = Q = 1 the p-value is McNemar's exact one (1947); with more it is the sign test of the same start states:
    repetitions of a start are averaged first, for they are not independent."""
    each = a.mean(axis=0) - b.mean(axis=0)
    better, worse = int((each > 0).sum()), int((each < 0).sum())
    low, high = bootstrap(each, bounds=(-1.0, 1.0))
    return Comparison(
        difference=float(each.mean()),
        low=low,
        high=high,
        better=better,
        worse=worse,
        p_value=sign_test(better, worse),
    )


def sign_test(first: int, second: int) -> float:
    """Two-sided exact p-value of ``first`` against ``second`` under a fair coin; 1 without any throw."""
    total = first + second
    tail = sum(math.comb(total, k) for k in range(min(first, second) + 1))  # integers: nothing under- or overflows
    return min(1.0, 2 * tail / 2**total)


def bootstrap(values: Float[np.ndarray, " N"], *, bounds: tuple[float, float], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over start states: bias-corrected and accelerated bootstrap (Efron 1987).

    Equal values have no spread to resample. Then at most a share of 1 - 0.025^(1/N) of all start states has another
    value (an exact bound), and the interval is what that share could do, within the ``bounds`` of a value.
    """
    mean, size = float(values.mean()), len(values)
    spread = values - mean
    if not np.any(np.abs(spread) > 1e-12):
        share = 1 - 0.025 ** (1 / size)
        return mean - share * (mean - bounds[0]), mean + share * (bounds[1] - mean)
    rng = np.random.default_rng(seed)
    blocks = [values[rng.integers(0, size, (BLOCK, size))].mean(axis=1) for _ in range(-(-RESAMPLES // BLOCK))]
    means = np.concatenate(blocks)
    normal = NormalDist()
    close = 1e-12  # a resampled mean that is the mean, but for rounding
    below = (np.mean(means < mean - close) + np.mean(means <= mean + close)) / 2
    bias = normal.inv_cdf(min(max(float(below), 0.5 / len(means)), 1 - 0.5 / len(means)))
    # The jackknife's means are mean - spread / (size - 1), so that their skewness is that of the values.
    acceleration = float((spread**3).sum() / (6 * (spread**2).sum() ** 1.5))
    ends = []
    for share in (0.025, 0.975):
        z = bias + normal.inv_cdf(share)
        ends.append(normal.cdf(bias + z / (1 - acceleration * z)))
    low, high = np.quantile(means, ends)
    return float(low), float(high)


def interval(outcomes: Bool[np.ndarray, "R N"]) -> tuple[float, float]:
    """95 % interval of a success rate over R > 1 repetitions of N start states: start states are resampled, since
    repetitions of one are not independent. (Of one repetition Wilson's is the interval.)"""
    return bootstrap(outcomes.mean(axis=0), bounds=(0.0, 1.0))
