"""The one decision: what should happen to the pool now. Pure: no clock, no Ray, no file, no randomness.

The live loop and the simulator call `plan` with what they observe, apply its actions (each key at most once), and call
it again when something changed or at `next_wakeup`. Nothing is remembered in between, so a restart changes nothing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from vla_rlaif.pool.actions import Plan, Violation
from vla_rlaif.pool.admission import admit_jobs
from vla_rlaif.pool.calendar import Timeline
from vla_rlaif.pool.clock import HOUR, MINUTE, Micros, format_duration
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.draft import Draft
from vla_rlaif.pool.goals import Outlook, Wants, wants
from vla_rlaif.pool.handover import grow, is_thin, rescue, shrink
from vla_rlaif.pool.history import History, Leads
from vla_rlaif.pool.lifecycle import bury, progress
from vla_rlaif.pool.state import COMING, Observed, Phase, Replica

MAX_SLEEP = HOUR
SMALL_STEP = MINUTE  # a clock that goes back by less has not undone a boundary
CALM = 0.7  # share of the latency objective below which a role gives back what it took


def plan(now: Micros, timeline: Timeline, config: PoolConfig, observed: Observed, history: History) -> Plan:
    """What to do now.

    ``timeline`` is compiled from ``config`` around ``now`` (`calendar.around`). Never raises for what is observed: a
    pool that is too small for its minimums sheds by priority and reports violations.
    """
    moment, reasons = _decision_time(now, observed)
    draft = _draft(moment, timeline, config, observed, history)
    draft.reasons += reasons
    bury(draft)
    shrink(draft)
    for role in config.ranked:
        grow(draft, role, draft.wants.floor[role])
        rescue(draft, role)
    for role in config.ranked:
        admit_jobs(draft, role)
        grow(draft, role, draft.wants.want[role])
    progress(draft)
    _report(draft)
    ruling = timeline.at(moment)
    if ruling.source != "calendar":
        draft.say(f"{ruling.window} by {ruling.source}, until {draft.when(ruling.end)}")
    wakeups = [t for t in (*draft.wakeups, *draft.wants.wakeups, ruling.end) if t > now]
    goals = draft.outlook.goals(draft.outlook.first)
    return Plan(
        actions=tuple(draft.actions),
        next_wakeup=min([*wakeups, now + MAX_SLEEP]),
        reasons=tuple(dict.fromkeys((*draft.reasons, *draft.wants.notes, *draft.outlook.notes))),
        violations=tuple(draft.violations),
        window=ruling.window,
        goals=goals,
        accumulation={
            n: r.accumulation(goals[n]) for n, r in config.roles.items() if r.global_batch is not None and goals[n]
        },
    )


def _decision_time(now: Micros, observed: Observed) -> tuple[Micros, list[str]]:
    """The wall clock, but never back over a boundary that was acted on because of a small step."""
    back = 0 if observed.decided is None else observed.decided - now
    if back <= 0:
        return now, []
    if back <= SMALL_STEP and observed.decided is not None:
        return observed.decided, [f"the clock went back by {format_duration(back)}: what was decided stays"]
    return now, [f"the clock went back by {format_duration(back)}: following it"]


def _draft(now: Micros, timeline: Timeline, config: PoolConfig, observed: Observed, history: History) -> Draft:
    """Who holds what, and what is wanted."""
    census = _count(config, observed)
    leads = Leads(config, history)
    num_nodes = sum(node.is_alive for node in observed.nodes)
    boost, notes = _boost(timeline.at(now).window, config, observed.p99_ms, census)

    def look() -> tuple[Outlook, Wants]:
        capacity = census.capacity
        outlook = Outlook(config, timeline, now, capacity=capacity, num_nodes=num_nodes, leads=leads, boost=boost)
        return outlook, wants(outlook, now, capacity)

    outlook, wanted = look()
    thin = [name for name in config.roles if is_thin(config, name, wanted, census.staying(name), num_nodes)]
    if thin:  # one replica more than now, so that another one can go
        boost |= {name: census.held(name) + config.roles[name].gpus_per_replica for name in thin}
        notes += [f"{name} moves: its minimum would not survive the loss of its fullest node" for name in thin]
        outlook, wanted = look()
    return Draft(
        now=now,
        config=config,
        observed=observed,
        leads=leads,
        outlook=outlook,
        wants=wanted,
        num_nodes=num_nodes,
        coming=census.coming,
        active=census.active,
        leaving=census.leaving,
        num_coming=census.num_coming,
        num_active=census.num_active,
        has_lost=census.has_lost,
        reasons=notes,
        violations=[
            Violation(role=r.role, minimum=0, active=len(r.gpus), reason=f"{r.name} has a role that the config lacks")
            for r in census.orphans
        ],
    )


@dataclass(kw_only=True)
class _Census:
    """Replicas by role and name, GPUs by role."""

    capacity: int  # healthy GPUs that roles may have
    orphans: list[Replica]  # of roles that the config does not have (any more): they keep their GPUs
    coming: dict[str, dict[str, Replica]]
    active: dict[str, dict[str, Replica]]
    leaving: dict[str, dict[str, Replica]]
    num_coming: Counter[str] = field(default_factory=Counter)
    num_active: Counter[str] = field(default_factory=Counter)
    has_lost: bool = False

    def held(self, role: str) -> int:
        return self.num_coming[role] + self.num_active[role]

    def staying(self, role: str) -> list[Replica]:
        return [*self.coming[role].values(), *self.active[role].values()]


def _count(config: PoolConfig, observed: Observed) -> _Census:
    orphans = [r for r in observed.replicas if r.role not in config.roles]
    healthy = sum(map(sum, (node.healthy for node in observed.nodes)))
    census = _Census(
        capacity=max(healthy - sum(len(r.gpus) for r in orphans), 0),
        orphans=orphans,
        coming={role: {} for role in config.roles},
        active={role: {} for role in config.roles},
        leaving={role: {} for role in config.roles},
    )
    for replica in observed.replicas if not orphans else [r for r in observed.replicas if r.role in config.roles]:
        if replica.phase is Phase.ACTIVE:
            census.active[replica.role][replica.name] = replica
            census.num_active[replica.role] += len(replica.gpus)
        elif replica.phase in COMING:
            census.coming[replica.role][replica.name] = replica
            census.num_coming[replica.role] += len(replica.gpus)
        elif replica.phase is Phase.LOST:
            census.has_lost = True
        else:
            census.leaving[replica.role][replica.name] = replica
    return census


def _boost(
    window: str, config: PoolConfig, p99_ms: Mapping[str, float], census: _Census
) -> tuple[dict[str, int], list[str]]:
    """Targets of roles that miss their latency objective: one replica more at a time, up to max."""
    boost, notes = {}, []
    for name, role in config.roles.items():
        p99, share = p99_ms.get(name), config.share(window, name)
        if role.slo is None or p99 is None or share.most <= share.target:
            continue
        held = census.held(name)
        target = share.target
        if p99 > role.slo.p99_ms:
            more = 0 if census.num_coming[name] else role.gpus_per_replica
            target = role.at_most(min(max(share.target, held + more), share.most))
            notes.append(f"{name}: p99 {p99:.0f} ms is over {role.slo.p99_ms:.0f} ms, so its target is {target} GPUs")
        elif p99 > CALM * role.slo.p99_ms:
            target = role.at_most(min(max(share.target, held), share.most))
        if target > share.target:
            boost[name] = target
    return boost, notes


def _report(draft: Draft) -> None:
    """Every role that is below its minimum, and why."""
    shares = draft.outlook.shares(draft.outlook.first)
    for role in draft.config.ranked:
        share = shares[role]
        active = sum(len(r.gpus) for r in draft.active[role].values() if r.phase is Phase.ACTIVE)
        if active >= share.min:
            continue
        if draft.wants.floor[role] < share.min:
            reason = f"only {draft.wants.floor[role]} of the healthy GPUs are left for it by priority"
        else:
            reason = f"{draft.holds(role) - active} GPUs are on their way"
        draft.violations.append(Violation(role=role, minimum=share.min, active=active, reason=reason))
