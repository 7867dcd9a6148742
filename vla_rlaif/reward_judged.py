"""What a reward says of episodes and of held-out clips, put together for its card.

Axes: N episodes, M labelled pairs, K held-out clips.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.preferences.clips import KINDS, ends
from vla_rlaif.preferences.data import ClipFrames, EpisodeFeatures
from vla_rlaif.preferences.refresh import FittableReward
from vla_rlaif.reward_card_data import Judged
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.types import Episodes


@runtime_checkable
class EndJudge(Protocol):
    """A learned reward with the head "success", in this process or on workers."""

    def success_of_frames(self, values: Float[np.ndarray, "R D"]) -> Float[np.ndarray, " R"]:
        """Probability that the task is done in single frames, by their features."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Last frames of held-out clips whose outcome is known."""

    kinds: tuple[str, ...] = ()
    success: Float[np.ndarray, " K"] = field(default_factory=lambda: np.empty(0))  # known
    p: Float[np.ndarray, " K"] = field(default_factory=lambda: np.empty(0))  # what the reward says
    source: Int[np.ndarray, " K"] = field(default_factory=lambda: np.empty(0, np.int64))  # start state


def judge(
    reward: FittableReward,
    settings: PreferenceRewardConfig,
    episodes: Episodes,
    ids: Sequence[str],
    *,
    pairs: Int[np.ndarray, "M 2"],
    p_first: Float[np.ndarray, " M"],
    held_out: Bool[np.ndarray, " M"],
    clips: ClipFrames | None,
) -> Judged:
    """Truth and success are those that the episodes carry: the card only measures."""
    usable = held_out & ~np.isnan(p_first)
    judged = judge_features(
        reward,
        settings,
        reward.features(episodes),
        ids,
        instruction=episodes.instruction,
        group=episodes.starts.group,
        pairs=pairs[usable],
        label=p_first[usable],
        clips=clips,
    )
    return replace(
        judged,
        truth=np.where(episodes.valid, episodes.truth, np.nan),
        success=np.where(episodes.valid, episodes.success, np.nan),
    )


def judge_features(
    reward: FittableReward,
    settings: PreferenceRewardConfig,
    features: EpisodeFeatures,
    ids: Sequence[str],
    *,
    instruction: Sequence[str],
    group: Int[np.ndarray, " N"],
    pairs: Int[np.ndarray, "M 2"],
    label: Float[np.ndarray, " M"],
    clips: ClipFrames | None,
) -> Judged:
    """By what the reward reads of episodes; ``pairs`` are held out, and decided or tied."""
    logits = reward.member_logits(features).mean(axis=0)
    found = clip_ends(reward, settings, clips)
    return Judged(
        ids=ids,
        instruction=instruction,
        score=reward.score_features(features),
        group=group,
        pairs=pairs,
        label=label,
        p_first=sigmoid(logits[pairs[:, 0]] - logits[pairs[:, 1]]),
        clip_kinds=found.kinds,
        clip_success=found.success,
        clip_p=found.p,
        clip_source=found.source,
        threshold=threshold_of(reward),
        false_positive_rate=wanted_rate(settings),
    )


def clip_ends(reward: FittableReward, settings: PreferenceRewardConfig, clips: ClipFrames | None) -> Ends:
    if clips is None or "success" not in settings.heads:
        return Ends()
    assert isinstance(reward, EndJudge)
    rows = ends(clips)
    rows = rows[~np.isnan(clips.success[rows])]
    return Ends(
        kinds=tuple(KINDS[kind] for kind in clips.kind[rows].tolist()),
        success=clips.success[rows],
        p=reward.success_of_frames(clips.values[rows]),
        source=clips.source[rows],
    )


def threshold_of(reward: FittableReward) -> float:
    """Of the head "success"; NaN without one."""
    return float(reward.state().get("threshold", np.nan))


def wanted_rate(settings: PreferenceRewardConfig) -> float:
    """Of false positives; NaN without a head that could have any."""
    return settings.false_positive_rate if "success" in settings.heads else float("nan")


def sigmoid(x: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))
