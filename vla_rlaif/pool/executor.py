"""Carries out a plan, and finishes what earlier plans began: each key at most once, whoever plans.

`look` says what is there, `act` gives the orders of a plan, `tidy` takes the next step of whatever is half done: claims
without an actor, replicas that have ended, the training process. All three only depend on what is observed.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from vla_rlaif.pool.actions import Acquire, Action, Admit, Checkpoint, Drain, Reject, Release
from vla_rlaif.pool.board import Entry
from vla_rlaif.pool.clock import SECOND, Micros
from vla_rlaif.pool.committed import committed_step, committed_version, newest_name
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.endpoints import withdraw
from vla_rlaif.pool.live_clock import LiveClock
from vla_rlaif.pool.observe import Heard, Seen, p99_ms, replica_of
from vla_rlaif.pool.ray_pool import RayPool
from vla_rlaif.pool.regroup import Spread, leavers, regroup
from vla_rlaif.pool.replica import Claim, Halt, Order, Status
from vla_rlaif.pool.state import Observed, Phase
from vla_rlaif.pool.work import Work, divide, kind_of

MAX_STARTS = 4  # actors a look: a look must not take long, and the servers' processors are busy enough


class Executor:
    def __init__(self, pool: RayPool, work: Work, clock: LiveClock) -> None:
        self._pool, self._work, self._clock = pool, work, clock
        self._latency: dict[str, tuple[tuple[float, float], ...]] = {}
        self._p99: dict[str, float] = {}

    def look(self, config: PoolConfig, token: int, *, decided: Micros | None) -> Seen:
        """The pool at this moment. Replicas that their run has left are told so first."""
        version, saved_s = committed_version(self._work.run.run_dir), self._saved_s()
        nodes = self._pool.nodes(config.pool.nodes, config.pool.gpus_per_node)
        entries = self._pool.entries(token)
        heard = self._pool.listen(token, entries)
        trains = {name for name, role in config.roles.items() if kind_of(role) == "train"}
        answers = [h.status for h in heard.values() if h.status is not None and not h.is_lost]
        left = leavers([status for status in answers if status.claim.role in trains])
        leaves = [leave for leave in left if entries[leave.replica].leaving_s is None]
        if leaves:
            self._pool.order(token, [(entries[leave.replica].claim, leave) for leave in leaves])
            heard = self._pool.listen(token, entries)
        now = self._clock.monotonic()
        replicas = []
        for name, entry in entries.items():
            role = config.roles.get(entry.claim.role)
            saves = role is not None and role.checkpoints
            replicas.append(
                replica_of(
                    entry,
                    heard[name],
                    clock=self._clock,
                    now=now,
                    version=version,
                    saved_s=saved_s if saves else None,
                )
            )
        observed = Observed(
            monotonic=now,
            nodes=nodes,
            replicas=tuple(replicas),
            version=version,
            p99_ms=self._measure(config, heard),
            generation=self._pool.generation(),
            decided=decided,
        )
        return Seen(observed=observed, entries=entries, heard=heard)

    def act(self, seen: Seen, actions: tuple[Action, ...], token: int) -> None:
        """Give the orders of a plan."""
        orders: list[tuple[Claim, Order]] = []
        for action in actions:
            match action:
                case Acquire():
                    claim = Claim(replica=action.replica, role=action.role, gpus=action.gpus)
                    self._pool.claim(token, action.key, claim)
                case Release():
                    self._pool.release(token, action.key, action.replica, kill=action.kill)
                    if not action.kill:
                        orders.append((seen.entries[action.replica].claim, action))
                case Reject():
                    pass
                case _:
                    orders.append((seen.entries[action.replica].claim, self._in_real_time(action)))
        self._pool.order(token, orders)

    def tidy(self, config: PoolConfig, seen: Seen, actions: tuple[Action, ...], token: int) -> None:
        """Take the next step of whatever is half done. What may take long, making actors, comes last."""
        leaving = {name: e for name, e in seen.entries.items() if e.leaving_s is not None}
        statuses = {n: h.status for n, h in seen.heard.items() if h.status is not None and not h.is_lost}
        for action in actions:
            if isinstance(action, Admit | Drain) and action.replica in statuses:
                phase = Phase.ACTIVE if isinstance(action, Admit) else Phase.DRAINING
                statuses[action.replica] = replace(statuses[action.replica], phase=phase)
        for name, role in config.roles.items():
            if kind_of(role) == "train":
                self._pool.order(token, self._regroup(config, name, seen, statuses))
        self._pool.order(token, self._last_orders(leaving, statuses))
        for name, entry in leaving.items():
            if entry.kill or seen.heard[name].is_lost or name not in statuses or statuses[name].is_over:
                withdraw(self._work.endpoints, name)
                self._pool.remove(token, entry.claim)
        waiting = [e for e in self._pool.entries(token).values() if not e.is_created and e.leaving_s is None]
        for entry in [e for e in waiting if e.claim.role in config.roles][:MAX_STARTS]:
            self._pool.create(kind_of(config.roles[entry.claim.role]), entry.claim)

    def _last_orders(
        self, leaving: Mapping[str, Entry], statuses: Mapping[str, Status]
    ) -> Iterator[tuple[Claim, Order]]:
        """Releases again, in case they were lost; and the end of training processes on GPUs that are taken away."""
        for name, entry in leaving.items():
            if not entry.kill:
                yield entry.claim, Release(replica=name, reason="ordered before")
        for leader, status in statuses.items():
            for run in status.report.runs:
                if run.is_alive and any(n in leaving and leaving[n].kill for n in run.members):
                    yield status.claim, Halt(replica=leader, serial=run.serial, kill=True)

    def _regroup(
        self, config: PoolConfig, name: str, seen: Seen, statuses: Mapping[str, Status]
    ) -> Iterator[tuple[Claim, Order]]:
        members = {n: s for n, s in statuses.items() if s.claim.role == name and seen.entries[n].leaving_s is None}
        run, role = self._work.run, config.roles[name]
        spread = Spread(divide=lambda num_gpus: divide(self._work, role, num_gpus), across_nodes=self._work.fake_gpus)
        is_finished = committed_step(run.run_dir) >= run.loop.steps
        for order in regroup(list(members.values()), spread, is_finished=is_finished):
            yield members[order.replica].claim, order

    def _in_real_time(self, action: Action) -> Order:
        """Deadlines of orders are microseconds of the machine's clock."""
        assert not isinstance(action, Acquire | Reject), "not for a replica"
        if isinstance(action, Drain | Checkpoint):
            return replace(action, within=round(self._clock.seconds(action.within) * SECOND))
        return action

    def _measure(self, config: PoolConfig, heard: Mapping[str, Heard]) -> dict[str, float]:
        """p99 latency by role since the last look; where nobody asked, the last known."""
        for name, role in config.roles.items():
            if kind_of(role) == "serve":
                now = {n: h.status for n, h in heard.items() if h.status is not None and h.status.claim.role == name}
                measured = p99_ms(self._latency, now)
                if measured is not None:
                    self._p99[name] = measured
                self._latency |= {n: s.report.latency for n, s in now.items()}
        return dict(self._p99)

    def _saved_s(self) -> float | None:
        """Age of the newest checkpoint, real seconds."""
        folder = self._work.run.run_dir / "checkpoints" / newest_name(self._work.run.run_dir)
        try:
            return max(0.0, time.time() - folder.stat().st_mtime) if folder.name != "checkpoints" else None
        except FileNotFoundError:  # a newer one has replaced it: it was saved this moment
            return 0.0
