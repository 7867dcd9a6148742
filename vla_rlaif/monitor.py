"""Is the reward still a proxy for what is wanted? Judged at every validation, on the same start states each time.

Goodhart's law in numbers (https://arxiv.org/abs/2210.10760): over the distance from the start policy, sqrt(KL), a
learned reward keeps rising while the true one turns round. The proxy (the reward) and gold (ground truth) of the
present policy are compared, episode by episode, with those of the best validation so far, which the monitor keeps. It
is a strike if both are beyond doubt: gold has fallen by more than ``tolerance``, and the proxy has risen. ``patience``
strikes in a row are an alarm.

The best of many validations was lucky, too: its gold is a little too high. That makes a strike a little too likely, and
is why one alone does nothing. Where gold are labels, a labeller compares the two policies' episodes (audit_labels.py),
and a validation becomes the best one only if it is preferred beyond doubt: a chain of lucky ones would lead down
unseen. The kept episodes are scored again by the present reward each time, so a reward that is fitted again and has
learned better takes its strike back.
Axes: N validation episodes, one a start state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from vla_rlaif.audit_labels import Auditor
from vla_rlaif.composite import CompositeReward
from vla_rlaif.dataset import from_arrays, to_arrays
from vla_rlaif.interfaces import RewardModel
from vla_rlaif.preferences.data import EpisodeFeatures
from vla_rlaif.preferences.refresh import FittableReward
from vla_rlaif.reward_terms_config import MonitorConfig
from vla_rlaif.types import Episodes, Weights, under

MIN_PAIRS = 30  # below it a mean of N differences is not near enough to normal


@runtime_checkable
class Keeper(Protocol):
    """How episodes are kept so that they can be scored again after any fit."""

    def keep(self, episodes: Episodes) -> Weights: ...

    def score_kept(self, kept: Weights) -> Float[np.ndarray, " N"]: ...


class KeepScores:
    """For a reward that never changes: its scores."""

    def __init__(self, reward: RewardModel) -> None:
        self._reward = reward

    def keep(self, episodes: Episodes) -> Weights:
        return {"score": self._reward.score(episodes)}

    def score_kept(self, kept: Weights) -> Float[np.ndarray, " N"]:
        return kept["score"]


class KeepFeatures:
    """For a reward that is fitted again and again: what it reads."""

    def __init__(self, reward: FittableReward) -> None:
        self._reward = reward

    def keep(self, episodes: Episodes) -> Weights:
        return vars(self._reward.features(episodes))

    def score_kept(self, kept: Weights) -> Float[np.ndarray, " N"]:
        return self._reward.score_features(EpisodeFeatures(**kept))


def keeper_of(reward: RewardModel, *, is_learned: bool) -> Keeper:
    """``is_learned``: it is fitted during the run. A pool of workers has all methods, so it cannot say by itself."""
    if isinstance(reward, CompositeReward):
        return reward
    if not is_learned:
        return KeepScores(reward)
    assert isinstance(reward, FittableReward)
    return KeepFeatures(reward)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Mean of paired differences, with one-sided confidence bounds on both sides."""

    mean: float
    low: float
    high: float


def paired_change(now: Float[np.ndarray, " N"], before: Float[np.ndarray, " N"], confidence: float) -> Change:
    """Of ``now - before``, row by row; rows where either is NaN are left out. All NaN with fewer than MIN_PAIRS rows.

    The bounds are the normal ones: mean -+ z std / sqrt(n), std with n - 1.
    """
    difference = (now - before)[np.isfinite(now) & np.isfinite(before)].astype(np.float64)
    if len(difference) < MIN_PAIRS:
        return Change(mean=math.nan, low=math.nan, high=math.nan)
    mean, error = float(difference.mean()), float(difference.std(ddof=1)) / math.sqrt(len(difference))
    margin = NormalDist().inv_cdf(confidence) * error
    return Change(mean=mean, low=mean - margin, high=mean + margin)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One validation."""

    step: int
    gold: Float[np.ndarray, " N"]  # NaN: the simulation broke, or gold are labels
    kept: Weights
    shown: Episodes | None  # to the labeller, where gold are labels


class Monitor:
    """Compares the present policy with the start and with the best so far."""

    def __init__(self, config: MonitorConfig, keeper: Keeper, auditor: Auditor | None = None) -> None:
        """``auditor`` is for gold ``labels``."""
        assert (config.gold == "labels") == (auditor is not None)
        self._config, self._keeper, self._auditor = config, keeper, auditor
        self._start: Point | None = None
        self._best: Point | None = None
        self.strikes = 0
        self.rollbacks = 0

    @property
    def best_step(self) -> int:
        assert self._best is not None, "look comes first"
        return self._best.step

    @property
    def is_alarmed(self) -> bool:
        return self.strikes >= self._config.patience

    def look(self, episodes: Episodes, step: int, kl: float) -> dict[str, float]:
        """Judge one validation, after ``step`` updates; ``kl`` in nats, NaN where it is not known. The first one is
        what gains are measured from: that of the start policy."""
        shown = None if self._auditor is None else self._auditor.shown(episodes)
        now = Point(step=step, gold=self._gold(episodes), kept=dict(self._keeper.keep(episodes)), shown=shown)
        if self._start is None or self._best is None:
            self._start = self._best = now
        proxy = self._keeper.score_kept(now.kept)
        margin = self._margin(now, self._best)
        gold_change = paired_change(margin, np.zeros_like(margin), self._config.confidence)
        proxy_change = paired_change(proxy, self._keeper.score_kept(self._best.kept), self._config.confidence)
        has_fallen = gold_change.high < -self._config.tolerance
        self.strikes = self.strikes + 1 if has_fallen and proxy_change.low > 0 else 0
        since_start = paired_change(proxy, self._keeper.score_kept(self._start.kept), self._config.confidence)
        is_better = _mean(now.gold) > _mean(self._best.gold) if self._auditor is None else gold_change.low > 0
        if is_better:
            self._best = now
        return {
            "monitor/sqrt_kl": math.sqrt(max(kl, 0.0)),
            "monitor/gold": _mean(now.gold) if self._auditor is None else (1 + _mean(margin)) / 2,
            "monitor/proxy": _mean(proxy),
            "monitor/proxy_gain": since_start.mean,
            "monitor/gold_change": gold_change.mean,
            "monitor/gold_change_high": gold_change.high,
            "monitor/proxy_change": proxy_change.mean,
            "monitor/proxy_change_low": proxy_change.low,
            "monitor/best_step": float(self._best.step),
            "monitor/strikes": float(self.strikes),
            "monitor/alarm": float(self.is_alarmed),
            **({} if self._auditor is None else self._auditor.counts()),
        }

    def _gold(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        match self._config.gold:
            case "success":
                gold = episodes.success.astype(np.float64)
            case "truth":
                gold = episodes.truth.astype(np.float64)
            case "labels":
                gold = np.full(len(episodes.valid), np.nan)
        return np.where(episodes.valid, gold, np.nan)

    def _margin(self, now: Point, best: Point) -> Float[np.ndarray, " K"]:
        """By how much the present episode of each start is better than that of the best validation."""
        if self._auditor is None or now is best:
            return now.gold - best.gold
        assert now.shown is not None and best.shown is not None
        return self._auditor.margins(now.shown, now.step, best.shown, best.step)

    def rolled_back(self) -> None:
        """The policy is that of the best validation again."""
        self.strikes = 0
        self.rollbacks += 1

    def state(self) -> Weights:
        """For a checkpoint; ``restore`` takes it back."""
        if self._start is None or self._best is None:
            return {}
        points = {"start": self._start, "best": self._best}
        found: dict[str, np.ndarray] = {"counts": np.array([self.strikes, self.rollbacks])}
        for name, point in points.items():
            found |= {f"{name}/step": np.array(point.step), f"{name}/gold": point.gold}
            found |= {f"{name}/kept/{key}": value for key, value in point.kept.items()}
        if self._auditor is not None and self._best.shown is not None:  # the start is compared with by the proxy alone
            found |= {f"best/shown/{key}": value for key, value in to_arrays(self._best.shown).items()}
            found |= {f"auditor/{key}": value for key, value in self._auditor.state().items()}
        return found

    def restore(self, state: Weights) -> None:
        if not state:
            return
        if self._auditor is not None:
            if "auditor/counts" not in state:
                raise ValueError(
                    "monitor.gold is labels, and the checkpoint is of a run without them: it has no episodes to "
                    "compare with. Resume with the monitor.gold that the run had, or start anew."
                )
            self._auditor.restore(under("auditor/", state))
        self.strikes, self.rollbacks = (int(count) for count in state["counts"])
        self._start, self._best = (_point(name, state) for name in ("start", "best"))


def _point(name: str, state: Mapping[str, np.ndarray]) -> Point:
    kept, shown = under(f"{name}/kept/", state), under(f"{name}/shown/", state)
    return Point(
        step=int(state[f"{name}/step"]),
        gold=state[f"{name}/gold"],
        kept=kept,
        shown=from_arrays(shown) if shown else None,
    )


def _mean(values: Float[np.ndarray, " N"]) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
