"""A reward of several terms: a weighted sum, each term in standard deviations of a frozen reference batch.

The terms are scored where the rewards are, in this process or in reward workers; the sum is made by the run, which
alone knows the reference. The reference batch are episodes of the start policy, measured once: a scale that followed
the policy would take a term out of the reward as soon as it is won.
Axes: K terms; N episodes; see preferences/data.py for features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from vla_rlaif.interfaces import RewardModel
from vla_rlaif.preferences.data import EpisodeFeatures
from vla_rlaif.preferences.refresh import FittableReward
from vla_rlaif.types import Episodes, Weights, under

MIN_KNOWN = 8  # episodes of the reference batch that a term must score


@runtime_checkable
class TermScorer(Protocol):
    """Scores episodes by term: ``Terms``, or a pool of workers that have them."""

    @property
    def version(self) -> int:
        """Of the term that is learned; 0 without one."""
        ...

    def term_scores(self, episodes: Episodes, *, features: EpisodeFeatures | None = None) -> Float[np.ndarray, "K N"]:
        """``features``: what the learned term reads of them, where it is known already."""
        ...


class Terms:
    """The terms themselves, in order. ``learned`` is the one that is fitted, if any."""

    def __init__(self, rewards: Sequence[RewardModel], *, learned: FittableReward | None) -> None:
        self._rewards, self.learned = tuple(rewards), learned

    @property
    def version(self) -> int:
        return 0 if self.learned is None else self.learned.version

    def term_scores(self, episodes: Episodes, *, features: EpisodeFeatures | None = None) -> Float[np.ndarray, "K N"]:
        scores, learned = [], self.learned
        for reward in self._rewards:
            if features is not None and learned is not None and reward is learned:
                scores.append(learned.score_features(features))
            else:
                scores.append(reward.score(episodes))
        return np.stack(scores).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """How one term enters the sum."""

    name: str
    weight: float  # 0: measured only
    scale: float | None  # what it is divided by; None: its std on the reference batch


@dataclass(frozen=True, kw_only=True)
class LearnedTerm:
    """The term that is fitted during the run: after every fit it is measured again on the same reference batch."""

    row: int
    reward: FittableReward


class CompositeReward:
    """A RewardModel. An episode that a weighted term cannot score is unscorable."""

    def __init__(self, scorer: TermScorer, terms: Sequence[Weighted], *, learned: LearnedTerm | None) -> None:
        self._scorer, self._terms, self._learned = scorer, tuple(terms), learned
        self._mean: Float[np.ndarray, " K"] | None = None
        self._std = np.ones(len(self._terms))
        self._features: EpisodeFeatures | None = None  # of the reference batch, for the learned term
        self._measured_version = 0
        self._seen: list[Float[np.ndarray, "K N"]] = []
        self._kept: Float[np.ndarray, "K N"] | None = None

    @property
    def version(self) -> int:
        return self._scorer.version

    @property
    def scorer(self) -> TermScorer:
        return self._scorer

    def freeze(self, episodes: Episodes) -> None:
        """Make ``episodes`` the reference batch, for good.

        Raises:
            ValueError: a term cannot be standardised on it.
        """
        self._features = None if self._learned is None else self._learned.reward.features(episodes)
        raw = self._scorer.term_scores(episodes, features=self._features)
        self._mean = np.zeros(len(self._terms))
        for row in range(len(self._terms)):
            self._measure(row, raw[row])
        self._measured_version = self.version

    def frozen(self) -> Weights:
        """What ``freeze`` has measured; ``thaw`` takes it back."""
        assert self._mean is not None, "freeze comes first"
        features = {} if self._features is None else vars(self._features)
        return {"mean": self._mean, "std": self._std, **{f"features/{name}": v for name, v in features.items()}}

    def thaw(self, state: Weights) -> None:
        """The learned term is measured again when it is next asked."""
        self._mean, self._std = np.array(state["mean"]), np.array(state["std"])
        found = under("features/", state)
        self._features, self._measured_version = (EpisodeFeatures(**found) if found else None), -1

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        raw = self._scorer.term_scores(episodes)
        self._seen.append(raw)
        return self._sum(raw)

    def diagnostics(self) -> Mapping[str, float]:
        """Each term as it is, before standardisation, over all episodes that were scored since the last call."""
        if not self._seen:
            return {}
        raw, self._seen = np.concatenate(self._seen, axis=1), []
        return self._described(raw)

    def kept_diagnostics(self) -> Mapping[str, float]:
        """The same of the episodes that were kept last."""
        return {} if self._kept is None else self._described(self._kept)

    def _described(self, raw: Float[np.ndarray, "K N"]) -> dict[str, float]:
        found: dict[str, float] = {}
        for term, values in zip(self._terms, raw, strict=True):
            known = values[np.isfinite(values)]
            found[f"term/{term.name}/mean"] = float(known.mean()) if len(known) else float("nan")
            found[f"term/{term.name}/std"] = float(known.std()) if len(known) else float("nan")
            found[f"term/{term.name}/unscorable"] = float(len(values) - len(known))
        return found

    def keep(self, episodes: Episodes) -> Weights:
        """What ``score_kept`` needs to score these episodes again after any fit, without their frames."""
        features = None if self._learned is None else self._learned.reward.features(episodes)
        self._kept = self._scorer.term_scores(episodes, features=features)
        found = {} if features is None else vars(features)
        return {"raw": self._kept, **{f"features/{name}": v for name, v in found.items()}}

    def score_kept(self, kept: Weights) -> Float[np.ndarray, " N"]:
        raw = np.array(kept["raw"])
        if self._learned is not None:
            features = EpisodeFeatures(**under("features/", kept))
            raw[self._learned.row] = self._learned.reward.score_features(features)
        return self._sum(raw)

    def _sum(self, raw: Float[np.ndarray, "K N"]) -> Float[np.ndarray, " N"]:
        if self._mean is None:
            raise ValueError("The composite reward has no reference batch yet: call freeze before scoring.")
        if self._learned is not None and self._measured_version != self.version:
            assert self._features is not None
            self._measure(self._learned.row, self._learned.reward.score_features(self._features))
            self._measured_version = self.version
        weight = np.array([term.weight for term in self._terms])
        used = weight != 0  # NaN times 0 is NaN
        standard = (raw - self._mean[:, None]) / self._std[:, None]
        return (weight[used] @ standard[used]).astype(np.float32)

    def _measure(self, row: int, values: Float[np.ndarray, " N"]) -> None:
        assert self._mean is not None
        term, known = self._terms[row], values[np.isfinite(values)].astype(np.float64)
        if len(known) < MIN_KNOWN and term.weight:
            raise ValueError(
                f"The term {term.name!r} of the reward scores {len(known)} of the {len(values)} reference episodes, "
                f"wanted {MIN_KNOWN} or more: it cannot be standardised. Look why it gives NaN."
            )
        self._mean[row] = known.mean() if len(known) else 0.0
        spread = known.std() if len(known) else 0.0
        if term.scale is None and term.weight and not spread > 1e-9 * max(1.0, abs(float(self._mean[row]))):
            raise ValueError(
                f"The term {term.name!r} of the reward is {self._mean[row]:g} for all {len(known)} reference episodes: "
                "it has no spread to be standardised by. Give it a scale, start from a better policy, or remove it."
            )
        self._std[row] = term.scale or spread or 1.0
