"""What a run measures: one JSON line a step in ``metrics.jsonl``, the same numbers in TensorBoard, and a progress bar.

Imports neither torch nor tensorflow: TensorBoard's event files are protobuf records that its own package can write.
"""

import io
import json
import logging
import math
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, SupportsFloat, SupportsIndex, runtime_checkable

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

FILE_NAME = "metrics.jsonl"
TORN_SUFFIX = ".torn"  # sidecar that keeps what a crash left behind the last whole line

logger = logging.getLogger(__name__)


@runtime_checkable
class MetricSink(Protocol):
    """Somewhere else that gets every step (metric_sinks.py). After a resume, steps come again."""

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """All of them finite."""
        ...

    def close(self) -> None: ...


class MetricsLog:
    """Appends the numbers of each step to a run directory. Steps only grow; after a resume, ``rewind`` first."""

    def __init__(self, run_dir: Path, *, sinks: Sequence[MetricSink] = ()) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE_NAME
        _cut_torn_line(self._path)
        lines = read_metrics(self._path) if self._path.exists() else []
        self._last_step: int | None = lines[-1]["step"] if lines else None
        self._file = self._path.open("a", encoding="ascii")
        self._events, self._sinks = _EventFile(run_dir / "tensorboard"), sinks

    @property
    def last_step(self) -> int | None:
        """The last step on record; None before the first."""
        return self._last_step

    def write(self, step: int, values: Mapping[str, SupportsFloat | None]) -> None:
        """Record one step. Numbers that are not finite become null in the file and gaps in TensorBoard."""
        if "step" in values:
            raise ValueError("got a value named 'step'; the step is the first argument, rename the value.")
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step {step} does not follow step {self._last_step}, the last one in {self._path}; "
                f"write each step once, and call rewind({step}) first when a resumed run repeats steps."
            )
        numbers = {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")
        self._file.flush()
        finite = {name: value for name, value in numbers.items() if value is not None}
        self._events.scalars(step, finite)
        for sink in self._sinks:
            sink.write(step, finite)
        self._last_step = step

    def rewind(self, step: int) -> None:
        """Forget ``step`` and all later ones: a run resumed from the checkpoint before it records them again."""
        lines = self._path.read_text(encoding="ascii").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] < step]
        self._file.close()
        if len(kept) < len(lines):
            _replace(self._path, "".join(kept))
        self._file = self._path.open("a", encoding="ascii")
        self._last_step = json.loads(kept[-1])["step"] if kept else None
        self._events.rewind(step)

    def close(self) -> None:
        self._file.close()
        self._events.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict]:
    """The lines of a ``metrics.jsonl``, oldest first. Each has an int ``step``; other values are numbers or None.

    A last line without its newline that does not parse is left out: a running or killed run may be in the middle of it.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a run directory with metrics was wanted. Has the run begun a step?")
    lines = path.read_bytes().split(b"\n")
    if not _is_whole(lines[-1]):
        lines.pop()
    return [_parse(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line]


def wilson(successes: SupportsIndex, n: SupportsIndex) -> tuple[float, float]:
    """95 % score interval of a success rate (Wilson 1927). Stays inside [0, 1] and is honest at 0 and n successes."""
    k, total = successes.__index__(), n.__index__()
    if not 0 <= k <= total or total == 0:
        raise ValueError(f"got {k} successes in {total} episodes; wanted at least 1 episode and 0 <= successes <= n.")
    return score_interval(k / total, total)


def score_interval(rate: float, n: int | float) -> tuple[float, float]:
    """The same of a rate of ``n`` independent trials; an effective number of dependent ones need not be whole."""
    z = statistics.NormalDist().inv_cdf(0.975)
    middle = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(rate * (1 - rate) / n + (z / (2 * n)) ** 2)
    return (0.0 if rate == 0 else middle - half), (1.0 if rate == 1 else middle + half)


def _plain(value: SupportsFloat | None) -> int | float | None:
    """A NumPy or device scalar as a JSON number; None where JSON has no number for it."""
    if value is None:
        return None
    if isinstance(value, int | np.integer):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _is_whole(line: bytes) -> bool:
    """A line cut by a crash cannot parse: it lacks the closing brace."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _parse(line: bytes, where: str) -> dict:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        values = json.loads(line, parse_constant=refuse)
    except ValueError as error:
        raise ValueError(
            f"{where} is not strict JSON ({error}); wanted one object a line. Repair or delete the line."
        ) from error
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        raise ValueError(f"{where} is not a step: wanted an object with an integer 'step', got {line[:80]!r}.")
    for name, value in values.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"{where}: wanted a number or null for '{name}', got {value!r}.")
    return values


def _cut_torn_line(path: Path) -> None:
    """Make the file end in a whole line, so that the next line does not run into half of another."""
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    torn = data[end:]
    if not torn:
        return
    if _is_whole(torn):  # only the newline is missing
        with path.open("ab") as file:
            file.write(b"\n")
        return
    sidecar = path.with_name(path.name + TORN_SUFFIX)
    with sidecar.open("ab") as file:  # on disk before the cut: nothing is lost if this is interrupted too
        file.write(torn + b"\n")
        os.fsync(file.fileno())
    os.truncate(path, end)
    logger.warning("%s ended in a torn line (%d bytes, from a crash); moved it to %s.", path, len(torn), sidecar)


def _replace(path: Path, text: str) -> None:
    """Rewrite a file so that a crash leaves the old text or the new one, never half of it."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


class _EventFile:
    """One TensorBoard event file. Synchronous, unlike TensorBoard's EventFileWriter, whose file layer would import
    tensorflow where that is installed."""

    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        number = len(list(log_dir.glob("events.out.tfevents.*")))  # TensorBoard reads the files in order of name
        self._writer = RecordWriter(io.BufferedWriter(io.FileIO(log_dir / f"{name}.{number}", "wb")))
        self._add(Event(file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, int | float]) -> None:
        event = Event(step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._add(event)

    def rewind(self, step: int) -> None:
        """Ask TensorBoard to drop what earlier files say about ``step`` and later."""
        self._add(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        self._writer.flush()
