"""Preference records on disk: an append-only SQLite file that one run writes and anybody may read.

Nothing is ever changed or removed; triggers in the file itself refuse it, whoever connects. A wrong label is corrected
by a later record that names it, and a run that resumes from a checkpoint says from which record it goes on.
"""

import errno
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

APPLICATION_ID = 0x564C4150  # "VLAP": marks the file as ours
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE preference (
    id INTEGER PRIMARY KEY, first TEXT NOT NULL, second TEXT NOT NULL, start INTEGER NOT NULL,
    stop INTEGER NOT NULL, instruction TEXT NOT NULL, p_first REAL, tie INTEGER NOT NULL, skip INTEGER NOT NULL,
    labeller TEXT NOT NULL, answer_first_second REAL, answer_second_first REAL, step INTEGER NOT NULL,
    held_out INTEGER NOT NULL, time REAL NOT NULL, corrects INTEGER REFERENCES preference(id)
) STRICT;
CREATE TABLE rewind (id INTEGER PRIMARY KEY, after INTEGER NOT NULL) STRICT;
"""
TRIGGERS = """
CREATE TRIGGER {table}_{event} BEFORE {event} ON {table} {when}
BEGIN SELECT RAISE(ABORT, '{table} records are append-only: add a correcting record instead'); END;
"""
COLUMNS = (
    "first, second, start, stop, instruction, p_first, tie, skip, labeller, answer_first_second, answer_second_first, "
    "step, held_out, time, corrects"
)
INSERT = f"INSERT INTO preference (id, {COLUMNS}) VALUES (?{', ?' * len(COLUMNS.split(','))})"
LAST_ID = "SELECT max((SELECT coalesce(max(id), 0) FROM preference), (SELECT coalesce(max(id), 0) FROM rewind))"


@dataclass(frozen=True, kw_only=True)
class Preference:
    """One comparison and where it comes from."""

    first: str  # episode id
    second: str  # episode id
    segment: tuple[int, int]  # decisions [start, stop) that were compared
    instruction: str
    p_first: float | None  # probability that the first is better; 0.5 is a tie, None a skip or unscorable
    labeller: str  # name with version and settings
    step: int  # of the run
    held_out: bool  # never trained on
    time: float  # seconds since 1970
    both_orders: tuple[float, float] | None = None  # raw P(first shown wins) as (first, second) and (second, first)
    corrects: int | None = None  # id of the record that this one replaces
    id: int | None = None  # given by the store

    def __post_init__(self) -> None:
        if self.first == self.second:
            raise ValueError(f"A preference compares two episodes, got {self.first!r} twice.")
        if self.p_first is not None and not 0 <= self.p_first <= 1:
            raise ValueError(f"p_first is a probability in [0, 1], or None for a skip; got {self.p_first}.")
        if not 0 <= self.segment[0] < self.segment[1]:
            raise ValueError(f"A segment is (start, stop) with 0 <= start < stop in decisions, got {self.segment}.")

    @property
    def is_tie(self) -> bool:
        return self.p_first == 0.5

    @property
    def is_skip(self) -> bool:
        return self.p_first is None


class PreferenceStore:
    """The records of one run. Open it in the thread that uses it; readers may open the same file at any time."""

    def __init__(self, path: Path | str, *, timeout_s: float = 10.0) -> None:
        self._path = Path(path)
        self._timeout_s = timeout_s
        if not self._path.parent.is_dir():
            raise ValueError(f"Cannot keep preferences in {self._path}: the folder {self._path.parent} does not exist.")
        self._connection = sqlite3.connect(self._path, timeout=timeout_s, autocommit=True)
        try:
            self._open()
        except BaseException:
            self._connection.close()
            raise

    def append(self, records: Sequence[Preference]) -> tuple[int, ...]:
        """Add records in one transaction, all or none; returns their ids."""
        rows = [
            (
                *(r.first, r.second, *r.segment, r.instruction, r.p_first, r.is_tie, r.is_skip, r.labeller),
                *(r.both_orders or (None, None)),
                *(r.step, r.held_out, r.time, r.corrects),
            )
            for r in records
        ]
        known = self.last_id
        missing = [r.corrects for r in records if r.corrects is not None and not 0 < r.corrects <= known]
        if missing:
            raise ValueError(f"A correction names record {missing[0]}, but {self._path} holds records 1 to {known}.")
        with _Transaction(self):
            ids = tuple(range(self.last_id + 1, self.last_id + 1 + len(rows)))
            for number, row in zip(ids, rows, strict=True):
                self._execute(INSERT, (number, *row))
        return ids

    def records(self, *, until_id: int | None = None, history: bool = False) -> tuple[Preference, ...]:
        """The records in force, oldest first; with ``until_id``, those in force when that was the last record.

        ``history`` gives everything ever appended, corrected and abandoned records too.
        """
        until = self.last_id if until_id is None else until_id
        rows = self._execute(f"SELECT id, {COLUMNS} FROM preference WHERE id <= ? ORDER BY id", (until,))
        everything = [(int(row[0]), _record(row)) for row in rows]
        if history:
            return tuple(record for _, record in everything)
        lived = self._lived(until)
        alive: dict[int, Preference] = {}
        latest: dict[int, int] = {}  # of several corrections of a record, the last one wins
        for number, record in everything:
            if record.corrects is None:
                if any(after < number <= last for after, last in lived):
                    alive[number] = record
            elif record.corrects in alive:
                alive[number], latest[record.corrects] = record, number
        return tuple(
            r
            for number, r in alive.items()
            if number not in latest and (r.corrects is None or latest[r.corrects] == number)
        )

    @property
    def count(self) -> int:
        """Records in force."""
        return len(self.records())

    @property
    def last_id(self) -> int:
        """Of the newest record or rewind, which share one count; 0 for an empty store. Checkpoints keep it."""
        return int(self._execute(LAST_ID)[0][0])

    def rewind(self, after_id: int) -> None:
        """Go on from ``after_id``: records after it stay in the file, but are no longer in force.

        A correction lives and dies with the record that it corrects, whenever it was made.
        """
        last = self.last_id
        if after_id > last:
            raise ValueError(
                f"The checkpoint was written after record {after_id}, but {self._path} ends at record {last}: it is "
                "not the store of that run, or it was replaced."
            )
        if after_id < last:
            with _Transaction(self):
                self._execute("INSERT INTO rewind (id, after) VALUES (?, ?)", (last + 1, after_id))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "PreferenceStore":  # Self, which jaxtyping cannot check in a method
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self) -> None:
        self._execute("PRAGMA foreign_keys = ON")
        self._execute("PRAGMA synchronous = FULL")  # a label can cost a person's time: survive a power cut
        if not self._execute("SELECT 1 FROM sqlite_master LIMIT 1"):
            self._create()
        application = self._execute("PRAGMA application_id")[0][0]
        if application != APPLICATION_ID:
            raise ValueError(f"{self._path} is an SQLite file of another program: give the preferences another path.")
        version = self._execute("PRAGMA user_version")[0][0]
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{self._path} has preference schema {version}, this version of vla_rlaif reads {SCHEMA_VERSION}: "
                "use the version that wrote it, or a new file."
            )

    def _create(self) -> None:
        self._execute("PRAGMA journal_mode = WAL")
        with _Transaction(self):
            if self._execute("SELECT 1 FROM sqlite_master LIMIT 1"):
                return  # another process was faster
            for statement in SCHEMA.strip().split(";\n"):
                self._execute(statement)
            for table in ("preference", "rewind"):
                self._execute(TRIGGERS.format(table=table, event="UPDATE", when=""))
                self._execute(TRIGGERS.format(table=table, event="DELETE", when=""))
                exists = f"WHEN EXISTS (SELECT 1 FROM {table} WHERE id = NEW.id)"  # INSERT OR REPLACE fires no DELETE
                self._execute(TRIGGERS.format(table=table, event="INSERT", when=exists))
            self._execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _lived(self, until: int) -> list[tuple[int, int]]:
        """Ranges (after, last] of ids in force. A rewind that a later one went back behind never happened."""
        ranges, end = [], until
        for number, after in self._execute("SELECT id, after FROM rewind ORDER BY id DESC"):
            if number <= end:
                ranges.append((number, end))
                end = after
        return [*ranges, (0, end)]

    def _execute(self, sql: str, values: Sequence[object] = ()) -> list[tuple]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ValueError(
                    f"{self._path} is locked: another process has been writing it for {self._timeout_s} s. One run "
                    "owns a store; stop the other one or choose another path."
                ) from error
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path)) from error
            raise
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise ValueError(
                    f"{self._path} is not a readable preference store ({error}): restore it from a copy, or move it "
                    "away to start a new one."
                ) from error
            raise


class _Transaction:
    """One write transaction, rolled back if anything inside fails."""

    def __init__(self, store: PreferenceStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store._execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._store._execute("COMMIT" if kind is None else "ROLLBACK")


def _record(row: tuple) -> Preference:
    number, first, second, start, stop, text, p, _, _, labeller, order_ab, order_ba, step, held_out, when, corrects = (
        row
    )
    return Preference(
        id=number,
        first=first,
        second=second,
        segment=(start, stop),
        instruction=text,
        p_first=p,
        labeller=labeller,
        both_orders=None if order_ab is None else (order_ab, order_ba),
        step=step,
        held_out=bool(held_out),
        time=when,
        corrects=corrects,
    )
