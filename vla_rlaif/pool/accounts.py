"""What plans tell the ledger: how late roles were at boundaries, and when minimums were not held."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from vla_rlaif.pool.actions import Plan
from vla_rlaif.pool.calendar import Interval
from vla_rlaif.pool.clock import Micros
from vla_rlaif.pool.ledger import Lateness, Ledger


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A stretch in which plans reported a violation for a role."""

    role: str
    start: Micros
    end: Micros
    minimum: int
    active: int  # the fewest
    reason: str


class Accounts:
    """Follows the plans of one scheduler. The live loop and the simulator keep the same."""

    def __init__(self, ledger: Ledger, breaches: list[Breach]) -> None:
        self._ledger, self._breaches = ledger, breaches
        self._window: Interval | None = None  # that began, and had no plan yet
        self._late: dict[str, tuple[Interval, int]] = {}  # role -> window, GPUs it waits for
        self._goals: Mapping[str, int] = {}
        self._open: dict[tuple[str, int], Breach] = {}

    def begin(self, planned: Plan) -> None:
        """Before the first window boundary: what was held so far is not late."""
        self._goals = planned.goals

    def open_window(self, window: Interval, now: Micros) -> None:
        """A boundary passed: whoever still waits for the last window's share never got it."""
        self._end_waiting(now)
        self._window = window

    def note(self, planned: Plan, now: Micros, active: Callable[[str], int]) -> None:
        """A plan was made and its actions were applied."""
        if self._window is not None:
            grown = [role for role, goal in planned.goals.items() if goal > self._goals.get(role, 0)]
            self._late |= {role: (self._window, planned.goals[role]) for role in grown}
            self._window = None
        self._goals = planned.goals
        for role, (window, goal) in list(self._late.items()):
            goal = min(goal, planned.goals.get(role, 0))  # a node may have died since
            self._late[role] = (window, goal)
            if active(role) >= goal:
                self._arrive(role, now, arrived=True)
        found = {(v.role, v.minimum): v for v in planned.violations}
        for key in set(self._open) - set(found):
            self._breaches.append(replace(self._open.pop(key), end=now))
        for key, v in found.items():
            start, least = now, v.active
            if key in self._open:
                start, least = self._open[key].start, min(self._open[key].active, v.active)
            self._open[key] = Breach(
                role=v.role, start=start, end=now, minimum=v.minimum, active=least, reason=v.reason
            )

    def end(self, now: Micros) -> None:
        """Close what is open."""
        self._end_waiting(now)
        self._breaches += [replace(breach, end=now) for breach in self._open.values()]
        self._open.clear()

    def _end_waiting(self, now: Micros) -> None:
        for role in list(self._late):
            self._arrive(role, now, arrived=False)

    def _arrive(self, role: str, now: Micros, *, arrived: bool) -> None:
        window, _ = self._late.pop(role)
        self._ledger.lateness.append(
            Lateness(boundary=window.start, window=window.window, role=role, late=now - window.start, arrived=arrived)
        )
