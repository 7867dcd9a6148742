"""Rollouts by several workers: groups are dealt out to them, and those of a worker that dies or hangs are lost.

Axes: see types.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from vla_rlaif.dist.answers import WorkerError, WorkerFailure, WorkerLost, answers, outcomes
from vla_rlaif.dist.cluster import Handle, WorkerGroup, split_rows
from vla_rlaif.dist.crew import Crew, CrewSettings
from vla_rlaif.dist.fleet import Health
from vla_rlaif.dist.workers import PlayedPart, RolloutWorker
from vla_rlaif.rollout import concatenate, take_starts
from vla_rlaif.types import EnvSpec, Played, Starts, SyncResult, Weights


@runtime_checkable
class CatchUp(Protocol):
    """A sync that can publish once more to those who have missed it."""

    def catch_up(self) -> SyncResult: ...


class WorkerRollouts:
    """A Rollouts. Only workers with the weights that count are given work: at first those that they were built with,
    after ``follow`` the committed ones of a sync, after ``act_with`` the given ones."""

    def __init__(self, group: WorkerGroup[RolloutWorker], settings: CrewSettings) -> None:
        self._group, self._settings = group, settings
        self._spec = answers([group.rank0(RolloutWorker.spec)], settings.work_s, "saying what it plays on")[0]
        self._sync: CatchUp | None = None
        self._given: tuple[Weights, int] | None = None
        self._holders: set[tuple[str, int]] = set()  # incarnations that have taken what was given
        self._crew = Crew(group, settings, bring_up=self._bring_up, is_fit=self._is_fit)
        self._seconds = dict.fromkeys(self._spec.timed, 0.0)
        self._env_faults = Counter(dict.fromkeys(self._spec.watched, 0))
        self._diagnostics: list[Mapping[str, float]] = []

    @property
    def spec(self) -> EnvSpec:
        return self._spec.spec

    @property
    def num_envs(self) -> int:
        return self._spec.num_envs * len(self._group.handles)

    @property
    def window(self) -> int:
        return self._spec.window

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds in the parts of the env: of the worker that took longest, in each call of ``play``."""
        return dict(self._seconds)

    @property
    def faults(self) -> Mapping[str, int]:
        """Of parts of the envs, by kind; and workers that died or hung."""
        return {**self._env_faults, "workers_died": self._crew.num_died, "workers_hung": self._crew.num_hung}

    def diagnostics(self) -> Mapping[str, float]:
        """Of the policies since the last call: means over what they played."""
        parts, self._diagnostics = self._diagnostics, []
        return {key: float(np.mean([part[key] for part in parts])) for key in (parts[0] if parts else {})}

    def follow(self, sync: CatchUp) -> None:
        """From now on only workers that hold what ``sync`` has committed are given work."""
        self._sync, self._given = sync, None

    def wait_for_one(self) -> None:
        """Until some worker lives: the next weights can go out then. Raises WorkerFailure if none comes back."""
        self._crew.wait_for_one("publishing weights")

    def act_with(self, weights: Weights, version: int) -> None:
        """From now on all act with these."""
        self._sync, self._given, self._holders = None, (weights, version), set()
        handles = self._group.handles
        asked = self._group.all(partial(RolloutWorker.load, weights=weights, version=version))
        taken = outcomes(asked, self._settings.work_s, "taking the weights")
        for handle, outcome in zip(handles, taken, strict=True):
            if isinstance(outcome, WorkerError):
                raise outcome
            if not isinstance(outcome, WorkerFailure):
                self._holders.add((handle.name, handle.incarnation))

    def play(self, starts: Starts, *, seed: int, noise_scale: float = 1.0) -> Played:
        pieces = [take_starts(starts, rows) for rows in _pieces(starts, self._spec.num_envs)]
        works = [partial(RolloutWorker.play, starts=piece, seed=seed, noise_scale=noise_scale) for piece in pieces]
        found = self._crew.deal(works, "playing", again=False)
        parts = [one for one in found if not isinstance(one, WorkerFailure)]
        newest = max((part.episodes.version for part in parts), default=0)
        # A worker that was told to commit and could not say that it did may be one version behind.
        parts = [part for part in parts if part.episodes.version == newest]
        self._account(parts)
        kept = sum(len(np.unique(part.episodes.starts.group)) for part in parts)
        episodes = concatenate([part.episodes for part in parts]) if parts else None
        return Played(episodes=episodes, lost_groups=len(np.unique(starts.group)) - kept)

    def _account(self, parts: Sequence[PlayedPart]) -> None:
        by_worker: dict[str, dict[str, float]] = {}
        for part in parts:
            mine = by_worker.setdefault(part.worker, dict.fromkeys(part.seconds, 0.0))
            mine |= {name: mine[name] + seconds for name, seconds in part.seconds.items()}
            self._env_faults.update(part.faults)
            if part.diagnostics:
                self._diagnostics.append(part.diagnostics)
        slowest = max(by_worker.values(), key=lambda seconds: sum(seconds.values()), default={})
        self._seconds |= {name: self._seconds[name] + seconds for name, seconds in slowest.items()}

    def _is_fit(self, handle: Handle[RolloutWorker]) -> bool:
        if self._sync is not None:
            return self._group.health.health(handle.name) == Health.HEALTHY
        return self._given is None or (handle.name, handle.incarnation) in self._holders

    def _bring_up(self, handle: Handle[RolloutWorker]) -> None:
        if self._sync is not None:
            result = self._sync.catch_up()
            if handle.name in result.stale:
                reason = "; ".join(result.problems) or "it did not take the weights that were published last"
                raise WorkerLost(handle.name, reason)
        elif self._given is not None:
            weights, version = self._given
            load = handle.ask(partial(RolloutWorker.load, weights=weights, version=version))
            answers([load], self._settings.work_s, "taking the weights")
            self._holders.add((handle.name, handle.incarnation))


def _pieces(starts: Starts, rows_each: int) -> list[np.ndarray]:
    """Rows of whole groups for one worker at a time; a group's rows lie together."""
    first = np.flatnonzero(np.diff(starts.group, prepend=starts.group[0] - 1))
    size = len(starts.group) // len(first)
    assert size <= rows_each and len(starts.group) == size * len(first), "groups of one size, which fit into a worker"
    num = -(-len(starts.group) // (rows_each // size * size))
    return [np.arange(part.start, part.stop) for part in split_rows(len(starts.group), num, unit=size)]
