"""Which rollouts nobody can use: known before they are made.

Episodes wait for the trainer in the order they were made, and an update takes `episodes_per_update` of them. One that
is made behind a queue of B episodes is used B // episodes_per_update updates later, so it is too old exactly when
B >= (staleness + 1) x episodes_per_update. Night work is therefore a bucket with that capacity which rollouts fill and
training empties, and what overflows is waste. Rates are constant between changes of the allocation, so no time step is
involved.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vla_rlaif.pool.calendar import Interval, Timeline
from vla_rlaif.pool.clock import HOUR, Micros
from vla_rlaif.pool.config import Learning, PoolConfig
from vla_rlaif.pool.goals import Outlook
from vla_rlaif.pool.history import History, Leads


@dataclass(frozen=True, kw_only=True)
class Use:
    """What became of the GPU-hours of one stretch."""

    discarded: float = 0.0  # GPU-hours of rollouts whose episodes are too old when the trainer comes to them
    starved: float = 0.0  # GPU-hours of training without episodes that are fresh enough
    updates: float = 0.0

    def __add__(self, other: "Use") -> "Use":
        return Use(
            discarded=self.discarded + other.discarded,
            starved=self.starved + other.starved,
            updates=self.updates + other.updates,
        )


class Bucket:
    """Episodes that the trainer can still use."""

    def __init__(self, learning: Learning, *, episodes: float = 0.0) -> None:
        self._learning = learning
        self._capacity = (learning.staleness + 1) * learning.episodes_per_update
        self.episodes = min(episodes, self._capacity)

    def advance(self, duration: Micros, *, rollout_gpus: int, trainer_gpus: int) -> Use:
        """A stretch with constant numbers of GPUs."""
        spec, hours = self._learning, duration / HOUR
        made = rollout_gpus * spec.episodes_per_gpu_hour  # episodes an hour
        used = trainer_gpus * spec.updates_per_gpu_hour * spec.episodes_per_update
        level = self.episodes + (made - used) * hours
        self.episodes = min(max(level, 0.0), self._capacity)
        excess, lack = max(level - self._capacity, 0.0), max(-level, 0.0)
        return Use(
            discarded=excess / spec.episodes_per_gpu_hour,
            starved=lack / (spec.updates_per_gpu_hour * spec.episodes_per_update),
            updates=(used * hours - lack) / spec.episodes_per_update,
        )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The use of one interval of the calendar, before it begins."""

    interval: Interval
    goals: dict[str, int]
    use: Use


def forecast(
    config: PoolConfig, timeline: Timeline, start: Micros, end: Micros, history: History, *, episodes: float = 0.0
) -> list[Forecast]:
    """What [start, end) would use and waste if every goal held exactly, by interval. Cut at both ends."""
    outlook = Outlook(
        config,
        timeline,
        start,
        capacity=config.pool.num_gpus,
        num_nodes=config.pool.nodes,
        leads=Leads(config, history),
    )
    bucket = None if config.learning is None else Bucket(config.learning, episodes=episodes)
    result = []
    for index, interval in enumerate(timeline.intervals[outlook.first :], start=outlook.first):
        if interval.start >= end:
            break
        goals, use = outlook.goals(index), Use()
        if bucket is not None and config.learning is not None:
            duration = min(interval.end, end) - max(interval.start, start)
            rollout_gpus, trainer_gpus = goals[config.learning.rollout], goals[config.learning.trainer]
            use = bucket.advance(duration, rollout_gpus=rollout_gpus, trainer_gpus=trainer_gpus)
        result.append(Forecast(interval=interval, goals=goals, use=use))
    return result


def total(parts: Iterable[Use]) -> Use:
    result = Use()
    for part in parts:
        result += part
    return result


def usable_rollout_gpus(learning: Learning, trainer_gpus: int) -> float:
    """Rollout GPUs whose episodes a trainer of that size can use for ever."""
    used = trainer_gpus * learning.updates_per_gpu_hour * learning.episodes_per_update
    return used / learning.episodes_per_gpu_hour
