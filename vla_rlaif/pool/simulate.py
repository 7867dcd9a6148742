"""What if: the planner on simulated GPUs, from event to event. Nothing happens in between, so 30 days take seconds."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from vla_rlaif.pool.accounts import Accounts, Breach
from vla_rlaif.pool.actions import Action, Plan
from vla_rlaif.pool.calendar import AHEAD, PAST, Override, Timeline, compile_timeline, shares_of
from vla_rlaif.pool.clock import DAY, SECOND, Micros
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.history import Recorder
from vla_rlaif.pool.ledger import Ledger, State
from vla_rlaif.pool.physics import Physics
from vla_rlaif.pool.planner import plan
from vla_rlaif.pool.staleness import Bucket, Use
from vla_rlaif.pool.trace import (
    ClockStep,
    GpuDown,
    GpuUp,
    JobSubmitted,
    Load,
    NodeDown,
    NodeUp,
    SchedulerDown,
    Timed,
    WeightSync,
    check_events,
)
from vla_rlaif.pool.world import World

MAX_P99_MS = 10_000.0  # an overloaded server has no latency; it has this one


@dataclass(frozen=True, kw_only=True)
class Edit:
    """From an instant on, another calendar holds."""

    at: Micros
    config: PoolConfig


@dataclass(kw_only=True)
class Simulation:
    """What came of it."""

    config: PoolConfig
    timeline: Timeline
    start: Micros
    end: Micros
    ledger: Ledger
    uses: dict[Micros, Use] = field(default_factory=dict)  # by start of the interval
    series: list[tuple[Micros, dict[tuple[str, State], int]]] = field(default_factory=list)  # from then on, GPUs
    breaches: list[Breach] = field(default_factory=list)
    log: list[tuple[Micros, Action]] = field(default_factory=list)
    events: Sequence[Timed] = ()
    num_plans: int = 0


def simulate(
    config: PoolConfig,
    *,
    start: Micros,
    days: float,
    physics: Physics | None = None,
    events: Sequence[Timed] = (),
    overrides: Sequence[Override] = (),
    edits: Sequence[Edit] = (),
) -> Simulation:
    """Run the planner from ``start``; every role begins with what its window gives it, warm."""
    check_events(events, config)
    end = start + round(days * DAY)
    run = _Run(config, start=start, end=end, physics=physics or Physics(), events=events, overrides=overrides)
    for edit in edits:
        run.push(edit.at, edit)
    run.settle()
    run.go()
    return run.result


@dataclass(frozen=True)
class _StepOver:
    replica: str
    since: Micros


@dataclass(frozen=True)
class _Boundary:
    """Another window begins."""


@dataclass(frozen=True)
class _Save:
    """Training writes its own checkpoints."""


@dataclass(frozen=True)
class _SyncOver:
    """The weight sync of a trace is over."""


@dataclass(frozen=True)
class _Wake:
    """The time that a plan asked for, or a scheduler that is back."""


class _Run:
    """The event loop of one simulation."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        start: Micros,
        end: Micros,
        physics: Physics,
        events: Sequence[Timed],
        overrides: Sequence[Override],
    ) -> None:
        self._overrides, self._physics, self._now = overrides, physics, start
        ledger = Ledger(start=start, num_gpus=config.pool.num_gpus)
        self._world = World(config, physics, ledger, self._after)
        self.result = Simulation(
            config=config,
            timeline=self._compile(config, start, end),
            start=start,
            end=end,
            ledger=ledger,
            events=events,
        )
        self._heap: list[tuple[Micros, int, object]] = []
        self._pushed = 0
        self._offset: Micros = 0  # of the scheduler's wall clock
        self._decided: Micros | None = None
        self._plan_at: Micros | None = None
        self._down_until = start
        self._loads: dict[str, float] = {}
        self._bucket = None if config.learning is None else Bucket(config.learning)
        self._updates = 0.0
        self._accounts = Accounts(ledger, self.result.breaches)
        self._enter_window()
        for timed in events:
            if start <= timed.at < end:
                self.push(timed.at, timed.event)
        for at in range(start + physics.checkpoint_every, end, physics.checkpoint_every):
            self.push(at, _Save())
        self._push_boundaries()

    def push(self, at: Micros, event: object) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, event))

    def settle(self) -> None:
        """Bring every role to its window's share before the clock starts: the pool did not begin this minute."""
        planned = None
        while planned is None or planned.actions:
            planned = self._ask()
            for action in planned.actions:
                self._world.apply(action, self._now)
            steps = [
                event for _, _, event in sorted(self._heap, key=lambda item: item[:2]) if isinstance(event, _StepOver)
            ]
            self._heap = [item for item in self._heap if not isinstance(item[2], _StepOver)]
            heapq.heapify(self._heap)
            for step in steps:
                self._world.finish(step.replica, step.since, self._now)
        self._accounts.begin(planned)
        self.result.ledger.handovers.clear()
        self._world.recorder = Recorder()
        self._snapshot()
        self._plan_at = self._now

    def go(self) -> None:
        """Until the end."""
        while True:
            at = min(self._heap[0][0] if self._heap else self.result.end, self._plan_at or self.result.end)
            self._advance(min(at, self.result.end))
            if at >= self.result.end:
                break
            changed = False
            while self._heap and self._heap[0][0] == at:
                changed |= self._happen(heapq.heappop(self._heap)[2])
            if changed:
                self._call_plan()
            if self._plan_at == at:
                self._plan_at = None
                self._plan()
            self._snapshot()
        self._accounts.end(self._now)

    def _compile(self, config: PoolConfig, start: Micros, end: Micros) -> Timeline:
        return compile_timeline(config, start - PAST, end + AHEAD + 2 * DAY, overrides=self._overrides)

    def _push_boundaries(self) -> None:
        for at in self.result.timeline.starts:
            if self._now < at < self.result.end:
                self.push(at, _Boundary())

    def _enter_window(self) -> None:
        self._interval = self.result.timeline.at(self._now)
        self._minimums = {r: s.min for r, s in shares_of(self.result.config, self._interval).items()}

    def _after(self, at: Micros, replica: str, since: Micros) -> None:
        self.push(at, _StepOver(replica, since))

    def _call_plan(self) -> None:
        """At the next look of the scheduler."""
        poll = self._physics.poll
        at = max(-(-self._now // poll) * poll, self._down_until)
        self._plan_at = at if self._plan_at is None else min(self._plan_at, at)

    def _advance(self, until: Micros) -> None:
        duration, world = until - self._now, self._world
        if not duration:
            return
        ledger, learning = self.result.ledger, self.result.config.learning
        ledger.advance(until, window=self._interval.window, held=world.counts, minimums=self._minimums)
        for role in self._loads:
            ledger.record_latency(self._p99(role), duration, in_transition=world.is_in_transition)
        if self._bucket is not None and learning is not None:
            use = self._bucket.advance(
                duration,
                rollout_gpus=world.active(learning.rollout),
                trainer_gpus=world.active(learning.trainer),
            )
            self._updates += use.updates
            world.version = int(self._updates)
            self.result.uses[self._interval.start] = self.result.uses.get(self._interval.start, Use()) + use
        self._now = until

    def _happen(self, event: object) -> bool:
        """True if the scheduler should look."""
        world, now = self._world, self._now
        match event:
            case _StepOver(replica=name, since=since):
                return world.finish(name, since, now)
            case _Boundary():
                self._enter_window()
                self._accounts.open_window(self._interval, now)
            case _Save():
                world.save_all(now)
                return False
            case _SyncOver():
                world.end_sync()
            case Edit(config=config):
                self.result.config = world.config = config
                self.result.timeline = self._compile(config, now, self.result.end)
                self._push_boundaries()
                self._enter_window()
            case NodeDown(node=node) | NodeUp(node=node):
                slots = range(self.result.config.pool.gpus_per_node)
                world.set_health(node, slots, healthy=isinstance(event, NodeUp), now=now)
            case GpuDown(node=node, slot=slot) | GpuUp(node=node, slot=slot):
                world.set_health(node, (slot,), healthy=isinstance(event, GpuUp), now=now)
            case JobSubmitted():
                world.submit(event, now)
            case Load(role=role, gpus=gpus):
                self._loads[role] = gpus
            case ClockStep(seconds=seconds):
                self._offset += round(seconds * SECOND)
            case SchedulerDown(duration=duration):
                self._down_until, self._decided = now + duration, None
                self._plan_at = now + duration
            case WeightSync(duration=duration):
                world.begin_sync(now)
                self.push(now + duration, _SyncOver())
        return True

    def _ask(self) -> Plan:
        now = self._now + self._offset
        p99 = {role: self._p99(role) for role in self._loads}
        observed = self._world.observe(self._now, decided=self._decided, p99_ms=p99)
        self.result.num_plans += 1
        return plan(now, self.result.timeline, self.result.config, observed, self._world.recorder.history())

    def _plan(self) -> None:
        planned = self._ask()
        self._decided = max(self._now + self._offset, self._decided or 0)
        for action in planned.actions:
            self._world.apply(action, self._now)
            self.result.log.append((self._now, action))
        wake = planned.next_wakeup - self._offset
        self._plan_at = wake if self._plan_at is None else min(wake, self._plan_at)
        self._accounts.note(planned, self._now, self._world.active)

    def _p99(self, role: str) -> float:
        load, active = self._loads[role], self._world.active(role)
        if load >= active:
            return MAX_P99_MS
        return min(self._physics.service_ms / (1 - load / active), MAX_P99_MS)

    def _snapshot(self) -> None:
        counts = {key: n for key, n in self._world.counts.items() if n}
        if not self.result.series or self.result.series[-1][1] != counts:
            self.result.series.append((self._now, counts))
