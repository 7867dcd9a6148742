"""The clock of a live pool. A rehearsal runs on a faster one, with the same code.

The wall clock decides, the monotonic one measures and times out.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_rlaif.pool.clock import SECOND, Micros


@dataclass(frozen=True, kw_only=True)
class LiveClock:
    """At ``real`` seconds since 1970 the pool's clock shows ``pool``, and goes ``speed`` times as fast."""

    real: float = 0.0
    pool: Micros = 0
    speed: float = 1.0

    def now(self) -> Micros:
        return self.pool + self.micros(time.time() - self.real)

    def monotonic(self) -> Micros:
        """Of this process; its zero means nothing."""
        return self.micros(time.monotonic())

    def micros(self, seconds: float) -> Micros:
        """What passes in the pool in so many real seconds."""
        return round(seconds * self.speed * SECOND)

    def seconds(self, duration: Micros) -> float:
        """Real seconds in which so much passes in the pool."""
        return duration / SECOND / self.speed


def start_clock(path: Path, *, pool: Micros, speed: float) -> LiveClock:
    """A clock that shows ``pool`` now; written to ``path``, so that later schedulers go on with it."""
    clock = LiveClock(real=time.time(), pool=pool, speed=speed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(clock)))
    return clock


def read_clock(path: Path) -> LiveClock:
    """Raises ValueError for a file that is no clock."""
    try:
        data = json.loads(path.read_text())
        clock = LiveClock(real=float(data["real"]), pool=int(data["pool"]), speed=float(data["speed"]))
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no clock of a rehearsal ({error!r}).") from None
    if clock.speed <= 0:
        raise ValueError(f"{path}: speed is {clock.speed:g}, wanted a positive number.")
    return clock
