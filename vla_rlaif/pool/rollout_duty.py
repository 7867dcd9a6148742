"""A replica that collects: plays the groups that the trainer will ask for, with the committed weights.

A group belongs to a lane `r<round>-g<group>` of the episode store: what step `step + round` would play as its group
`group`. The next free lane is the next work, whoever comes; a lane has one writer at a time (a file lock) and at most
one group of a version. So a group that a drain interrupts is played from its start by the next worker, with the same
seeds: it is neither lost nor there twice. Rounds go up to the staleness bound: more would be thrown away.
"""

import contextlib
import fcntl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.build import build_env
from vla_rlaif.dataset import num_shards, read_shard
from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.pool.acting import start_policy_of, weights_of
from vla_rlaif.pool.actions import Admit, Drain, Sync, Warm
from vla_rlaif.pool.clock import SECOND
from vla_rlaif.pool.committed import Committed, load_committed, newest_name
from vla_rlaif.pool.replica import Order, Report
from vla_rlaif.pool.work import Work
from vla_rlaif.rollout import rollout, take_starts, train_starts
from vla_rlaif.types import EnvSpec, Transition

IDLE_S = 0.2  # between looks for work when there is none


class Interrupted(Exception):
    """The replica drains: the group is left to another worker."""


class InterruptibleEnv:
    """Wraps a VectorEnv: raises at the next chunk boundary once it is told to stop."""

    def __init__(self, env: VectorEnv, stop: threading.Event) -> None:
        self._env, self._stop = env, stop

    @property
    def num_envs(self) -> int:
        return self._env.num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        return self._env.reset(seeds)

    def step(self, action: Float[np.ndarray, "N H A"]) -> Transition:
        if self._stop.is_set():
            raise Interrupted
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()


class RolloutDuty:
    def __init__(self, replica: str, work: Work) -> None:
        run = work.run
        assert run.loop.stored is not None, "check_work has seen to it"
        self._replica, self._run, self._store = replica, run, EpisodeStore(run.loop.stored)
        self._lanes = Lanes(run.loop.stored, rounds=run.loop.staleness + 1, groups=num_groups(run))
        self._stop, self._thread = (
            threading.Event(),
            threading.Thread(target=self._collect, name="collect", daemon=True),
        )
        self._env: VectorEnv | None = None
        self._policy: Any = None
        self._start: Any = None
        self._committed: Committed | None = None
        self._seen = ""
        self._groups = self._carried = 0
        self._failure: str | None = None

    def do(self, order: Order, is_current: Callable[[], bool]) -> None:
        match order:
            case Warm():
                self._env = InterruptibleEnv(build_env(self._run.env), self._stop)
                self._start = start_policy_of(self._run, self._env.spec)
                self._policy = start_policy_of(self._run, self._env.spec)
            case Sync(abort=False):
                self._load()
            case Admit():
                self._thread.start()
            case Drain(within=within):
                self._stop.set()
                self._thread.join(timeout=within / SECOND)
                if self._thread.is_alive():
                    raise TimeoutError(f"{self._replica} is within one chunk for {within / SECOND:.0f} s")
            case _:
                pass

    def report(self) -> Report:
        version = None if self._committed is None else self._committed.version
        return Report(version=version, failure=self._failure, groups=self._groups, carried=self._carried)

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._env is not None:
            self._env.close()

    def _load(self) -> None:
        name, committed = newest_name(self._run.run_dir), load_committed(self._run.run_dir)
        self._policy.load(weights_of(self._start, committed.trained), committed.version)
        self._committed, self._seen = committed, name

    def _collect(self) -> None:
        try:
            while not self._stop.is_set():
                if newest_name(self._run.run_dir) != self._seen:
                    self._load()
                assert self._committed is not None, "weights before work"
                with self._lanes.next(self._committed.version) as lane:
                    if lane is not None:
                        self._play(lane, self._committed)
                if lane is None:
                    self._stop.wait(IDLE_S)
        except Interrupted:
            self._carried += 1
        except Exception as error:  # the planner takes the GPUs back and starts another replica
            self._failure = f"{type(error).__name__}: {error}"

    def _play(self, lane: "Lane", committed: Committed) -> None:
        """With as many rows as the trainer has: libraries choose their kernels by shape, and so the last bits."""
        assert self._env is not None
        size, rounds = self._run.algorithm.group_size, 1 + self._run.loop.max_refills
        starts = train_starts(self._run.seed, (committed.step + lane.round) * rounds, num_groups(self._run), size)
        rows = np.arange(lane.group * size, (lane.group + 1) * size)
        starts = take_starts(starts, rows)
        batch = self._run.loop.act_batch
        episodes = rollout(self._policy, self._env, starts, seed=self._run.seed, act_batch=batch)
        self._store.append(lane.name, episodes)
        self._groups += 1


def num_groups(run: Any) -> int:
    """Of a step."""
    return run.env.num_envs // run.algorithm.group_size


class Lane:
    def __init__(self, round: int, group: int) -> None:
        self.round, self.group, self.name = round, group, f"r{round}-g{group:04d}"


class Lanes:
    """Which group is next. Sorted names are the order in which the trainer reads them: rounds, then groups."""

    def __init__(self, store: Path, *, rounds: int, groups: int) -> None:
        self._store, self._locks = store, store.with_name(store.name + "-locks")
        self._lanes = [Lane(r, g) for r in range(rounds) for g in range(groups)]
        self._newest: dict[str, tuple[int, int]] = {}  # lane -> shards, version of the last

    @contextlib.contextmanager
    def next(self, version: int) -> Iterator[Lane | None]:
        """The first lane without a group of the version, for this worker alone; None: there is nothing to do."""
        self._locks.mkdir(parents=True, exist_ok=True)
        for lane in self._lanes:
            if self._has(lane, version):
                continue
            with (self._locks / lane.name).open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # somebody plays it
                    continue
                if not self._has(lane, version):
                    yield lane
                    return
        yield None

    def _has(self, lane: Lane, version: int) -> bool:
        """Or of a newer one: versions of a lane only grow."""
        folder = self._store / lane.name
        shards = num_shards(folder)
        if not shards:
            return False
        if self._newest.get(lane.name, (0, 0))[0] != shards:
            self._newest[lane.name] = shards, read_shard(folder, shards - 1).version
        return self._newest[lane.name][1] >= version
