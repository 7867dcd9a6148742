"""Intervals of means over few runs."""

import math
import statistics
from collections.abc import Sequence

from scipy import stats


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float | None]:
    """Of the two-sided 95 % interval of Student's t; None for a single value."""
    mean, num = statistics.mean(values), len(values)
    if num < 2:
        return mean, None
    return mean, float(stats.t.ppf(0.975, num - 1)) * statistics.stdev(values) / math.sqrt(num)
