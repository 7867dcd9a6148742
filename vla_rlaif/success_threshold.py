"""Above which probability of success a clip counts as one, so that failures seldom do, and how seldom they really do.

A threshold judged on the clips that it was chosen on keeps its promise whatever the model is worth. So it is judged by
cross-fitting: the start states of held-out clips are dealt to two halves, and each half is judged by the threshold of
the other. A clip, the negatives that are made of it, and other clips from the same start state stay together.
Axes: K ends of held-out clips that failed (negatives).
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.metrics import score_interval

ROUNDING = 1e-9  # 0.29 * 100 is a little less than 29


@dataclass(frozen=True, kw_only=True)
class CrossFit:
    """``above`` is None where a half has too few negatives for a threshold of its own."""

    above: Bool[np.ndarray, " K"] | None  # each negative: is it above the threshold of the other half?
    sizes: tuple[int, int]  # negatives of each half
    needed: int  # in each half


def threshold_at(negative: Float[np.ndarray, " K"], false_positive_rate: float) -> float:
    """The lowest of the negatives' probabilities that a further negative exceeds at most at this rate, whatever their
    distribution; NaN if they are too few to say (``negatives_needed``).

    Of K + 1 exchangeable numbers the last is above the k-th largest of the others with a probability of at most
    k / (K + 1). (Split conformal prediction, https://arxiv.org/abs/1404.2083; K in its place is too optimistic.)
    """
    rank = math.floor(false_positive_rate * (len(negative) + 1) + ROUNDING)
    return float(np.sort(negative)[-rank]) if rank else math.nan


def negatives_needed(false_positive_rate: float) -> int:
    """Fewer do not give a threshold: even the largest of K is exceeded at the rate 1 / (K + 1)."""
    return max(1, math.ceil(1 / false_positive_rate - 1 - ROUNDING))


def cross_fit(negative: Float[np.ndarray, " K"], source: Int[np.ndarray, " K"], false_positive_rate: float) -> CrossFit:
    """``source``: equal numbers stay together."""
    is_second = _second_half(source)
    sizes = int((~is_second).sum()), int(is_second.sum())
    of_first = threshold_at(negative[~is_second], false_positive_rate)
    of_second = threshold_at(negative[is_second], false_positive_rate)
    above = None
    if not math.isnan(of_first + of_second):
        above = negative > np.where(is_second, of_first, of_second)
    return CrossFit(above=above, sizes=sizes, needed=negatives_needed(false_positive_rate))


def clustered_interval(hits: Bool[np.ndarray, " K"], source: Int[np.ndarray, " K"]) -> tuple[float, float]:
    """95 % score interval of the share of ``hits``, whose errors are alike within a source.

    K is divided by the design effect: the variance of the share by sources, over that of as many independent ones (Rao
    and Scott 1992, https://doi.org/10.2307/2532311), never below 1. Without any variance the sources are counted.
    """
    cluster = np.unique(source, return_inverse=True)[1]
    num, num_clusters = len(hits), int(cluster.max()) + 1
    share = float(hits.mean())
    if num_clusters == 1 or share in (0.0, 1.0):
        return score_interval(share, num_clusters)
    residual = np.bincount(cluster, hits - share)
    variance = num_clusters / (num_clusters - 1) * float(residual @ residual) / num**2
    effect = max(1.0, variance / (share * (1 - share) / num))
    return score_interval(share, num / effect)


def _second_half(source: Int[np.ndarray, " K"]) -> Bool[np.ndarray, " K"]:
    """Sources are dealt in turn, those with the most negatives first, so that the halves are about equal."""
    found, index, counts = np.unique(source, return_inverse=True, return_counts=True)
    turn = np.empty(len(found), np.int64)
    turn[np.argsort(-counts, kind="stable")] = np.arange(len(found)) % 2
    return turn[index] == 1
