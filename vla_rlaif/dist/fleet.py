"""Which workers of a role live, and which of them hold the committed weights. Pure: the clock is passed in.

    HEALTHY <-> SUSPECT -> DEAD -> STALE (a new incarnation) -> HEALTHY (once it holds the committed version)

There is no way from DEAD to HEALTHY, and none back from DEAD for the incarnation that died.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Health(StrEnum):
    HEALTHY = "healthy"  # answers, and holds the committed weights
    STALE = "stale"  # answers, and holds other weights: it must not play
    SUSPECT = "suspect"  # has been silent for long
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class Member:
    """What is known of one worker."""

    name: str
    incarnation: int = 0
    version: int  # of the weights that it holds; -1: those it was built with, which nobody counts on
    heard: float  # seconds of the fleet's clock
    is_suspect: bool = False
    is_dead: bool = False


class Fleet:
    """The workers of one role. Safe to call from any thread.

    ``membership_epoch`` rises with every death and every return, so that two different sets of live workers never share
    a number; what is built for one set (a process group) is named by it.
    """

    def __init__(
        self, names: Iterable[str], *, clock: Callable[[], float], suspect_s: float, dead_s: float, version: int = 0
    ) -> None:
        """All are HEALTHY and hold ``version``. Silence of ``suspect_s`` seconds makes SUSPECT, of ``dead_s`` DEAD."""
        if not 0 < suspect_s < dead_s:
            raise ValueError(f"suspect after {suspect_s:g} s, dead after {dead_s:g} s: the first must be the shorter.")
        self._clock, self._suspect_s, self.dead_s = clock, suspect_s, dead_s
        self._lock = threading.RLock()
        self._committed = version
        self._epoch = 0
        self._members = {name: Member(name=name, version=version, heard=clock()) for name in names}

    @property
    def membership_epoch(self) -> int:
        return self._epoch

    @property
    def committed(self) -> int:
        """The version that whoever plays must hold."""
        return self._committed

    def members(self) -> dict[str, Member]:
        with self._lock:
            return dict(self._members)

    def health(self, name: str) -> Health:
        with self._lock:
            member = self._members[name]
            if member.is_dead:
                return Health.DEAD
            if member.is_suspect:
                return Health.SUSPECT
            return Health.HEALTHY if member.version == self._committed else Health.STALE

    def having(self, *states: Health) -> tuple[str, ...]:
        """Names in one of ``states``, in the order in which they were given to the fleet."""
        with self._lock:
            return tuple(name for name in self._members if self.health(name) in states)

    @property
    def living(self) -> tuple[str, ...]:
        return self.having(Health.HEALTHY, Health.STALE, Health.SUSPECT)

    def heard(self, name: str, incarnation: int) -> None:
        """A sign of life. One of an incarnation that is dead or was replaced is not counted."""
        with self._lock:
            if self._is_alive(name, incarnation):
                self._set(name, heard=self._clock(), is_suspect=False)

    def look(self) -> tuple[str, ...]:
        """Judge the silent ones; the names of those that are DEAD by this look."""
        with self._lock:
            died = []
            for name, member in list(self._members.items()):
                silent = self._clock() - member.heard
                if member.is_dead:
                    continue
                if silent >= self.dead_s:
                    self.lost(name, member.incarnation)
                    died.append(name)
                elif silent >= self._suspect_s:
                    self._set(name, is_suspect=True)
            return tuple(died)

    def lost(self, name: str, incarnation: int) -> None:
        """It died. A second notice, or one of an earlier incarnation, changes nothing."""
        with self._lock:
            if self._is_alive(name, incarnation):
                self._set(name, is_dead=True)
                self._epoch += 1

    def restarted(self, name: str) -> int:
        """A dead worker is back, with weights that nobody counts on: STALE. Its new incarnation."""
        with self._lock:
            member = self._members[name]
            assert member.is_dead, f"{name} is {self.health(name)}; only the dead come back"
            self._set(
                name,
                incarnation=member.incarnation + 1,
                version=-1,
                heard=self._clock(),
                is_suspect=False,
                is_dead=False,
            )
            self._epoch += 1
            return member.incarnation + 1

    def commit(self, version: int) -> None:
        """From now on this version counts; whoever does not hold it is STALE until ``holds`` says so."""
        with self._lock:
            assert version >= self._committed, f"version {version} after {self._committed}"
            self._committed = version

    def holds(self, name: str, incarnation: int, version: int) -> None:
        """It said that it holds ``version``, which is a sign of life too."""
        with self._lock:
            if self._is_alive(name, incarnation):
                self._set(name, version=version, heard=self._clock(), is_suspect=False)

    def stale(self, name: str, incarnation: int) -> None:
        """It does not hold what counts, though that may have the number of what it holds (the newest weights and their
        average share one). No sign of life."""
        with self._lock:
            if self._is_alive(name, incarnation):
                self._set(name, version=-1)

    def _is_alive(self, name: str, incarnation: int) -> bool:
        member = self._members[name]
        return not member.is_dead and member.incarnation == incarnation

    def _set(self, name: str, **changes: int | float | bool) -> None:
        self._members[name] = replace(self._members[name], **changes)  # pyright: ignore[reportArgumentType]
