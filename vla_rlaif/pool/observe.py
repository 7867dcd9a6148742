"""From what the board and the replicas say to what the planner sees. Pure.

They measure ages in real seconds; the planner wants moments of the observer's monotonic clock, in pool time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vla_rlaif.pool.board import Entry
from vla_rlaif.pool.clock import Micros
from vla_rlaif.pool.live_clock import LiveClock
from vla_rlaif.pool.replica import Status
from vla_rlaif.pool.state import Observed, Phase, Replica

SILENT_S = 30.0  # a replica that answered and then does not for so long has lost a process


@dataclass(frozen=True, kw_only=True)
class Heard:
    """The last answer of a replica's actor."""

    status: Status | None = None  # None: it never answered
    silent_s: float = 0.0  # since then
    is_dead: bool = False  # its actor ended

    @property
    def is_lost(self) -> bool:
        return self.is_dead or (self.status is not None and self.silent_s > SILENT_S)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One look at the pool."""

    observed: Observed
    entries: Mapping[str, Entry]
    heard: Mapping[str, Heard]


def replica_of(
    entry: Entry, heard: Heard, *, clock: LiveClock, now: Micros, version: int, saved_s: float | None
) -> Replica:
    """``now``: the monotonic clock; ``version``: the committed one; ``saved_s``: age of the newest checkpoint."""
    ago = lambda seconds: now - clock.micros(seconds)  # noqa: E731
    status, claim = heard.status, entry.claim
    phase, since = Phase.ACQUIRING, ago(entry.age_s)
    if status is not None:
        phase, since = status.phase, ago(status.age_s + heard.silent_s)
    if heard.is_lost:
        phase = Phase.LOST
    leaving = None if status is None or status.leaving_s is None else ago(status.leaving_s + heard.silent_s)
    if entry.leaving_s is not None:
        phase, since = Phase.RELEASING, ago(entry.leaving_s)
        leaving = since if leaving is None else leaving
    report = None if status is None else status.report
    held = None if report is None or report.version is None else min(report.version, version)
    works = phase is Phase.ACTIVE and status is not None
    return Replica(
        name=claim.replica,
        role=claim.role,
        gpus=claim.gpus,
        phase=phase,
        since=since,
        acquired=ago(entry.age_s),
        saved=None if saved_s is None else ago(min(saved_s, status.age_s) if works and status else saved_s),
        leaving=leaving,
        version=held,  # newer than committed when this look began is as good
        attempts=0 if status is None else status.attempts,
        syncing_since=None if report is None or report.syncing_s is None else ago(report.syncing_s),
    )


def p99_ms(before: Mapping[str, tuple[tuple[float, float], ...]], now: Mapping[str, Status]) -> float | None:
    """Of the requests that servers answered since: the upper bound of the bucket that holds the 99th percentile."""
    total: dict[float, float] = {}
    for name, status in now.items():
        old = dict(before.get(name, ()))
        for bound, count in status.report.latency:
            total[bound] = total.get(bound, 0.0) + count - old.get(bound, 0.0)
    bounds = sorted(total)
    if not bounds or total[bounds[-1]] <= 0:
        return None
    reached = next(bound for bound in bounds if total[bound] >= 0.99 * total[bounds[-1]])
    return 1e3 * min(reached, bounds[-2] * 2)  # the last bucket has no bound
