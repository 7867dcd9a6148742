"""The maths of preferences: loss, calibration and its error. Axes: E ensemble members, M pairs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

TEMPERATURES = np.geomspace(0.1, 20.0, 121)


def bradley_terry_loss(
    first: Float[Tensor, "E M"],
    second: Float[Tensor, "E M"],
    target: Float[Tensor, "E M"],
    *,
    mistakes: float = 0.0,
) -> Tensor:
    """Mean negative log-likelihood in nats of P(first better) = sigmoid(return of first - return of second).

    Soft targets are cross-entropies, so a tie (0.5) pulls the two returns together and costs log 2 at best.

    With ``mistakes`` m a label is taken to be flipped with that probability: the first is said to be better with
    P = (1 - m) sigmoid(d) + m sigmoid(-d), as in Christiano et al. 2017 (arXiv 1706.03741, section 2.2.3), where 10 %
    of the answers are random, which is m = 0.05. No label costs more than -log m, and the more one is at odds with the
    others the less it pulls.
    """
    if not mistakes:
        return binary_cross_entropy_with_logits(first - second, target)
    right, wrong = logsigmoid(first - second), logsigmoid(second - first)
    log_keep, log_flip = math.log1p(-mistakes), math.log(mistakes)
    says_first = torch.logaddexp(log_keep + right, log_flip + wrong)
    says_second = torch.logaddexp(log_keep + wrong, log_flip + right)
    return -(target * says_first + (1 - target) * says_second).mean()


def probability(delta: Float[np.ndarray, "E M"], temperature: float) -> Float[np.ndarray, " M"]:
    """The ensemble's probability that the first is better, from the mean of its members' log-odds.

    The mean of their probabilities would be calibrated best by a temperature near 0, where it turns into a vote.
    """
    scaled = np.clip(delta.astype(np.float64).mean(axis=0) / temperature, -50, 50)
    return 1 / (1 + np.exp(-scaled))


def cross_entropy(p: Float[np.ndarray, " M"], target: Float[np.ndarray, " M"]) -> float:
    """Nats per pair."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return float(-(target * np.log(p) + (1 - target) * np.log1p(-p)).mean())


def calibrate(delta: Float[np.ndarray, "E M"], target: Float[np.ndarray, " M"]) -> tuple[float, float]:
    """The temperature in [0.1, 20] that minimises the cross-entropy (Guo et al. 2017), and that cross-entropy."""
    losses = [cross_entropy(probability(delta, temperature), target) for temperature in TEMPERATURES]
    best = int(np.argmin(losses))
    return float(TEMPERATURES[best]), losses[best]


def expected_calibration_error(
    p: Float[np.ndarray, " M"], target: Float[np.ndarray, " M"], num_bins: int = 10
) -> float:
    """Mean |confidence - accuracy| over equal bins of the confidence max(p, 1 - p) in [0.5, 1], weighted by their size.

    Pairs have no natural order, so each is turned to the side the model favours; a tie counts as half right.
    """
    confidence = np.maximum(p, 1 - p)
    accuracy = np.where(p >= 0.5, target, 1 - target)
    bins = np.minimum(((confidence - 0.5) * 2 * num_bins).astype(int), num_bins - 1)
    gap = np.bincount(bins, weights=confidence - accuracy, minlength=num_bins)
    return float(np.abs(gap).sum() / len(p))


def to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def one_thread() -> Iterator[None]:
    """The heads are small: a second thread only contends with the simulation. The
    setting is the calling thread's own, so a torch policy that learns beside it keeps all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
