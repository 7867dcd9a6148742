"""Where the time of a step goes: seconds of each phase, and how long each pool had nothing to do.

Rollouts and updates may run on two threads; a pool is idle while none of its phases runs.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from vla_rlaif.interfaces import Learner, Rollouts
from vla_rlaif.step_metrics import CompileMeter, MeasuredRollouts
from vla_rlaif.types import SyncResult

POOLS = {
    "rollout": "rollout",
    "validate": "rollout",
    "reward": "reward",
    "reference": "reference",
    "update": "learner",
}  # phase -> who works in it; while weights are published nobody does


class IdleMeter:
    """Shares of the wall time in which each pool did not work, from one line of metrics to the next."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock, self._since = clock, threading.Lock(), clock()
        self._busy: dict[str, float] = {}
        self._running: dict[object, tuple[str, float]] = {}  # work in progress: (pool, since when it is not counted)

    @contextmanager
    def working(self, pool: str) -> Iterator[None]:
        work = object()
        with self._lock:
            self._running[work] = pool, self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._count(work)
                del self._running[work]

    def metrics(self) -> dict[str, float]:
        """Since the last call; what still runs is counted up to now."""
        with self._lock:
            for work in list(self._running):
                self._count(work)
            now = self._clock()
            wall, busy = now - self._since, self._busy
            self._since, self._busy = now, dict.fromkeys(busy, 0.0)
        return {"time/step_s": wall} | {f"idle/{pool}": max(0.0, 1 - seconds / wall) for pool, seconds in busy.items()}

    def _count(self, work: object) -> None:
        (pool, since), now = self._running[work], self._clock()
        self._busy[pool] = self._busy.get(pool, 0.0) + now - since
        self._running[work] = pool, now


class Timer:
    """Wall seconds of phases of one step; a rollout's are split into what the env and the rest took."""

    def __init__(self, rollouts: Rollouts, idle: IdleMeter) -> None:
        self._rollouts = rollouts if isinstance(rollouts, MeasuredRollouts) else None
        self._idle = idle
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun, before = time.perf_counter(), self._env_seconds()
        with self._idle.working(POOLS[name]) if name in POOLS else nullcontext():
            yield
        self._add(name, seconds := time.perf_counter() - begun)
        if name == "rollout" and before:
            split = {k: v - before.get(k, 0.0) for k, v in self._env_seconds().items()}
            for part, value in split.items():
                self._add(part, value)
            self._add("policy", seconds - sum(split.values()))

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": value for name, value in self._seconds.items()}

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _env_seconds(self) -> dict[str, float]:
        return dict(self._rollouts.seconds) if self._rollouts is not None else {}


class StepMeter:
    """What is measured from one line of metrics to the next, whatever thread it happened on."""

    def __init__(self, rollouts: Rollouts, learner: Learner) -> None:
        self.idle = IdleMeter()
        self._rollouts, self._learner = rollouts, learner
        self._faults, self._compiled = self._all_faults(), CompileMeter(learner)
        self._published: dict[str, float] = {}

    def published(self, result: SyncResult, seconds: float) -> None:
        """``seconds`` of wall time, in which nobody acted or learned."""
        self._published = {
            "time/sync_s": self._published.get("time/sync_s", 0.0) + seconds,
            "sync/gather_s": result.gather_s,
            "sync/transfer_s": result.transfer_s,
            "sync/commit_s": result.commit_s,
            "sync/megabytes": result.num_bytes / 1e6,
            "sync/stale": float(len(result.stale)),
        }

    def metrics(self) -> dict[str, float]:
        """How many members and workers failed, compilations, the last publication, and the shares of IdleMeter."""
        before, self._faults = self._faults, self._all_faults()
        compiled, self._compiled = self._compiled.metrics(), CompileMeter(self._learner)
        published, self._published = self._published, {}
        faults = {f"env/{kind}": float(n - before.get(kind, 0)) for kind, n in self._faults.items()}
        return {**faults, **compiled, **published, **self.idle.metrics()}

    def _all_faults(self) -> Mapping[str, int]:
        return dict(self._rollouts.faults) if isinstance(self._rollouts, MeasuredRollouts) else {}
