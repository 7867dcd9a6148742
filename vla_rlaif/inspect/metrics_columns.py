"""The metrics of a run as columns, followed while it writes them."""

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from vla_rlaif.metrics import FILE_NAME


@dataclass(frozen=True, kw_only=True)
class MetricsPart:
    """Some consecutive lines. ``epoch`` changes when the run has gone back or was started anew: then what was read
    before counts no more."""

    epoch: int
    first: int  # number of the first line here
    num: int  # lines in all
    columns: dict[str, list[int | float | None]]  # "step" among them; None where a line has no such number


class MetricsColumns:
    """Of one run directory; may be used from any thread. Only news are read."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._lock = run_dir / FILE_NAME, threading.Lock()
        self._inode, self._read, self._epoch, self._num = 0, 0, 0, 0
        self._columns: dict[str, list[int | float | None]] = {}
        self.problems: list[str] = []

    def part(self, epoch: int = -1, first: int = 0) -> MetricsPart:
        """From line ``first`` on, if nothing has changed since ``epoch``; else everything."""
        with self._lock:
            self._follow()
            begin = first if epoch == self._epoch else 0
            columns = {name: values[begin:] for name, values in self._columns.items()}
            return MetricsPart(epoch=self._epoch, first=begin, num=self._num, columns=columns)

    def last(self, name: str) -> float | None:
        """The newest value that is a number."""
        with self._lock:
            self._follow()
            values = self._columns.get(name, [])
            return next((value for value in reversed(values) if value is not None), None)

    @property
    def num(self) -> int:
        with self._lock:
            self._follow()
            return self._num

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def written(self) -> float | None:
        """When the last line came, seconds since 1970; None before the first."""
        return self._path.stat().st_mtime if self._path.exists() and self._num else None

    def _follow(self) -> None:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_ino, found.st_size) == (self._inode, self._read):
                    return
                if found.st_ino != self._inode or found.st_size < self._read:
                    self._begin(found.st_ino)
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            if self._inode:
                self._begin(0)
            return
        whole = data[: data.rfind(b"\n") + 1]  # the run may be in the middle of a line
        for line in whole.splitlines():
            self._add(line)
        self._read += len(whole)

    def _begin(self, inode: int) -> None:
        self._inode, self._read, self._num, self._columns, self.problems = inode, 0, 0, {}, []
        self._epoch += 1

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("step"), int):
            self.problems.append(f"{self._path} has a line that is no step: {line[:60]!r}")
            return
        for name, value in values.items():
            column = self._columns.setdefault(name, [None] * self._num)
            column.append(value if isinstance(value, int | float) else None)
        self._num += 1
        for column in self._columns.values():
            if len(column) < self._num:
                column.append(None)
