"""What a reward says of episodes and of held-out clips, put together for its card.

Axes: N episodes, M labelled pairs, K held-out clips.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.preferences.clips import KINDS, ends
from vla_rlaif.preferences.data import ClipFrames
from vla_rlaif.reward_card import Judged
from vla_rlaif.reward_models.preference import PreferenceReward
from vla_rlaif.types import Episodes


def judge(
    reward: PreferenceReward,
    episodes: Episodes,
    ids: Sequence[str],
    *,
    pairs: Int[np.ndarray, "M 2"],
    p_first: Float[np.ndarray, " M"],
    held_out: Bool[np.ndarray, " M"],
    clips: ClipFrames | None,
) -> Judged:
    """Truth and success are those that the episodes carry: the card only measures."""
    features = reward.features(episodes)
    logits = reward.member_logits(features).mean(axis=0)
    usable = held_out & ~np.isnan(p_first)
    chosen, label = pairs[usable], p_first[usable]
    kinds, success, p = clip_ends(reward, clips)
    return Judged(
        ids=ids,
        instruction=episodes.instruction,
        score=reward.score_features(features),
        group=episodes.starts.group,
        pairs=chosen,
        label=label,
        p_first=sigmoid(logits[chosen[:, 0]] - logits[chosen[:, 1]]),
        truth=np.where(episodes.valid, episodes.truth, np.nan),
        success=np.where(episodes.valid, episodes.success, np.nan),
        clip_kinds=kinds,
        clip_success=success,
        clip_p=p,
        threshold=reward.threshold,
        false_positive_rate=reward.config.false_positive_rate if "success" in reward.heads else float("nan"),
    )


def clip_ends(
    reward: PreferenceReward, clips: ClipFrames | None
) -> tuple[tuple[str, ...], Float[np.ndarray, " K"], Float[np.ndarray, " K"]]:
    """Of the last frames of held-out clips: kind, whether the task is known to be done, and what the reward says."""
    if clips is None or "success" not in reward.heads:
        return (), np.empty(0), np.empty(0)
    rows = ends(clips)
    rows = rows[~np.isnan(clips.success[rows])]
    kinds = tuple(KINDS[kind] for kind in clips.kind[rows].tolist())
    return kinds, clips.success[rows], reward.success_of_frames(clips.values[rows])


def sigmoid(x: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))
