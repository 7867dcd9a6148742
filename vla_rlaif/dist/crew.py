"""The workers of one role, at work that any of them can do: dealt out to whoever is free, a deadline for each piece.

What a dead worker was doing is done by another one if the work is pure, and is lost if it is not. The dead come back in
the background, a bounded number of times, while the rest goes on.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from vla_rlaif.dist.answers import Answer, WorkerError, WorkerFailure, WorkerLate, WorkerLost
from vla_rlaif.dist.cluster import Handle, WorkerGroup
from vla_rlaif.dist.fleet import Health

POLL_S = 0.2  # between looks at whether an idle worker is dead
MAX_TRIES = 3  # of one piece of pure work, before it is taken for what kills the workers


@dataclass(frozen=True, kw_only=True)
class CrewSettings:
    work_s: float  # for one piece of work
    start_s: float  # for the next incarnation of a worker to be there, if nobody else is


class Crew[W]:
    """Knows which workers of a group may be given work. Safe to use from one thread at a time.

    ``is_fit`` says whether a worker that lives may be given work now; ``bring_up`` makes it fit if it is not, and every
    new incarnation. It runs on a thread of its own.
    """

    def __init__(
        self,
        group: WorkerGroup[W],
        settings: CrewSettings,
        *,
        bring_up: Callable[[Handle[W]], None],
        is_fit: Callable[[Handle[W]], bool] = lambda handle: True,
    ) -> None:
        self.group, self.settings = group, settings
        self._bring_up, self._is_fit = bring_up, is_fit
        self._returns: dict[str, Future[None]] = {}  # of those that are being restarted
        self.num_died = self.num_hung = 0

    def ready(self, busy: Collection[str] = ()) -> list[Handle[W]]:
        """Who may be given work, by index; not those whose names are in ``busy``. The dead are sent for.

        Raises:
            WorkerFailure: a worker could not be replaced, or was replaced too often.
        """
        for name, returned in list(self._returns.items()):
            if returned.done():
                del self._returns[name]
                returned.result()
        found = []
        for handle in self.group.handles:
            if handle.name in self._returns or handle.name in busy:
                continue
            if self.group.health.health(handle.name) == Health.DEAD:
                self.retire(handle, WorkerLost(handle.name, "it died while it was idle"))
            elif self._is_fit(handle):
                found.append(handle)
            else:
                self._send_for(handle, is_dead=False)
        return found

    def wait_for_one(self, doing: str) -> None:
        """Until some worker lives; fit or not.

        Raises:
            WorkerFailure: none does in time, or ever again.
        """
        until = time.monotonic() + self.settings.start_s
        while not self.ready() and len(self._returns) == len(self.group.handles):
            if time.monotonic() > until:
                raise self._nobody(doing)
            wait(self._returns.values(), POLL_S, return_when=FIRST_COMPLETED)

    def _nobody(self, doing: str) -> WorkerLate:
        who = f"any worker of {self.group.role}"
        return WorkerLate(who, f"its restart, to go on with {doing},", self.settings.start_s)

    def retire(self, handle: Handle[W], failure: WorkerFailure) -> None:
        """Kill a worker that is dead, late or lost, count it, and start the next incarnation in the background."""
        if handle.name in self._returns:
            return
        if isinstance(failure, WorkerLate):
            self.num_hung += 1
        else:
            self.num_died += 1
        handle.kill()
        self._send_for(handle, is_dead=True)

    def all_of[T](self, works: Sequence[Callable[[W], T]], doing: str) -> list[T]:
        """The results of pure work."""
        return [_result(one) for one in self.deal(works, doing, again=True)]

    def deal[T](
        self, works: Sequence[Callable[[W], T]], doing: str, *, again: bool
    ) -> list[T | WorkerLost | WorkerLate]:
        """Every piece of work, by one worker each; results in the order of ``works``. ``again``: the work of a worker
        that died or was late goes to another one; otherwise its failure stands in its place.

        Raises:
            WorkerError: a piece of work raised.
            WorkerFailure: no worker is left, or one piece was lost MAX_TRIES times.
        """
        waiting, tries = deque(range(len(works))), [0] * len(works)
        found: dict[int, T | WorkerLost | WorkerLate] = {}
        running: dict[Answer[T], tuple[int, Handle[W], float]] = {}
        idle_since = time.monotonic()
        while len(found) < len(works):
            for handle in self.ready({handle.name for _, handle, _ in running.values()}) if waiting else ():
                if waiting:
                    piece = waiting.popleft()
                    tries[piece] += 1
                    running[handle.ask(works[piece])] = piece, handle, time.monotonic() + self.settings.work_s
            if running:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > self.settings.start_s:
                raise self._nobody(doing)
            for answer, failure in self._settled(running, doing):
                piece, handle, _ = running.pop(answer)
                if failure is None:
                    found[piece] = answer.result()
                    continue
                self.retire(handle, failure)
                if not again:
                    found[piece] = failure
                elif tries[piece] == MAX_TRIES:
                    raise failure
                else:
                    waiting.appendleft(piece)
        return [found[piece] for piece in range(len(works))]

    def _settled[T](
        self, running: dict[Answer[T], tuple[int, Handle[W], float]], doing: str
    ) -> list[tuple[Answer[T], WorkerLost | WorkerLate | None]]:
        """Answers that have come, or that will not; waits for the next of them for a moment."""
        awaited: list[Future[Any]] = [*running, *self._returns.values()]
        wait(awaited, POLL_S, return_when=FIRST_COMPLETED)
        settled: list[tuple[Answer[T], WorkerLost | WorkerLate | None]] = []
        for answer, (_, handle, until) in running.items():
            if answer.done():
                failure = answer.exception()
                if isinstance(failure, WorkerError):
                    raise failure
                assert failure is None or isinstance(failure, WorkerLost), failure
                settled.append((answer, failure))
            elif time.monotonic() > until:
                settled.append((answer, WorkerLate(handle.name, doing, self.settings.work_s)))
        return settled

    def _send_for(self, handle: Handle[W], *, is_dead: bool) -> None:
        returned = self._returns[handle.name] = Future[None]()
        args, name = (handle, is_dead, returned), f"{handle.name} returns"
        threading.Thread(target=self._bring_back, args=args, name=name, daemon=True).start()

    def _bring_back(self, handle: Handle[W], is_dead: bool, returned: Future[None]) -> None:
        for left in reversed(range(MAX_TRIES)):
            try:
                handle = self.group.restart(handle) if is_dead else handle
                self._bring_up(handle)
            except (WorkerFailure, ValueError) as failure:
                died_again = isinstance(failure, WorkerLost | WorkerLate) and failure.worker == handle.name
                if not died_again or not left:
                    returned.set_exception(failure)
                    return
                is_dead = True
            else:
                returned.set_result(None)
                return


def _result[T](one: T | WorkerLost | WorkerLate) -> T:
    assert not isinstance(one, WorkerFailure), "work that is done again has a result"
    return one
