"""Episodes as columns, and what can be asked of them: tasks, success, rewards, spread, disagreement with the truth.

Axes: N episodes, G groups.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class EpisodeTable:
    """What is known of N episodes without their frames. NaN is what is not known."""

    id: tuple[str, ...]  # unique in a source; of a run "<step>:<row>", as in its labels
    origin: tuple[str, ...]  # train, before and after (the test clips of a run), or data
    instruction: tuple[str, ...]
    step: Int[np.ndarray, " N"]  # of the run; of a dataset the shard
    group: Int[np.ndarray, " N"]
    member: Int[np.ndarray, " N"]
    seed: Int[np.ndarray, " N"]  # of the start state
    version: Int[np.ndarray, " N"]  # of the weights that acted; -1: not known
    reward: Float[np.ndarray, " N"]
    advantage: Float[np.ndarray, " N"]
    success: Float[np.ndarray, " N"]  # 0 or 1
    truth: Float[np.ndarray, " N"]  # ground-truth return
    valid: Bool[np.ndarray, " N"]
    decisions: Int[np.ndarray, " N"]

    @cached_property
    def group_of(self) -> Int[np.ndarray, " N"]:
        """The number of each episode's group among all groups: equal step, group and, of test clips, start."""
        keys = np.stack([self.step, self.group], axis=1)
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)

    @cached_property
    def spread(self) -> Float[np.ndarray, " N"]:
        """Standard deviation of the rewards in the episode's group; NaN without two rewards."""
        known = np.isfinite(self.reward)
        value, number = np.where(known, self.reward, 0.0), self._num_groups
        count = np.bincount(self.group_of, known, number)
        mean = np.bincount(self.group_of, value, number) / np.maximum(count, 1)
        centred = np.where(known, value - mean[self.group_of], 0.0)
        std = np.sqrt(np.bincount(self.group_of, centred**2, number) / np.maximum(count, 1))
        return np.where(count >= 2, std, np.nan)[self.group_of]

    @cached_property
    def disagreement(self) -> Float[np.ndarray, " N"]:
        """Share of the members of its group that reward and truth put on opposite sides of an episode, of those that
        both put on a side. 0: the reward orders as the truth does; 1: the other way round. NaN where nothing compares.
        """
        found = np.full(len(self.id), np.nan)
        order = np.argsort(self.group_of, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(self.group_of[order])) + 1) if len(order) else ():
            with np.errstate(invalid="ignore"):
                by_reward = np.sign(self.reward[rows, None] - self.reward[rows])
                by_truth = np.sign(self.truth[rows, None] - self.truth[rows])
            both = np.nan_to_num(by_reward * by_truth)
            compared = np.abs(both).sum(axis=1)
            opposite = (both < 0).sum(axis=1)
            found[rows] = np.divide(opposite, compared, out=np.full(len(rows), np.nan), where=compared > 0)
        return found

    @property
    def _num_groups(self) -> int:
        return int(self.group_of.max(initial=-1)) + 1

    def taken(self, rows: Int[np.ndarray, " M"]) -> "EpisodeTable":
        """Some of the episodes, in the given order."""
        return replace(self, **{f.name: _taken(vars(self)[f.name], rows) for f in fields(self)})


def _taken(column: tuple[str, ...] | np.ndarray, rows: np.ndarray) -> tuple[str, ...] | np.ndarray:
    return tuple(column[row] for row in rows.tolist()) if isinstance(column, tuple) else column[rows]


def joined(parts: list[EpisodeTable]) -> EpisodeTable:
    """One after the other."""
    columns = {}
    for field in fields(EpisodeTable):
        values = [vars(part)[field.name] for part in parts]
        is_text = isinstance(values[0], tuple)
        columns[field.name] = tuple(text for value in values for text in value) if is_text else np.concatenate(values)
    return EpisodeTable(**columns)


def empty_table() -> EpisodeTable:
    return bare_table(0)


def bare_table(num: int, *, origin: str = "data") -> EpisodeTable:
    """``num`` episodes of which nothing is known but their places."""
    whole, unknown = np.arange(num), np.full(num, np.nan)
    return EpisodeTable(
        id=tuple(str(row) for row in range(num)),
        origin=(origin,) * num,
        instruction=("",) * num,
        step=np.zeros(num, np.int64),
        group=whole,
        member=np.zeros(num, np.int64),
        seed=np.full(num, -1),
        version=np.full(num, -1),
        reward=unknown,
        advantage=unknown,
        success=unknown,
        truth=unknown,
        valid=np.ones(num, bool),
        decisions=np.zeros(num, np.int64),
    )
