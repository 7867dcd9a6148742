"""An SQLite file of ours: opened, created once, and every error said in terms of the file. Knows no tables."""

import errno
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

TRIGGER = """
CREATE TRIGGER {table}_{event} BEFORE {event} ON {table} {when}
BEGIN SELECT RAISE(ABORT, '{table} records are append-only: add a correcting record instead'); END;
"""


def append_only(table: str) -> tuple[str, ...]:
    """Statements by which a file refuses every change to the rows of ``table``, whoever connects."""
    exists = f"WHEN EXISTS (SELECT 1 FROM {table} WHERE id = NEW.id)"  # INSERT OR REPLACE fires no DELETE
    events = {"UPDATE": "", "DELETE": "", "INSERT": exists}
    return tuple(TRIGGER.format(table=table, event=event, when=when) for event, when in events.items())


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a file is and how it is made."""

    name: str  # for messages: "preference store"
    application_id: int  # marks the file as ours
    version: int  # of the schema
    statements: tuple[str, ...]  # that make it
    remedy: str  # what to do about a damaged one
    durable: bool  # survives a power cut, at the cost of a flush with every transaction


class Database:
    """For one thread at a time, any of them; others may open the same file at any time.

    Raises:
        ValueError: the file is locked, damaged, of another program or of another version.
    """

    def __init__(self, path: Path, kind: Kind, *, timeout_s: float) -> None:
        self.path, self._kind, self._timeout_s = path, kind, timeout_s
        if not path.parent.is_dir():
            raise ValueError(f"Cannot keep a {kind.name} in {path}: the folder {path.parent} does not exist.")
        self._connection = sqlite3.connect(path, timeout=timeout_s, autocommit=True, check_same_thread=False)
        try:
            self._open()
        except BaseException:
            self._connection.close()
            raise

    def execute(self, sql: str, values: Sequence[object] = ()) -> list[tuple]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ValueError(
                    f"{self.path} is locked: another process has been writing it for {self._timeout_s} s. Stop the "
                    "other one or choose another path."
                ) from error
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
            raise
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise ValueError(
                    f"{self.path} is not a readable {self._kind.name} ({error}): {self._kind.remedy}"
                ) from error
            raise

    def transaction(self) -> "Transaction":
        return Transaction(self)

    def close(self) -> None:
        self._connection.close()

    def _open(self) -> None:
        self.execute("PRAGMA foreign_keys = ON")
        self.execute(f"PRAGMA synchronous = {'FULL' if self._kind.durable else 'NORMAL'}")
        if not self.execute("SELECT 1 FROM sqlite_master LIMIT 1"):
            self._create()
        if self.execute("PRAGMA application_id")[0][0] != self._kind.application_id:
            raise ValueError(
                f"{self.path} is an SQLite file of another program: give the {self._kind.name} another path."
            )
        version = self.execute("PRAGMA user_version")[0][0]
        if version != self._kind.version:
            raise ValueError(
                f"{self.path} has {self._kind.name} schema {version}, this version of vla_rlaif reads "
                f"{self._kind.version}: use the version that wrote it, or a new file."
            )

    def _create(self) -> None:
        self.execute("PRAGMA journal_mode = WAL")
        with self.transaction():
            if self.execute("SELECT 1 FROM sqlite_master LIMIT 1"):
                return  # another process was faster
            for statement in self._kind.statements:
                self.execute(statement)
            self.execute(f"PRAGMA application_id = {self._kind.application_id}")
            self.execute(f"PRAGMA user_version = {self._kind.version}")


class Transaction:
    """One write transaction, rolled back if anything inside fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")
