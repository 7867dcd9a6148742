"""`vla-rlaif pool run | status | down`: what runs a live pool, and what people see of it.

`status` reads files only; `run` and `down` connect to Ray.
"""

import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.text import Text

from vla_rlaif.config import RunConfig, load_config
from vla_rlaif.pool import summary, tables
from vla_rlaif.pool.archive import Archive
from vla_rlaif.pool.checks import load_pool
from vla_rlaif.pool.clock import Micros, format_duration, resolve, say_time, zone_of
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.lease import FileLease
from vla_rlaif.pool.ledger import STATES
from vla_rlaif.pool.live_clock import LiveClock, read_clock, start_clock
from vla_rlaif.pool.state import Phase
from vla_rlaif.pool.store import PoolStore
from vla_rlaif.pool.times import parse_wall_time
from vla_rlaif.serve.settings import ServeSettings

ConfigFile = tyro.conf.Positional[Path]
LEASE, STORE, CLOCK = "lease.json", "pool.sqlite", "clock.json"  # in the pool's state_dir
OLD_S = 60.0  # real seconds after which a status says that nobody looks any more


@dataclass(frozen=True)
class RunVerb:
    """Run the pool on Ray until SIGTERM. What runs goes on without a scheduler; the next one takes over."""

    config: ConfigFile
    run: tyro.conf.Positional[Path]  # training run: it is trained, its groups are collected, its policy is served
    serve: ServeSettings = field(default_factory=lambda: ServeSettings(port=0))
    token_file: Path | None = None  # one token a line; robots send one of them
    address: str = "auto"  # of the Ray cluster
    poll_s: float = 1.0  # between looks while something changes
    idle_s: float = 5.0  # while nothing does
    lease_s: float = 15.0  # a scheduler that is not heard of for so long is replaced
    fake_gpus: bool = False  # rehearse without GPUs: Ray's are numbers, training sees the CPU as a device a replica
    speed: float = 1.0  # of a rehearsal: pool seconds in a second
    at: str | None = None  # start of a rehearsal, e.g. 2026-11-02T21:00

    def __call__(self, now: Micros, console: Console) -> None:
        config = load_pool(self.config, now=now)
        clock = self._clock(config, now)
        run = absolute(load_config(self.run))
        from vla_rlaif.pool.live import Pace, Scheduler
        from vla_rlaif.pool.ray_pool import RayPool, connected
        from vla_rlaif.pool.work import Work

        work = Work(
            run=run,
            state_dir=config.state_dir.absolute(),
            serve=self.serve,
            tokens=_tokens(self.token_file),
            fake_gpus=self.fake_gpus,
        )
        stop = threading.Event()
        pace = Pace(poll_s=self.poll_s, idle_s=self.idle_s, lease_s=self.lease_s)
        with connected(self.address):
            for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which sets its own
                signal.signal(number, lambda *_: stop.set())
            pool = RayPool(self.config.stem, work)
            Scheduler(self.config, pool, work, clock, pace, lambda text: console.print(Text(text))).run(stop.wait)

    def _clock(self, config: PoolConfig, now: Micros) -> LiveClock:
        """A rehearsal that was begun goes on, whatever the flags say."""
        path = config.state_dir / CLOCK
        if path.exists():
            return read_clock(path)
        if self.speed == 1 and self.at is None:
            return LiveClock()
        if self.speed <= 0:
            raise ValueError(f"speed is {self.speed:g}, wanted a positive number.")
        start = now if self.at is None else resolve(parse_wall_time(self.at), zone_of(config.timezone))
        return start_clock(path, pool=start, speed=self.speed)


@dataclass(frozen=True)
class StatusVerb:
    """The window in force, who has which GPUs, what is about to change and why, who schedules, what is set by hand."""

    config: ConfigFile
    history: bool = False  # also where the GPU-hours went so far
    picture: Path | None = None  # .svg or .png file to write: what every GPU did so far

    def __call__(self, now: Micros, console: Console) -> None:
        config = load_pool(self.config, now=now)
        path = config.state_dir / CLOCK
        clock = read_clock(path) if path.exists() else LiveClock()
        archive, now = Archive(config.state_dir), clock.now()
        status = archive.status()
        if status is None:
            raise ValueError(f"{config.state_dir} has no status: no scheduler has run. Start one: vla-rlaif pool run.")
        for line in _head(config, status, clock, now):
            console.print(Text(line))
        tables.show(role_table(config, status), console)
        tables.show(transition_table(status), console)
        for line in (*status["reasons"], *(f"violation: {text}" for text in status["violations"])):
            console.print(Text(f"- {line}"))
        for line in _overrides(config, now):
            console.print(Text(line))
        if self.history:
            sim = archive.history(config)
            for table in (summary.role_table(sim), summary.state_table(sim), summary.window_table(sim)):
                tables.show(table, console)
        if self.picture is not None:
            from vla_rlaif.pool.charts import save, simulation_strip

            save([simulation_strip(archive.history(config), title="what every GPU did")], self.picture)
            console.print(Text(f"wrote {self.picture}"))


@dataclass(frozen=True)
class DownVerb:
    """End every replica of the pool at once: no drain, no checkpoint. Stop its schedulers first."""

    config: ConfigFile
    address: str = "auto"  # of the Ray cluster

    def __call__(self, now: Micros, console: Console) -> None:
        config = load_pool(self.config, now=now)
        lease = FileLease(config.state_dir / LEASE).read()
        path = config.state_dir / CLOCK
        clock = read_clock(path) if path.exists() else LiveClock()
        if lease is not None and clock.now() < lease.expires:
            raise ValueError(f"{lease.holder} schedules this pool; stop it first (SIGTERM).")
        from vla_rlaif.pool.ray_pool import connected, tear_down

        with connected(self.address):
            tear_down(self.config.stem)


LIVE_VERBS = {"run": RunVerb, "status": StatusVerb, "down": DownVerb}


def absolute(run: RunConfig) -> RunConfig:
    """Replicas have other working directories."""
    stored = None if run.loop.stored is None else run.loop.stored.absolute()
    loop = run.loop.model_copy(update={"stored": stored})
    return run.model_copy(update={"out": run.run_dir.absolute(), "loop": loop})


def role_table(config: PoolConfig, status: Mapping[str, Any]) -> summary.Table:
    """GPUs by role and state."""
    counts: Counter[tuple[str, str]] = Counter()
    for replica in status["replicas"]:
        counts[replica["role"], STATES[Phase(replica["phase"])]] += len(replica["gpus"])
    states = [s for s in summary.STATE_ORDER if any(counts[role, s] for role in config.ranked)]
    rows = []
    for role in config.ranked:
        held = [counts[role, state] for state in states]
        rows.append((role, str(status["goals"].get(role, 0)), str(sum(held)), *(str(n or "") for n in held)))
    columns = ("role", "to hold", "holds", *states)
    return summary.Table(title="GPUs", columns=columns, rows=tuple(rows), numbers=frozenset(range(1, len(columns))))


def transition_table(status: Mapping[str, Any]) -> summary.Table:
    """Replicas that are coming or leaving, and those that are told something now."""
    rows = [
        (r["name"], r["phase"], format_duration(r["for"]), ", ".join(r["gpus"]), r["next"] or r["error"])
        for r in status["replicas"]
        if r["phase"] != Phase.ACTIVE or r["next"]
    ]
    return summary.Table(
        title="Transitions",
        columns=("replica", "phase", "for", "GPUs", "next"),
        rows=tuple(rows),
        numbers=frozenset({2}),
    )


def _tokens(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    from vla_rlaif.serve.verbs import read_tokens

    return read_tokens(path)


def _head(config: PoolConfig, status: Mapping[str, Any], clock: LiveClock, now: Micros) -> Iterator[str]:
    zone = zone_of(config.timezone)
    age = now - status["at"]
    yield f"{status['window']} by {status['source']}, until {say_time(status['until'], zone, with_zone=True)}"
    yield f"looked at {format_duration(age)} ago" + (
        "; nobody schedules any more" if clock.seconds(age) > OLD_S else f"; next at {say_time(status['next'], zone)}"
    )
    lease = FileLease(config.state_dir / LEASE).read()
    if lease is not None:
        state = "until" if now < lease.expires else "expired"
        yield f"lease: {lease.holder}, token {lease.token}, {state} {say_time(lease.expires, zone)}"
    yield f"committed weights: version {status['version']}"


def _overrides(config: PoolConfig, now: Micros) -> Iterator[str]:
    zone = zone_of(config.timezone)
    for o in PoolStore(config.state_dir / STORE).overrides(now=now):
        if o.end > now:
            what = " ".join([o.use or "", *(f"{role}={n}" for role, n in o.targets.items())]).strip()
            when = f"from {say_time(o.start, zone)} until {say_time(o.end, zone)}"
            yield f"override {o.id}: {what} {when} {o.note}".rstrip()
