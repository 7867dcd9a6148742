"""Answers of workers, and the three ways in which one does not come: the worker raised, died, or is late."""

import concurrent.futures
import threading
import time
from collections.abc import Sequence


class WorkerFailure(RuntimeError):
    """An answer that did not come. ``worker`` is the name of who was asked."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerError(WorkerFailure):
    """The work raised: the worker lives on. The message ends with the worker's own traceback.

    ``kind`` is the name of the exception's class, ``reason`` its text.
    """

    def __init__(self, worker: str, *, kind: str, reason: str, trace: str) -> None:
        super().__init__(worker, f"{worker} failed:\n{trace.rstrip()}")
        self.kind, self.reason = kind, reason


class WorkerLost(WorkerFailure):
    """The worker is dead; whether it did the work is not known. ``reason`` says what is known of its end."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, f"{worker} is lost: {reason}")
        self.reason = reason


class WorkerLate(WorkerFailure):
    """No answer by the deadline: the worker is busy, hangs, or cannot be reached. It may still do the work."""

    def __init__(self, worker: str, doing: str, timeout_s: float) -> None:
        super().__init__(worker, f"{worker} did not finish {doing} within {timeout_s:g} s")


class Answer[T](concurrent.futures.Future[T]):
    """A future that knows whose it is. The first outcome counts; what comes later is dropped."""

    def __init__(self, worker: str, incarnation: int) -> None:
        super().__init__()
        self.worker, self.incarnation = worker, incarnation
        self._once = threading.Lock()

    def settle(self, value: T) -> None:
        with self._once:
            if not self.done():
                self.set_result(value)

    def fail(self, failure: WorkerFailure) -> None:
        with self._once:
            if not self.done():
                self.set_exception(failure)


def answers[T](asked: Sequence[Answer[T]], timeout_s: float, doing: str) -> list[T]:
    """All results, in the order of ``asked``. ``doing`` completes "did not finish ...".

    Raises:
        WorkerFailure: the first that is known, without waiting for the others. WorkerLate after ``timeout_s`` seconds.
    """
    concurrent.futures.wait(asked, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION)
    failures = [each.exception() for each in asked if each.done() and each.exception() is not None]
    if failures:
        raise min(failures, key=_rank)  # pyright: ignore[reportGeneralTypeIssues] (an Answer fails by WorkerFailure)
    for each in asked:
        if not each.done():
            raise WorkerLate(each.worker, doing, timeout_s)
    return [each.result() for each in asked]


def outcomes[T](asked: Sequence[Answer[T]], timeout_s: float, doing: str) -> list[T | WorkerFailure]:
    """What became of each, in the order of ``asked``: its result, or its failure as a value. Waits for all of them."""
    end = time.monotonic() + timeout_s
    found: list[T | WorkerFailure] = []
    for each in asked:
        try:
            found.append(each.result(max(end - time.monotonic(), 0.0)))
        except WorkerFailure as failure:
            found.append(failure)
        except TimeoutError:
            found.append(WorkerLate(each.worker, doing, timeout_s))
    return found


def _rank(failure: BaseException | None) -> int:
    """An error in the work says more than the deaths that may have followed from it."""
    return 0 if isinstance(failure, WorkerError) else 1
