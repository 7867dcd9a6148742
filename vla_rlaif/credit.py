"""Which episodes are learned from and what their decisions are worth: the halves of the algorithms that see episodes.

GRPO and filtered behaviour cloning are here and have no state; PPO's is in critic_credit.py, that of preference
optimisation in pair_credit.py. Axes: N episodes, T decisions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.filtered_bc import FilteredBC
from vla_rlaif.grpo import GRPO, num_valid
from vla_rlaif.rollout import make_batch
from vla_rlaif.types import Credited, Episodes, Weights


@dataclass(frozen=True, kw_only=True)
class GroupCredit:
    """GRPO's: each reward against those of its group."""

    algorithm: GRPO
    normalizer: Literal["constant", "decisions"]

    def assign(
        self, episodes: Episodes, reward: Float[np.ndarray, " N"], *, step: int, window: int, is_stale: bool
    ) -> Credited:
        del step
        advantage, metrics = self.algorithm.advantages(reward, episodes.starts.group)
        denominator = num_valid(self.normalizer, advantage, episodes.mask)
        batch = make_batch(episodes, advantage, denominator, window=window, is_stale=is_stale)
        return Credited(batch=batch, advantage=advantage, metrics=metrics)

    def learned(self, metrics: Mapping[str, float], step: int) -> Mapping[str, float]:
        del metrics, step
        return {}

    def state(self) -> Weights:
        return {}

    def restore(self, state: Weights) -> None:
        del state


@dataclass(frozen=True, kw_only=True)
class KeptCredit:
    """Filtered behaviour cloning's: 1 for what is imitated."""

    algorithm: FilteredBC

    def assign(
        self, episodes: Episodes, reward: Float[np.ndarray, " N"], *, step: int, window: int, is_stale: bool
    ) -> Credited:
        del step
        kept = self.algorithm.kept(reward)
        denominator = float(episodes.mask[kept > 0].sum())
        batch = make_batch(episodes, kept, denominator, window=window, is_stale=is_stale)
        metrics = count_groups(episodes.starts.group, reward, kept > 0)
        return Credited(batch=batch, advantage=kept, metrics=metrics)

    def learned(self, metrics: Mapping[str, float], step: int) -> Mapping[str, float]:
        del metrics, step
        return {}

    def state(self) -> Weights:
        return {}

    def restore(self, state: Weights) -> None:
        del state


def count_groups(
    group: Int[np.ndarray, " N"], reward: Float[np.ndarray, " N"], is_learned: Bool[np.ndarray, " N"]
) -> dict[str, float]:
    """What became of the groups, where an algorithm does not compare their members: those are live of which something
    is learned. The names are GRPO's."""
    ids, row = np.unique(group, return_inverse=True)
    live, scorable = np.bincount(row, is_learned) > 0, np.bincount(row, np.isfinite(reward)) > 0
    return {
        "groups/total": float(len(ids)),
        "groups/live": float(live.sum()),
        "groups/zero_spread": float((scorable & ~live).sum()),
        "groups/too_few_valid": float((~scorable & ~live).sum()),
    }
