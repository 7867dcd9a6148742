"""A simulation, and a week of plans, in rows of text: the same for the terminal and for the page."""

from dataclasses import dataclass

from vla_rlaif.pool.clock import HOUR, Micros, format_duration, say_time, zone_of
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.goals import Outlook
from vla_rlaif.pool.history import History, Leads
from vla_rlaif.pool.ledger import NOBODY
from vla_rlaif.pool.simulate import Simulation
from vla_rlaif.pool.staleness import Forecast, total, usable_rollout_gpus

STATE_ORDER = ("active", "warming", "syncing", "standby", "draining", "checkpointing", "releasing", "idle", "dead")


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()  # columns that are numbers


def week_table(config: PoolConfig, forecasts: list[Forecast], outlook: Outlook, *, start: Micros) -> Table:
    """One row an interval: when, how long, who gets what, from when on it is prepared, and by which rule."""
    zone, rows = outlook.timeline.zone, []
    for index, entry in enumerate(forecasts, start=outlook.first):
        interval = entry.interval
        lead = outlook.lead(index) if index > outlook.first else 0
        why = "" if interval.source == "calendar" else interval.source
        if index > outlook.first and outlook.goals(index) != outlook.raw(index):
            why = f"{why}; shares not reached: too short".lstrip("; ")
        hours = interval.duration / HOUR
        rows.append(
            (
                interval.window,
                say_time(interval.start, zone, with_zone=True),
                say_time(interval.end, zone, with_zone=True),
                f"{hours:.1f}".removesuffix(".0"),
                *(str(entry.goals[role]) for role in config.ranked),
                say_time(interval.start - lead, zone)[-5:] if lead else "",
                f"{entry.use.discarded:.0f}" if entry.use.discarded >= 0.5 else "",
                why,
            )
        )
    return Table(
        title=f"Eight days from {say_time(start, zone, with_zone=True)}, GPUs by role",
        columns=("window", "from", "to", "hours", *config.ranked, "prepared from", "wasted GPU-h", "by"),
        rows=tuple(rows),
        numbers=frozenset(range(3, 3 + 1 + len(config.ranked))) | {5 + len(config.ranked)},
    )


def lead_table(config: PoolConfig, history: History) -> Table:
    """How long a handover between each two roles is planned to take."""
    leads, rows = Leads(config, history), []
    for loser in config.ranked:
        for gainer in config.ranked:
            if loser != gainer:
                measured = any(role in (loser, gainer) for role, _ in history.p95)
                basis = "measured" if measured else "declared"
                rows.append((loser, gainer, format_duration(leads.handover(loser, gainer)), basis))
    return Table(title="Lead times (safety x p95)", columns=("from", "to", "lead", "basis"), rows=tuple(rows))


def staleness_lines(config: PoolConfig, forecasts: list[Forecast]) -> list[str]:
    """What the trainer could not use of the coming days, and which window makes it."""
    if config.learning is None:
        return ["no `learning` section: the plan cannot tell which rollouts the trainer would have to discard."]
    learning, use = config.learning, total(f.use for f in forecasts)
    lines = [
        f"this calendar wastes {use.discarded:.0f} GPU-hours of {learning.rollout}: their episodes would be more than "
        f"{learning.staleness} updates old when {learning.trainer} comes to them.",
    ]
    if use.starved >= 0.5:
        lines.append(f"{learning.trainer} has no fresh episodes for {use.starved:.0f} GPU-hours; give it other data.")
    for window in dict.fromkeys(f.interval.window for f in forecasts if f.use.discarded >= 0.5):
        entry = next(f for f in forecasts if f.interval.window == window)
        usable = usable_rollout_gpus(learning, entry.goals[learning.trainer])
        lines.append(
            f"in {window}, {entry.goals[learning.trainer]} {learning.trainer} GPUs use what {usable:.0f} "
            f"{learning.rollout} GPUs make; it has {entry.goals[learning.rollout]}."
        )
    return lines


def headline(sim: Simulation) -> list[tuple[str, str]]:
    """The figures to look at first."""
    ledger, config = sim.ledger, sim.config
    use = total(sim.uses.values())
    protected = [name for name in config.ranked if config.roles[name].is_protected]
    rows = [("useful GPU time", f"{100 * ledger.useful_share:.2f} %")]
    rows += [(f"{name} below its minimum", _seconds(ledger.below[name])) for name in protected]
    if config.learning is not None:
        rows.append(("GPU-hours that staleness would discard", f"{use.discarded:.0f}"))
        rows.append((f"{config.learning.trainer} GPU-hours without fresh episodes", f"{use.starved:.0f}"))
    return rows


def role_table(sim: Simulation) -> Table:
    """What happened to each role."""
    ledger, rows = sim.ledger, []
    for name in sim.config.ranked:
        late = [ledger.late(share, role=name) for share in (0.5, 0.95, 1.0)]
        took = [ledger.transition(share, role=name) for share in (0.5, 0.95)]
        rows.append(
            (
                name,
                _seconds(ledger.below[name]),
                f"{ledger.missing[name] / HOUR:.2f}",
                *("-" if value is None else format_duration(value) for value in late + took),
                str(ledger.preemptions[name]),
                str(ledger.kills[name]),
                f"{ledger.lost[name] / HOUR:.2f}",
                str(ledger.carried[name]),
            )
        )
    return Table(
        title="Roles",
        columns=(
            *("role", "below min", "GPU-h missing", "late p50", "late p95", "late max"),
            *("handover p50", "handover p95", "preemptions", "kills", "GPU-h lost", "groups carried over"),
        ),
        rows=tuple(rows),
        numbers=frozenset(range(1, 12)),
    )


def state_table(sim: Simulation) -> Table:
    """GPU-hours by state and role; the corner is the pool's size times the wall time."""
    spent, roles = sim.ledger.by("state", "role"), (*sim.config.ranked, NOBODY)
    rows = []
    for state in STATE_ORDER:
        values = [spent[state, role] for role in roles]
        if any(values):
            share = f"{100 * sum(values) / sim.ledger.total:.2f} %"
            rows.append((state, *map(_hours, values), _hours(sum(values)), share))
    sums = [sum(n for (_, r), n in spent.items() if r == role) for role in roles]
    rows.append(("all", *map(_hours, sums), _hours(sim.ledger.total), "100.00 %"))
    names = tuple(role or "nobody" for role in roles)
    return Table(
        title="GPU-hours by state",
        columns=("state", *names, "all", "share"),
        rows=tuple(rows),
        numbers=frozenset(range(1, len(names) + 3)),
    )


def window_table(sim: Simulation) -> Table:
    """GPU-hours in which roles worked, by window, and what of it was for nothing."""
    spent, rows = sim.ledger.by("window", "role", "state"), []
    windows = [i.window for i in sim.timeline.between(sim.start, sim.end)]
    for window in dict.fromkeys(windows):
        active = [spent[window, role, "active"] for role in sim.config.ranked]
        every = sum(n for (w, _, _), n in spent.items() if w == window)
        uses = [use for at, use in sim.uses.items() if sim.timeline.at(at).window == window]
        share = f"{100 * sum(active) / every:.2f} %" if every else "-"
        rows.append((window, str(windows.count(window)), *map(_hours, active), share, f"{total(uses).discarded:.0f}"))
    return Table(
        title="GPU-hours of work by window",
        columns=("window", "times", *sim.config.ranked, "useful", "wasted"),
        rows=tuple(rows),
        numbers=frozenset(range(1, len(sim.config.ranked) + 4)),
    )


def notes(sim: Simulation) -> list[str]:
    """Violations with their times, and latency in and out of transitions."""
    zone, lines = zone_of(sim.config.timezone), []
    for breach in sorted(sim.breaches, key=lambda b: b.start):
        if breach.end > breach.start:
            lines.append(
                f"{say_time(breach.start, zone)}: {breach.role} at {breach.active} of at least {breach.minimum} GPUs "
                f"for {format_duration(breach.end - breach.start)} ({breach.reason})"
            )
    for is_in, name in ((True, "in"), (False, "outside")):
        p99 = sim.ledger.p99_ms(in_transition=is_in)
        if p99 is not None:
            lines.append(f"p99 latency {name} transitions, exceeded in 1 % of the time: {p99:.0f} ms")
    return lines


def _hours(micros: Micros) -> str:
    return f"{micros / HOUR:,.1f}" if micros else ""


def _seconds(micros: Micros) -> str:
    return f"{micros / 1e6:.0f} s"
