"""`vla-rlaif pool plan | simulate | override`: what operators ask, and what they set by hand.

Every time that an operator writes is the wall clock of the pool's zone. The clock is passed in, so all of it is tested.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from vla_rlaif.pool import summary, tables
from vla_rlaif.pool.calendar import AHEAD, Override, around
from vla_rlaif.pool.checks import cautions, load_pool
from vla_rlaif.pool.clock import DAY, Micros, parse_duration, resolve, say_time, to_local, zone_of
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.goals import Outlook
from vla_rlaif.pool.history import History, Leads, Recorder
from vla_rlaif.pool.live_verbs import LIVE_VERBS
from vla_rlaif.pool.physics import Physics
from vla_rlaif.pool.simulate import Simulation, simulate
from vla_rlaif.pool.staleness import forecast
from vla_rlaif.pool.store import PoolStore, check_override, minimum_conflicts
from vla_rlaif.pool.times import parse_wall_time
from vla_rlaif.pool.trace import Timed, node_failures, node_names, read_trace, write_trace

ConfigFile = tyro.conf.Positional[Path]
STORE = "pool.sqlite"  # in the pool's state_dir
PIPE_WIDTH = 160  # characters, where no terminal says how wide it is


@dataclass(frozen=True)
class PlanVerb:
    """The next eight days: who gets which GPUs when, what it is prepared by, and which work would be for nothing."""

    config: ConfigFile
    at: str | None = None  # from then on instead of now, e.g. 2026-11-02T08:00
    picture: Path | None = None  # .svg or .png file to write

    def __call__(self, now: Micros, console: Console) -> None:
        config = load_pool(self.config, now=now)
        start = now if self.at is None else _instant(config, self.at)
        overrides, history = _remembered(config, now=start)
        timeline = around(config, start, overrides=overrides)
        forecasts = forecast(config, timeline, start, start + AHEAD, history)
        outlook = Outlook(
            config,
            timeline,
            start,
            capacity=config.pool.num_gpus,
            num_nodes=config.pool.nodes,
            leads=Leads(config, history),
        )
        tables.show(summary.week_table(config, forecasts, outlook, start=start), console)
        for line in tables.strips(config, outlook, forecasts, start=start):
            console.print(line)
        tables.show(summary.lead_table(config, history), console)
        notes = dict.fromkeys((*summary.staleness_lines(config, forecasts), *outlook.notes))
        for line in (*notes, *(f"caution: {text}" for text in cautions(config, now=start))):
            console.print(Text(f"- {line}"))
        if self.picture is not None:
            from vla_rlaif.pool.charts import plan_strip, save

            save([plan_strip(config, forecasts, start=start, end=start + AHEAD)], self.picture)
            console.print(Text(f"wrote {self.picture}"))


@dataclass(frozen=True)
class SimulateVerb:
    """What if: run the planner on simulated GPUs, alone or against another calendar, with failures or from a trace."""

    config: ConfigFile
    against: Path | None = None  # another pool, under the same failures
    days: float = 30.0
    at: str | None = None  # start, e.g. 2026-11-02T00:00; default: today at midnight
    seed: int = 0
    node_failures: float = 0.0  # a day
    repair: str = "1h"  # how long a node stays away
    slow_checkpoints: float = 0.0  # share that takes five times as long
    failed_checkpoints: float = 0.0  # share that fails or reads back corrupt
    trace: Path | None = None  # JSON lines of events that happen too (failures, jobs, load, clock steps)
    record: Path | None = None  # write all events as such a trace
    log: Path | None = None  # write every action as JSON lines
    picture: Path | None = None  # .svg or .png file to write
    html: Path | None = None  # page to write

    def __call__(self, now: Micros, console: Console) -> None:
        if not 0 < self.days <= 366:
            raise ValueError(f"days is {self.days:g}, wanted more than 0 and at most 366.")
        paths = [self.config] if self.against is None else [self.config, self.against]
        configs = [load_pool(path, now=now) for path in paths]
        config, zone = configs[0], zone_of(configs[0].timezone)
        midnight = datetime.combine(to_local(now, zone).date(), time())
        start = resolve(midnight, zone) if self.at is None else _instant(config, self.at)
        events = self._events(configs, start)
        sims = [(_name(path, paths), self._run(c, start, events)) for path, c in zip(paths, configs, strict=True)]
        for name, sim in sims:
            _show(name, sim, console)
        if self.record is not None:
            write_trace(self.record, events, zone)
        if self.log is not None:
            write_log(self.log, sims)
        if self.picture is not None or self.html is not None:
            self._draw(sims, [path.read_text(encoding="utf-8") for path in paths])
        for path in (self.record, self.log, self.picture, self.html):
            if path is not None:
                console.print(Text(f"wrote {path}"))

    def _events(self, configs: Sequence[PoolConfig], start: Micros) -> list[Timed]:
        config = configs[0]
        if any(node_names(other) != node_names(config) for other in configs):
            raise ValueError("calendars are compared on the same nodes; the two pools differ in size.")
        events = node_failures(
            config,
            start=start,
            end=start + round(self.days * DAY),
            per_day=self.node_failures,
            repair=parse_duration(self.repair),
            seed=self.seed,
        )
        if self.trace is not None:
            events += read_trace(self.trace, zone_of(config.timezone))
        return sorted(events, key=lambda timed: timed.at)

    def _run(self, config: PoolConfig, start: Micros, events: Sequence[Timed]) -> Simulation:
        physics = Physics(
            seed=self.seed, slow_checkpoints=self.slow_checkpoints, failed_checkpoints=self.failed_checkpoints
        )
        overrides, _ = _remembered(config, now=start)
        return simulate(config, start=start, days=self.days, physics=physics, events=events, overrides=overrides)

    def _draw(self, sims: Sequence[tuple[str, Simulation]], sources: Sequence[str]) -> None:
        from vla_rlaif.pool.charts import save, simulation_strip
        from vla_rlaif.pool.page import write_page

        if self.picture is not None:
            save([simulation_strip(sim, title=name) for name, sim in sims], self.picture)
        if self.html is not None:
            write_page(self.html, sims, sources=sources)


@dataclass(frozen=True)
class OverrideVerb:
    """Set shares or GPUs by hand for a while, cancel that, or list what is set. Every override ends by itself."""

    config: ConfigFile
    use: str | None = None  # shares to use, e.g. line_stop
    set: tuple[str, ...] = ()  # GPUs of a role, e.g. serve=32
    last: Annotated[str | None, tyro.conf.arg(name="for")] = None  # how long, e.g. 2h
    at: str | None = None  # start; default: now
    note: str = ""  # why; shown wherever the override is
    cancel: int | None = None  # number of an override to end now

    def __call__(self, now: Micros, console: Console) -> None:
        config = load_pool(self.config, now=now)
        store, zone = PoolStore(config.state_dir / STORE), zone_of(config.timezone)
        if self.cancel is not None:
            override = store.cancel(self.cancel, now=now)
            console.print(
                Text(f"cancelled override {override.id}, which would have lasted until {say_time(override.end, zone)}")
            )
        elif self.use is not None or self.set:
            override = self._add(config, store, now)
            console.print(
                Text(f"override {override.id} holds until {say_time(override.end, zone)} and then ends by itself")
            )
        elif self.last is not None or self.at is not None or self.note:
            raise ValueError("an override needs --use SHARES or --set ROLE=GPUS.")
        rows = [
            (
                str(o.id),
                o.use or "",
                " ".join(f"{role}={n}" for role, n in o.targets.items()),
                say_time(o.start, zone),
                say_time(o.end, zone),
                o.note,
            )
            for o in store.overrides(now=now)
            if o.end > now
        ]
        columns = ("number", "shares", "GPUs", "from", "until", "note")
        tables.show(summary.Table(title="Overrides in force or to come", columns=columns, rows=tuple(rows)), console)

    def _add(self, config: PoolConfig, store: PoolStore, now: Micros) -> Override:
        if self.last is None:
            raise ValueError("an override always ends: say how long it lasts, e.g. --for 2h.")
        start = now if self.at is None else _instant(config, self.at)
        end, targets = start + parse_duration(self.last), dict(map(_target, self.set))
        check_override(config, now=now, start=start, end=end, use=self.use, targets=targets)
        timeline = around(config, now, overrides=store.overrides(now=now))
        windows = [self.use] if self.use else [i.window for i in timeline.between(start, end)]
        conflicts = minimum_conflicts(config, windows, targets)
        if conflicts:
            raise ValueError("; ".join(conflicts) + ".")
        return store.add(now=now, start=start, end=end, use=self.use, targets=targets, note=self.note)


VERBS = {"plan": PlanVerb, "simulate": SimulateVerb, "override": OverrideVerb, **LIVE_VERBS}


def main(argv: Sequence[str], *, now: Micros, console: Console | None = None) -> None:
    """Entry point of `vla-rlaif pool`. Raises ValueError for what the user can mend."""
    verb, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=PIPE_WIDTH)
    if verb in ("-h", "--help"):
        lines = [f"  {name:9} {kind.__doc__}" for name, kind in VERBS.items()]
        console.print(Text("\n".join(["usage: vla-rlaif pool VERB CONFIG.yaml [options]", "", *lines])))
        return
    if verb not in VERBS:
        raise ValueError(f"unknown pool verb {verb!r}; the verbs are {', '.join(VERBS)}.")
    tyro.cli(VERBS[verb], args=rest, prog=f"vla-rlaif pool {verb}")(now, console)


def write_log(path: Path, sims: Sequence[tuple[str, Simulation]]) -> None:
    """Every action of every simulation, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for name, sim in sims:
            zone = zone_of(sim.config.timezone)
            for at, action in sim.log:
                fields = {"at": to_local(at, zone).isoformat(), "pool": name, "action": type(action).__name__.lower()}
                file.write(json.dumps(fields | dataclasses.asdict(action)) + "\n")


def _show(name: str, sim: Simulation, console: Console) -> None:
    console.print(Text(name, style="bold"))
    for label, value in summary.headline(sim):
        console.print(Text(f"  {label}: {value}"))
    for table in (summary.role_table(sim), summary.state_table(sim), summary.window_table(sim)):
        tables.show(table, console)
    for line in summary.notes(sim):
        console.print(Text(f"- {line}"))


def _instant(config: PoolConfig, text: str) -> Micros:
    return resolve(parse_wall_time(text), zone_of(config.timezone))


def _target(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if not number.isdigit():
        raise ValueError(f"--set takes a role and its GPUs, such as serve=32, got {text!r}.")
    return role, int(number)


def _name(path: Path, paths: Sequence[Path]) -> str:
    """The file's name; with its folder where both have the same."""
    return path.stem if len({p.stem for p in paths}) == len(paths) else str(path.with_suffix(""))


def _remembered(config: PoolConfig, *, now: Micros) -> tuple[tuple[Override, ...], History]:
    """Overrides and measured durations, if the pool ever ran or somebody set something."""
    path = config.state_dir / STORE
    if not path.exists():
        return (), History()
    store = PoolStore(path)
    return store.overrides(now=now), Recorder(store.durations()).history()
