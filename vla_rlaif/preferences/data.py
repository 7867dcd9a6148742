"""What passes between labels and a reward model that learns from them.

Axes besides those of ``types.py``: E labelled episodes, K frames that a reward reads (1 or F), D features, R frames of
clips whose outcome is known.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class EpisodeFeatures:
    """What a reward model keeps of N episodes. A row without a live frame is an invalid episode and scores NaN."""

    values: Float[np.ndarray, "N K D"]  # features; zero where not live
    live: Bool[np.ndarray, "N K"]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a labeller says about M pairs."""

    p_first: Float[np.ndarray, " M"]  # probability that the first is better: 0.5 is a tie, NaN a skip
    both_orders: Float[np.ndarray, "M 2"] | None = None  # raw P(first shown wins) as (first, second), (second, first)
    num_asked: int = 0  # questions to a model; the rest was known from before
    num_invalid: int = 0  # of them, answers that were none


@dataclass(frozen=True, kw_only=True)
class PairData:
    """Every label so far, oldest first, so that the newest pairs are the last rows."""

    values: Float[np.ndarray, "E K D"]
    live: Bool[np.ndarray, "E K"]
    pairs: Int[np.ndarray, "M 2"]  # rows of ``values``
    target: Float[np.ndarray, " M"]  # probability that the first is better; 0.5 is a tie; never NaN
    held_out: Bool[np.ndarray, " M"]  # never trained on: early stop, calibration and the reported accuracy


@dataclass(frozen=True, kw_only=True)
class ClipFrames:
    """Frames of clips that are known to have succeeded or failed, for the heads "progress" and "success".
    ``preferences.clips`` makes them, the negatives too."""

    values: Float[np.ndarray, "R D"]
    progress: Float[np.ndarray, " R"]  # in [0, 1], 1 is done; NaN: not known, as in a clip that failed
    success: Float[np.ndarray, " R"]  # probability that the task is done in this frame; NaN: not known
    clip: Int[np.ndarray, " R"]  # number of the clip
    source: Int[np.ndarray, " R"]  # number of the start state of the episode that the clip is, or is made of
    kind: Int[np.ndarray, " R"]  # of the clip: an index of preferences.clips.KINDS
    is_end: Bool[np.ndarray, " R"]  # the clip's last frame
    held_out: Bool[np.ndarray, " R"]  # never trained on: the threshold, and the reported figures


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """Figures of one fit. Accuracies ignore ties; what has no pairs to be measured on is NaN."""

    loss: float  # nats per training pair, mean of the members
    train_accuracy: float  # of the combined score
    held_out_accuracy: float  # of the combined score; the early stop looked at the same pairs, so a little high
    ece: float  # in [0, 1], on the held-out pairs after calibration on the same pairs: a lower bound, not an estimate
    temperature: float  # that divides score differences in ``probabilities``; 1 where there was nothing to calibrate on
    num_pairs: int  # trained on
    num_steps: int  # of the optimiser up to the kept weights
    seconds: float
    progress_error: float = float("nan")  # mean absolute, in [0, 1], on held-out frames of known progress
    success_threshold: float = float("nan")  # of the probability at a clip's end, above which it counts as a success
    success_recall: float = float("nan")  # share of held-out successes above the threshold
    false_positives: float = float("nan")  # share of held-out failures and negatives above that of the other half


def pair_accuracy(
    score: Float[np.ndarray, " N"], pairs: Int[np.ndarray, "M 2"], target: Float[np.ndarray, " M"]
) -> float:
    """Share of decided pairs that ``score`` orders as ``target`` does; equal scores count half. NaN without any."""
    decided = ~np.isnan(target) & (target != 0.5)
    if not decided.any():
        return float("nan")
    first, second = score[pairs[decided]].T
    right = np.where(first == second, 0.5, (first > second) == (target[decided] > 0.5))
    return float(right.mean())


def kendall_tau(a: Float[np.ndarray, " N"], b: Float[np.ndarray, " N"]) -> float:
    """Agreement of two orders in [-1, 1], ties accounted for (tau-b, Kendall 1945). NaN if either is constant; rows
    where either is NaN are left out."""
    known = ~np.isnan(a) & ~np.isnan(b)
    a, b = a[known], b[known]
    agree, untied_a, untied_b = 0.0, 0.0, 0.0
    for i in range(len(a) - 1):  # row by row: all pairs at once would take N * N numbers
        sign_a, sign_b = np.sign(a[i + 1 :] - a[i]), np.sign(b[i + 1 :] - b[i])
        agree += float(sign_a @ sign_b)
        untied_a += float(sign_a @ sign_a)
        untied_b += float(sign_b @ sign_b)
    if not untied_a or not untied_b:
        return float("nan")
    return agree / float(np.sqrt(untied_a * untied_b))
