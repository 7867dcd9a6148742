"""How far a run is: a bar with the time left on a terminal, one plain line a step in a log file."""

import datetime
import sys
import time
from collections.abc import Callable
from typing import IO

import rich.console
import rich.progress


class Progress:
    """Shows the steps of a run. ``update(step, text)`` means that ``step`` of ``total`` steps are done.

    A resumed run passes ``start``, the steps done before: the time left is estimated from the steps of this session.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= start <= total:
            raise ValueError(f"got start {start} of {total} steps; wanted 0 <= start <= total.")
        self._total, self._start, self._clock = total, start, clock
        self._stream = sys.stdout if stream is None else stream
        self._began = clock()
        self._bar: rich.progress.Progress | None = None
        if self._stream.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=24),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[left]}", markup=False),
                rich.progress.TextColumn("{task.fields[text]}", markup=False),
                console=rich.console.Console(file=self._stream),
            )
            self._task = self._bar.add_task("", total=total, completed=start, left="", text="")
            self._bar.start()

    def update(self, step: int, text: str) -> None:
        """Show that ``step`` steps are done, and ``text`` about the last of them."""
        elapsed, done = self._clock() - self._began, step - self._start
        left = elapsed * (self._total - step) / done if done > 0 else None
        if self._bar is not None:
            self._bar.update(self._task, completed=step, left=f"{_clock_time(left)} left", text=text)
        else:
            times = f"{_clock_time(elapsed)} elapsed, {_clock_time(left)} left"
            print(f"step {step}/{self._total} | {times} | {text}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _clock_time(seconds: float | None) -> str:
    """h:mm:ss, or dashes while unknown."""
    return "-:--:--" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))
