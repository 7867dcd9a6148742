"""The answers that one incarnation of a worker still owes, and its one death."""

import threading
from typing import Any

from vla_rlaif.dist.answers import Answer, WorkerFailure, WorkerLost
from vla_rlaif.dist.fleet import Fleet


class OpenAnswers:
    """Every answer comes to exactly one outcome; with the worker's death all open ones do. Safe from any thread.

    The fleet hears of every answer, and of the death.
    """

    def __init__(self, worker: str, incarnation: int, health: Fleet) -> None:
        self._worker, self._incarnation, self._health = worker, incarnation, health
        self._lock = threading.Lock()
        self._open: set[Answer[Any]] = set()
        self._lost: str | None = None

    @property
    def is_dead(self) -> bool:
        return self._lost is not None

    def new(self) -> Answer[Any]:
        """An answer to wait for; of a dead worker it has failed already."""
        answer: Answer[Any] = Answer(self._worker, self._incarnation)
        with self._lock:
            if self._lost is None:
                self._open.add(answer)
                return answer
        answer.fail(WorkerLost(self._worker, self._lost))
        return answer

    def settle(self, answer: Answer[Any], value: Any) -> None:
        self._close(answer)
        answer.settle(value)

    def fail(self, answer: Answer[Any], failure: WorkerFailure) -> None:
        self._close(answer)
        answer.fail(failure)

    def end(self, reason: str) -> bool:
        """The worker is dead. False: that was known."""
        with self._lock:
            if self._lost is not None:
                return False
            self._lost = reason
            cut, self._open = self._open, set()
        self._health.lost(self._worker, self._incarnation)
        for answer in cut:
            answer.fail(WorkerLost(self._worker, reason))
        return True

    def _close(self, answer: Answer[Any]) -> None:
        with self._lock:
            self._open.discard(answer)
        self._health.heard(self._worker, self._incarnation)
