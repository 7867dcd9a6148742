"""What outlives a scheduler: overrides that operators made, and how long steps took. Append-only SQLite.

Everything else is recomputed from the clock, the calendar and what runs.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from vla_rlaif.pool.calendar import PAST, Override
from vla_rlaif.pool.clock import DAY, Micros, format_duration
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.history import KEPT_SAMPLES, STEPS, Step
from vla_rlaif.schema import suggest

MAX_OVERRIDE = 7 * DAY  # what should last longer belongs into the calendar
APPLICATION_ID = 0x564C504C  # "VLPL": marks the file as ours
SCHEMA = """
CREATE TABLE IF NOT EXISTS override (
    id INTEGER PRIMARY KEY, made INTEGER NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL CHECK (end > start),
    use TEXT, targets TEXT NOT NULL, note TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS cancel (
    id INTEGER PRIMARY KEY, override INTEGER NOT NULL REFERENCES override(id), made INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS duration (
    id INTEGER PRIMARY KEY, role TEXT NOT NULL, step TEXT NOT NULL, micros INTEGER NOT NULL
) STRICT;
CREATE TRIGGER IF NOT EXISTS override_update BEFORE UPDATE ON override
BEGIN SELECT RAISE(ABORT, 'overrides are append-only'); END;
CREATE TRIGGER IF NOT EXISTS override_delete BEFORE DELETE ON override
BEGIN SELECT RAISE(ABORT, 'overrides are append-only'); END;
"""


class PoolStore:
    """The file of one pool. Opens it for each call, so operators and the scheduler may use it at the same time."""

    def __init__(self, path: Path, *, timeout_s: float = 10.0) -> None:
        self._path, self._timeout_s = path, timeout_s
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(self._connect()) as connection:
            connection.executescript(f"PRAGMA application_id = {APPLICATION_ID};{SCHEMA}")

    def add(
        self, *, now: Micros, start: Micros, end: Micros, use: str | None, targets: Mapping[str, int], note: str
    ) -> Override:
        """Record an override that `check_override` has let pass."""
        values = (now, start, end, use, json.dumps(dict(targets)), note)
        with closing(self._connect()) as connection, connection:
            sql = "INSERT INTO override (made, start, end, use, targets, note) VALUES (?, ?, ?, ?, ?, ?)"
            number = connection.execute(sql, values).lastrowid
        assert number is not None, "an insert has a row"
        return Override(id=number, start=start, end=end, use=use, targets=targets, note=note)

    def cancel(self, number: int, *, now: Micros) -> Override:
        """End an override early. Raises ValueError if there is none of that number in force or to come."""
        known = {o.id: o for o in self.overrides(now=now) if o.end > now}
        if number not in known:
            raise ValueError(f"no override {number} is in force or to come; there are {sorted(known) or 'none'}.")
        with closing(self._connect()) as connection, connection:
            connection.execute("INSERT INTO cancel (override, made) VALUES (?, ?)", (number, now))
        return known[number]

    def overrides(self, *, now: Micros) -> tuple[Override, ...]:
        """Those that a timeline around ``now`` needs, cancelled ones cut short."""
        with closing(self._connect()) as connection:
            rows = connection.execute(
                "SELECT id, start, end, use, targets, note FROM override WHERE end > ?", (now - PAST,)
            )
            found = {
                row[0]: Override(
                    id=row[0], start=row[1], end=row[2], use=row[3], targets=json.loads(row[4]), note=row[5]
                )
                for row in rows.fetchall()
            }
            for number, made in connection.execute("SELECT override, made FROM cancel ORDER BY id").fetchall():
                if number in found:
                    found[number] = replace(found[number], end=min(found[number].end, made))
        return tuple(o for o in found.values() if o.end > o.start)

    def add_durations(self, samples: Iterable[tuple[str, Step, Micros]]) -> None:
        """Remember how long steps took, for lead times after a restart."""
        with closing(self._connect()) as connection, connection:
            connection.executemany("INSERT INTO duration (role, step, micros) VALUES (?, ?, ?)", list(samples))

    def durations(self) -> list[tuple[str, Step, Micros]]:
        """The newest of every role and step, oldest first: what `history.Recorder` starts with."""
        sql = (
            "SELECT role, step, micros FROM (SELECT *, row_number() OVER (PARTITION BY role, step ORDER BY id DESC) "
            "AS age FROM duration) WHERE age <= ? ORDER BY id"
        )
        with closing(self._connect()) as connection:
            rows = connection.execute(sql, (KEPT_SAMPLES,)).fetchall()
        return [(role, step, micros) for role, step, micros in rows if step in STEPS]

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=self._timeout_s)
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        except sqlite3.DatabaseError as error:
            connection.close()
            raise ValueError(f"{self._path} is not a readable pool file ({error}): move it away.") from error
        if tables and application != APPLICATION_ID:
            connection.close()
            raise ValueError(f"{self._path} is an SQLite file of another program: choose another state_dir.")
        return connection


def check_override(
    config: PoolConfig, *, now: Micros, start: Micros, end: Micros, use: str | None, targets: Mapping[str, int]
) -> None:
    """Raises ValueError for what cannot be meant: unknown names, sizes that do not exist, no end, an end far away."""
    if use is None and not targets:
        raise ValueError("an override needs the name of shares (--use), or GPUs for a role (--set serve=32).")
    if use is not None and use not in config.shares:
        raise ValueError(f"no shares are called {use}{suggest(use, config.shares)}")
    if end <= max(start, now):
        raise ValueError("an override must end after it starts, and not in the past.")
    if end - max(start, now) > MAX_OVERRIDE:
        raise ValueError(
            f"an override lasts {format_duration(MAX_OVERRIDE)} at most, got {format_duration(end - max(start, now))}; "
            "put what should last longer into the calendar."
        )
    for name, num_gpus in targets.items():
        if name not in config.roles:
            raise ValueError(f"no role is called {name}{suggest(name, config.roles)}")
        if not 0 <= num_gpus <= config.pool.num_gpus or not config.roles[name].allows(num_gpus):
            raise ValueError(f"{name} cannot run on {num_gpus} of {config.pool.num_gpus} GPUs.")


def minimum_conflicts(config: PoolConfig, windows: Sequence[str], targets: Mapping[str, int]) -> list[str]:
    """Targets below a minimum of the windows they would hold in: the minimum wins."""
    return [
        f"{role}={num_gpus} is below its min of {config.share(window, role).min} in {window}, which stays"
        for window in dict.fromkeys(windows)
        for role, num_gpus in targets.items()
        if num_gpus < config.share(window, role).min
    ]
