"""The halves of preference optimisation that see episodes: which trajectories are compared.

Axes: N episodes, T decisions, M pairs, B = M * 2 * T decisions flattened.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.credit import count_groups
from vla_rlaif.dataset import from_arrays, to_arrays
from vla_rlaif.rollout import concatenate, frames_at, take
from vla_rlaif.types import Batch, Credited, Episodes, Weights, under


@dataclass(frozen=True, kw_only=True)
class RankedPairs:
    """TPO's: in each group the best with the worst, the second best with the second worst, and so on. GRAPE also adds
    the log-likelihood of a trajectory to what ranks it; here the reward alone does."""

    pairs_per_group: int
    margin: float  # reward units

    def assign(
        self, episodes: Episodes, reward: Float[np.ndarray, " N"], *, step: int, window: int, is_stale: bool
    ) -> Credited:
        del step
        assert not is_stale, "the config refuses older weights"
        pairs = self.pairs(reward, episodes.starts.group)
        side = np.zeros(len(reward))
        side[pairs[:, 0]], side[pairs[:, 1]] = 1.0, -1.0
        metrics = count_groups(episodes.starts.group, reward, side != 0) | {"pairs/trained": float(len(pairs))}
        batch = pair_batch(episodes, pairs, np.ones(len(pairs)), window=window)
        return Credited(batch=batch, advantage=side, metrics=metrics)

    def pairs(self, reward: Float[np.ndarray, " N"], group: Int[np.ndarray, " N"]) -> Int[np.ndarray, "M 2"]:
        """Rows, the better first; NaN is in none."""
        found = []
        for one in np.unique(group):
            rows = np.flatnonzero((group == one) & np.isfinite(reward))
            rows = rows[np.argsort(-reward[rows], kind="stable")]
            num = min(self.pairs_per_group, len(rows) // 2)
            both = np.stack([rows[:num], rows[::-1][:num]], axis=1)
            found.append(both[reward[both[:, 0]] - reward[both[:, 1]] > self.margin])
        return np.concatenate(found)

    def learned(self, metrics: Mapping[str, float], step: int) -> Mapping[str, float]:
        del metrics, step
        return {}

    def state(self) -> Weights:
        return {}

    def restore(self, state: Weights) -> None:
        del state


class LabelledPairs:
    """DPO's: all pairs that were labelled so far for training, whoever played them. It keeps their trajectories, which
    go into the checkpoints; fresh episodes without a label are not learned from."""

    def __init__(self, *, pairs_per_step: int, seed: int) -> None:
        self._num, self._seed = pairs_per_step, seed
        self._episodes: Episodes | None = None
        self._pairs = np.zeros((0, 2), np.int64)
        self._p_first = np.zeros(0)

    def add(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], p_first: Float[np.ndarray, " M"]) -> None:
        """Labels of pairs of ``episodes``; NaN is a skip and is left out."""
        known = ~np.isnan(p_first)
        rows, index = np.unique(pairs[known], return_inverse=True)
        new, num = replace(take(episodes, rows), version=0), self.num_episodes
        self._episodes = new if self._episodes is None else concatenate([self._episodes, new])
        self._pairs = np.concatenate([self._pairs, num + index.reshape(-1, 2)])
        self._p_first = np.concatenate([self._p_first, p_first[known]])

    @property
    def num_episodes(self) -> int:
        return 0 if self._episodes is None else len(self._episodes.valid)

    def assign(
        self, episodes: Episodes, reward: Float[np.ndarray, " N"], *, step: int, window: int, is_stale: bool
    ) -> Credited:
        """Pairs drawn by the run's seed and the step."""
        assert not is_stale, "the config refuses older weights"
        group, num = episodes.starts.group, len(self._pairs)
        drawn = np.random.default_rng((self._seed, step)).permutation(num)[: self._num]
        chosen = episodes if self._episodes is None else self._episodes
        batch = pair_batch(chosen, self._pairs[drawn], 2 * self._p_first[drawn] - 1, window=window)
        metrics = count_groups(group, reward, np.full(len(group), num > 0))
        metrics |= {"pairs/trained": float(len(drawn)), "pairs/labelled": float(num)}
        return Credited(batch=batch, advantage=np.zeros(len(reward)), metrics=metrics)

    def learned(self, metrics: Mapping[str, float], step: int) -> Mapping[str, float]:
        del metrics, step
        return {}

    def state(self) -> Weights:
        pairs = {"pairs": self._pairs, "p_first": self._p_first}
        if self._episodes is None:
            return pairs
        arrays = to_arrays(self._episodes)
        said = arrays.pop("instruction")
        return {**pairs, **{f"episodes/{k}": v for k, v in arrays.items()}, "instruction": said}

    def restore(self, state: Weights) -> None:
        self._pairs, self._p_first, self._episodes = np.array(state["pairs"]), np.array(state["p_first"]), None
        if "instruction" in state:
            self._episodes = from_arrays({**under("episodes/", state), "instruction": state["instruction"]})


def pair_batch(
    episodes: Episodes, pairs: Int[np.ndarray, "M 2"], label: Float[np.ndarray, " M"], *, window: int
) -> Batch:
    """The decisions of both trajectories of each pair, padded to T each, in the order that ``DPO`` reads them.
    ``label`` is 1 where the first is better and -1 where the second is. Padding repeats an episode's first decision."""
    e, length = episodes, episodes.mask.shape[1]
    n = np.repeat(pairs.ravel(), length)
    t = np.tile(np.arange(length), 2 * len(pairs))
    mask = e.mask[n, t]
    t = np.where(mask, t, 0)
    return Batch(
        obs=frames_at(e.images, e.state, e.instruction, n, t, window),
        trace={k: v[n, t] for k, v in e.trace.items()},
        executed=e.executed[n, t],
        advantage=np.repeat(np.stack([label, -label], axis=1).ravel(), length).astype(np.float32),
        mask=mask,
        num_valid=float(len(pairs)),
        unit=2 * length,
    )
