"""A labeller that knows the simulator's truth and errs as people do: B-Pref, Lee et al. 2021, arXiv 2111.03026."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.types import Episodes


@dataclass(frozen=True, kw_only=True)
class OracleLabeller:
    """Compares ``Episodes.truth``; the only reader of the truth besides metrics. The defaults make no errors.

    The order of the errors is that of B-Pref's code: skip, then the Boltzmann choice, then mistakes, then ties, so that
    a mistake never breaks a tie. Thresholds are absolute, in units of ``truth``; B-Pref scales them with the running
    average return, which would make labels depend on the run.
    """

    beta: float | None = None  # rationality, per unit of truth; None: always the better one
    mistake: float = 0.0  # probability that a decided label is flipped
    equal_threshold: float = 0.0  # truths closer than this are a tie; equal truths always are
    skip_threshold: float | None = None  # both truths below this: "neither shows the task", skipped
    noise: float = 0.0  # std, in units of truth, of what the teacher perceives of each episode; not in B-Pref
    gamma: float = 1.0  # myopia per decision, see ``_perceived``
    success_ties: bool = True  # two successes are a tie, however fast or neat

    def __post_init__(self) -> None:
        if self.beta is not None and not self.beta > 0:
            raise ValueError(f"An oracle's beta must be positive, got {self.beta}; use null for a rational teacher.")
        if not 0 <= self.mistake < 0.5:
            raise ValueError(f"An oracle's mistake rate must be in [0, 0.5), got {self.mistake}.")
        if self.equal_threshold < 0 or self.noise < 0:
            raise ValueError(
                f"An oracle's equal_threshold and noise must not be negative, got {self.equal_threshold}, {self.noise}."
            )
        if not 0 < self.gamma <= 1:
            raise ValueError(f"An oracle's gamma must be in (0, 1], got {self.gamma}.")

    @property
    def name(self) -> str:
        errors = ", ".join(f"{key}={value}" for key, value in vars(self).items())
        return f"oracle/1({errors})"

    def label(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Float[np.ndarray, " M"]:
        """1 if the first is better, 0 if the second, 0.5 for a tie, NaN for a skip or an invalid episode."""
        rng = np.random.default_rng(seed)
        truth = self._perceived(episodes)[pairs] + self.noise * rng.standard_normal(pairs.shape)  # M 2
        gap = truth[:, 0] - truth[:, 1]
        p_first = (gap > 0).astype(float) if self.beta is None else _sigmoid(self.beta * gap)
        label = (rng.random(len(pairs)) < p_first).astype(float)
        flip = rng.random(len(pairs)) < self.mistake
        label = np.where(flip, 1 - label, label)
        tie = (np.abs(gap) < self.equal_threshold) | (gap == 0)
        if self.success_ties:
            tie |= episodes.success[pairs].all(axis=1)
        label[tie] = 0.5
        if self.skip_threshold is not None:
            label[truth.max(axis=1) < self.skip_threshold] = np.nan
        label[~episodes.valid[pairs].all(axis=1)] = np.nan
        return label

    def outcomes(self, episodes: Episodes, rows: Int[np.ndarray, " R"], seed: int) -> Float[np.ndarray, " R"]:
        """1 for a success, 0 for a failure, each flipped by a mistake; NaN for an invalid episode."""
        flip = np.random.default_rng(seed).random(len(rows)) < self.mistake
        return np.where(episodes.valid[rows], episodes.success[rows] ^ flip, np.nan)

    def _perceived(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        """B-Pref's myopic return, sum over t of gamma^(T - t) r_t, with all that we know of r: its sum.

        The whole return is dated to the last live decision n, and the segment ends at T for both episodes, so an
        outcome reached early has faded by gamma^(T - n) when the clip ends. With gamma 1 this is the truth itself.
        """
        return episodes.truth * self.gamma ** (episodes.mask.shape[1] - episodes.num_decisions)


def _sigmoid(x: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))
