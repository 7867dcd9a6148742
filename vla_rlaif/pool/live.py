"""The live loop: look, plan, act, until the next wakeup or until something changes.

The plan is the simulator's (`planner.plan`). A scheduler remembers nothing that matters: after a restart it recomputes
everything from the clock, the calendar, the overrides and what is there. One that has no lease only looks.
"""

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rlaif.pool.actions import Plan, Reject
from vla_rlaif.pool.archive import Archive
from vla_rlaif.pool.calendar import Timeline, around
from vla_rlaif.pool.checks import load_pool
from vla_rlaif.pool.clock import Micros
from vla_rlaif.pool.executor import Executor
from vla_rlaif.pool.history import Recorder
from vla_rlaif.pool.lease import FileLease, Lease
from vla_rlaif.pool.live_clock import LiveClock
from vla_rlaif.pool.observe import Seen
from vla_rlaif.pool.planner import plan
from vla_rlaif.pool.ray_pool import CALL_ERROR, RayPool, SupersededError
from vla_rlaif.pool.record import Record
from vla_rlaif.pool.state import Phase
from vla_rlaif.pool.store import PoolStore
from vla_rlaif.pool.work import Work, check_work

LEASE = "lease.json"  # in the pool's state_dir
STORE = "pool.sqlite"
READ_ONLY = -1  # the token of a scheduler without the lease


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Real seconds."""

    poll_s: float = 1.0  # between looks while something changes
    idle_s: float = 5.0  # while nothing does
    lease_s: float = 15.0  # a scheduler that is not heard of for so long is replaced


def new_holder() -> str:
    """A name for one run of one scheduler."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Scheduler:
    def __init__(
        self, path: Path, pool: RayPool, work: Work, clock: LiveClock, pace: Pace, say: Callable[[str], None]
    ) -> None:
        self._path, self._clock, self._pace, self._say = path, clock, pace, say
        self.holder = new_holder()
        self._config, self._stamp = load_pool(path, now=clock.now()), path.stat().st_mtime_ns
        check_work(self._config, work)
        self._work, self._executor = work, Executor(pool, work, clock)
        self._lease = FileLease(work.state_dir / LEASE)
        self._store = PoolStore(work.state_dir / STORE)
        self._archive = Archive(work.state_dir)
        self._record: Record | None = None
        self._recorder = Recorder()
        self._decided: Micros | None = None
        self._token = 0  # of the lease; 0 before the first look
        self._complaint = ""  # about the calendar on disk

    def run(self, wait: Callable[[float], bool]) -> None:
        """Until ``wait(seconds)``, which sleeps, says that it is over. Gives the lease up at the end."""
        try:
            pause = 0.0
            while not wait(pause):
                try:
                    pause = self.step()
                except SupersededError as error:
                    self._lose(str(error))
                    pause = self._pace.poll_s
                except CALL_ERROR as error:
                    self._say(f"{type(error).__name__}: {error}")
                    pause = self._pace.poll_s
        finally:
            self._lease.give_up(holder=self.holder, now=self._clock.now())

    def step(self) -> float:
        """One look, and if this scheduler has the lease, one plan. Returns real seconds until the next."""
        now, clock = self._clock.now(), self._clock
        lease = self._lease.claim(holder=self.holder, now=now, duration=clock.micros(self._pace.lease_s))
        if lease is None:
            self._lose("another scheduler has the lease.")
            return self._pace.poll_s
        record = self._take_over(lease, now)
        self._reload(now)
        config = self._config
        timeline = around(config, now, overrides=self._store.overrides(now=now))
        seen = self._executor.look(config, lease.token, decided=self._decided)
        record.book(seen, config, timeline, now)
        took = record.follow(seen, config)
        for sample in took:
            self._recorder.add(*sample)
        planned = plan(now, timeline, config, seen.observed, self._recorder.history())
        self._decided = max(now, self._decided or 0)
        self._renew(lease)
        self._executor.act(seen, planned.actions, lease.token)
        self._renew(lease)
        self._executor.tidy(config, seen, planned.actions, lease.token)
        record.note(planned, timeline, now)
        self._archive.write(record, self._status(seen, planned, timeline, now))
        if took:
            self._store.add_durations(took)
        return self._pause(seen, planned, now)

    def _pause(self, seen: Seen, planned: Plan, now: Micros) -> float:
        is_calm = not planned.actions and all(r.phase is Phase.ACTIVE for r in seen.observed.replicas)
        longest = min(self._pace.idle_s if is_calm else self._pace.poll_s, self._pace.lease_s / 3)
        return min(longest, max(self._pace.poll_s / 5, self._clock.seconds(planned.next_wakeup - now)))

    def _take_over(self, lease: Lease, now: Micros) -> Record:
        """The record goes on: this scheduler's own, unless another one had the lease in between."""
        if self._record is None or lease.token > self._token + 1:
            self._say(f"{self.holder} has the lease (token {lease.token})")
            self._decided, self._record = None, self._archive.open(self._clock, self._config, now)
            self._recorder = Recorder(self._store.durations())
        self._token = lease.token
        return self._record

    def _renew(self, lease: Lease) -> None:
        """Looking and acting wait for Ray, which may take long; nobody should take over meanwhile."""
        duration = self._clock.micros(self._pace.lease_s)
        new = self._lease.claim(holder=self.holder, now=self._clock.now(), duration=duration)
        if new is None or new.token != lease.token:
            raise SupersededError("the lease ran out while Ray was waited for.")

    def _lose(self, reason: str) -> None:
        if self._token != READ_ONLY:
            self._say(f"{self.holder} is read-only: {reason}")
        self._token, self._record = READ_ONLY, None

    def _reload(self, now: Micros) -> None:
        """A calendar that was edited holds at once; one with a mistake is reported, and the old one goes on."""
        stamp = self._path.stat().st_mtime_ns
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            config = load_pool(self._path, now=now)
            check_work(config, self._work)
            if config.pool != self._config.pool:
                raise ValueError("pool: its size changed; start the scheduler anew with another state_dir.")
        except ValueError as error:
            self._complaint = f"{self._path} is not used as it is now: {error}"
            self._say(self._complaint)
        else:
            self._config, self._complaint = config, ""

    def _status(self, seen: Seen, planned: Plan, timeline: Timeline, now: Micros) -> dict[str, Any]:
        """What `vla-rlaif pool status` shows; JSON."""
        mono, ruling = seen.observed.monotonic, timeline.at(now)
        reasons = {a.replica: a.reason for a in planned.actions if not isinstance(a, Reject)}
        errors = {n: h.status.error for n, h in seen.heard.items() if h.status is not None and h.status.error}
        return {
            "at": now,
            "holder": self.holder,
            "window": planned.window,
            "source": ruling.source,
            "until": ruling.end,
            "goals": dict(planned.goals),
            "version": seen.observed.version,
            "replicas": [
                {
                    "name": r.name,
                    "role": r.role,
                    "phase": str(r.phase),
                    "gpus": [f"{gpu.node}:{gpu.slot}" for gpu in r.gpus],
                    "for": mono - r.since,
                    "next": reasons.get(r.name, ""),
                    "error": errors.get(r.name, "").strip().rsplit("\n", 1)[-1],
                }
                for r in seen.observed.replicas
            ],
            "reasons": [*planned.reasons, *([self._complaint] if self._complaint else [])],
            "violations": [
                f"{v.role}: {v.active} of at least {v.minimum} GPUs ({v.reason})" for v in planned.violations
            ],
            "next": planned.next_wakeup,
        }
