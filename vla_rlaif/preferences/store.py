"""Preference records on disk: an append-only SQLite file that one run writes and anybody may read.

Nothing is ever changed or removed; triggers in the file itself refuse it, whoever connects. A wrong label is corrected
by a later record that names it, and a run that resumes from a checkpoint says from which record it goes on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from vla_rlaif.preferences.in_force import InForce
from vla_rlaif.preferences.sqlite import Database, Kind, append_only

TABLES = (
    """CREATE TABLE preference (
    id INTEGER PRIMARY KEY, first TEXT NOT NULL, second TEXT NOT NULL, start INTEGER NOT NULL,
    stop INTEGER NOT NULL, instruction TEXT NOT NULL, p_first REAL, tie INTEGER NOT NULL, skip INTEGER NOT NULL,
    labeller TEXT NOT NULL, answer_first_second REAL, answer_second_first REAL, step INTEGER NOT NULL,
    held_out INTEGER NOT NULL, time REAL NOT NULL, corrects INTEGER REFERENCES preference(id)
) STRICT""",
    "CREATE TABLE rewind (id INTEGER PRIMARY KEY, after INTEGER NOT NULL) STRICT",
)
KIND = Kind(
    name="preference store",
    application_id=0x564C4150,  # "VLAP"
    version=1,
    statements=(*TABLES, *append_only("preference"), *append_only("rewind")),
    remedy="restore it from a copy, or move it away to start a new one.",
    durable=True,  # a label can cost a person's time
)
COLUMNS = (
    "first, second, start, stop, instruction, p_first, tie, skip, labeller, answer_first_second, answer_second_first, "
    "step, held_out, time, corrects"
)
INSERT = f"INSERT INTO preference (id, {COLUMNS}) VALUES (?{', ?' * len(COLUMNS.split(','))})"
SELECT = f"SELECT id, {COLUMNS} FROM preference"
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

    @property
    def is_inconsistent(self) -> bool:
        """The labeller was asked in both orders and preferred the clip in the same place both times."""
        return self.both_orders is not None and (self.both_orders[0] - 0.5) * (self.both_orders[1] - 0.5) > 0


class PreferenceStore:
    """The records of one run, for one thread at a time. Readers may open the same file at any time."""

    def __init__(self, path: Path | str, *, timeout_s: float = 10.0) -> None:
        self._database = Database(Path(path), KIND, timeout_s=timeout_s)
        self._in_force = InForce()

    def append(self, records: Sequence[Preference]) -> tuple[int, ...]:
        """Add records in one transaction, all or none; returns their ids."""
        rows = [_row(record) for record in records]
        known = self.last_id
        missing = [r.corrects for r in records if r.corrects is not None and not 0 < r.corrects <= known]
        if missing:
            raise ValueError(
                f"A correction names record {missing[0]}, but {self._database.path} holds records 1 to {known}."
            )
        with self._database.transaction():
            ids = tuple(range(self.last_id + 1, self.last_id + 1 + len(rows)))
            for number, row in zip(ids, rows, strict=True):
                self._database.execute(INSERT, (number, *row))
        return ids

    def records(self, *, until_id: int | None = None, history: bool = False) -> tuple[Preference, ...]:
        """The records in force, oldest first; with ``until_id``, those in force when that was the last record.

        ``history`` gives everything ever appended, corrected and abandoned records too.
        """
        with self._reading() as in_force:
            until = in_force.last if until_id is None else until_id
            rows = self._database.execute(f"{SELECT} WHERE id <= ? ORDER BY id", (until,))
        records = {int(row[0]): _record(row) for row in rows}
        if history:
            return tuple(records.values())
        stands_for = in_force.corrected(until)
        found: list[int] = []
        for after, end in in_force.lived(until):
            found += [number for number in range(after + 1, end + 1) if number in records]
        alive = {stands_for.get(number, number) for number in found if number not in in_force.root}
        return tuple(records[number] for number in sorted(alive))

    def sample(self, num: int, seed: int) -> tuple[Preference, ...]:
        """``num`` different records in force (all if there are fewer), each equally likely; the rest is not read."""
        with self._reading() as in_force:
            ids = in_force.draw(num, np.random.default_rng(seed)).tolist()
            return tuple(_record(self._database.execute(f"{SELECT} WHERE id = ?", (i,))[0]) for i in ids)

    @property
    def count(self) -> int:
        """Records in force."""
        with self._reading() as in_force:
            return in_force.count(in_force.last)

    @property
    def last_id(self) -> int:
        """Of the newest record or rewind, which share one count; 0 for an empty store. Checkpoints keep it."""
        return int(self._database.execute(LAST_ID)[0][0])

    def rewind(self, after_id: int) -> None:
        """Go on from ``after_id``: records after it stay in the file, but are no longer in force.

        A correction lives and dies with the record that it corrects, whenever it was made.
        """
        last = self.last_id
        if after_id > last:
            raise ValueError(
                f"The checkpoint was written after record {after_id}, but {self._database.path} ends at record {last}: "
                "it is not the store of that run, or it was replaced."
            )
        if after_id < last:
            with self._database.transaction():
                self._database.execute("INSERT INTO rewind (id, after) VALUES (?, ?)", (last + 1, after_id))

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> "PreferenceStore":  # Self, which jaxtyping cannot check in a method
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[InForce]:
        """One state of the file, though others write it, and what is in force in it. Only news are read."""
        self._database.execute("BEGIN")
        try:
            known, last = self._in_force.last, self.last_id
            if last > known:
                news = " WHERE id > ? ORDER BY id"
                rewinds = self._database.execute(f"SELECT id, after FROM rewind{news}", (known,))
                corrections = self._database.execute(
                    f"SELECT id, corrects FROM (SELECT id, corrects FROM preference{news}) WHERE corrects IS NOT NULL",
                    (known,),
                )
                self._in_force.add(last, rewinds, corrections)
            yield self._in_force
        finally:
            self._database.execute("COMMIT")


def _row(r: Preference) -> tuple:
    """The columns of a record behind its id."""
    return (
        *(r.first, r.second, *r.segment, r.instruction, r.p_first, r.is_tie, r.is_skip, r.labeller),
        *(r.both_orders or (None, None)),
        *(r.step, r.held_out, r.time, r.corrects),
    )


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
