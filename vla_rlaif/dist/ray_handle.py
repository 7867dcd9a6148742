"""One worker on Ray as its driver sees it, and Ray's object store."""

import os
import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns about its own future

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from vla_rlaif.dist.answers import Answer, WorkerError
from vla_rlaif.dist.cluster import Place, WorkerContext, check_work
from vla_rlaif.dist.fleet import Fleet
from vla_rlaif.dist.open_answers import OpenAnswers
from vla_rlaif.dist.ray_actor import Assignment, Failed, Started


@dataclass(frozen=True, kw_only=True)
class RayValue:
    """A value in Ray's object store."""

    ref: Any

    def take(self, timeout_s: float) -> Any:
        return ray.get(self.ref, timeout=timeout_s)


@dataclass(frozen=True)
class RayStore:
    """The ObjectStore of Ray; what was put is gone with the worker that put it."""

    def put(self, value: Any) -> RayValue:
        return RayValue(ref=ray.put(value))


@dataclass(frozen=True)
class SharedWork:
    """Work that lies in the object store once, for several workers."""

    ref: Any

    def __call__(self, worker: Any) -> Any:
        work: Any = ray.get(self.ref)
        return work(worker)


def share_work(work: Callable[[Any], Any]) -> SharedWork:
    check_work(work)
    return SharedWork(ref=ray.put(work))


class RayHandle[W]:
    """One incarnation of a worker: an actor and what it owes."""

    def __init__(
        self, actor: Any, name: str, incarnation: int, *, health: Fleet, inbox: "Inbox", output: Path | None
    ) -> None:
        """``inbox``: where answers of Ray go; ``output``: the file that it prints into."""
        self._actor, self._name, self._incarnation = actor, name, incarnation
        self._answers = OpenAnswers(name, incarnation, health)
        self._health, self._inbox, self._output = health, inbox, output
        self._started: Started | None = None
        self.built = self._answers.new()
        self._ping = self._answers.new()  # the last one
        self._send(self._ping, actor.ping.options(concurrency_group="pulse").remote())
        self._send(self._answers.new(), actor.live.options(concurrency_group="pulse").remote())

    def build(self, make: Callable[[WorkerContext], W], assignment: Assignment) -> None:
        """Give the actor its worker; ``built`` is settled when that is there."""
        method = self._actor.build.options(concurrency_group="work")
        self._send(self.built, method.remote(make, assignment, RayStore()))

    @property
    def name(self) -> str:
        return self._name

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @property
    def place(self) -> Place:
        assert self._started is not None, f"{self._name} is not built yet"
        return self._started.place

    @property
    def pid(self) -> int:
        """Of its process, on its node."""
        assert self._started is not None, f"{self._name} is not built yet"
        return self._started.pid

    def ask[T](self, work: Callable[[W], T], *, urgent: bool = False) -> Answer[T]:
        if not isinstance(work, SharedWork):
            check_work(work)
        answer = self._answers.new()
        if not answer.done():
            method = self._actor.do.options(concurrency_group="urgent" if urgent else "work")
            self._send(answer, method.remote(work.ref if isinstance(work, SharedWork) else work))
        return answer

    def kill(self) -> None:
        self.end("it was killed")

    def end(self, reason: str) -> None:
        """Kill it, for a reason."""
        if self._answers.end(reason):
            ray.kill(self._actor, no_restart=True)

    def look(self) -> None:
        """End it if the fleet has given it up; else ping it, unless it still owes the answer to the last ping. One that
        is being built has a deadline."""
        member = self._health.members()[self._name]
        if self._started is None:
            self._health.heard(self._name, self._incarnation)
        elif member.is_dead and member.incarnation == self._incarnation:
            self.end(f"its process gave no sign of life for {self._health.dead_s:g} s")
        elif self._ping.done() and not self._answers.is_dead:
            self._ping = self._answers.new()
            self._send(self._ping, self._actor.ping.options(concurrency_group="pulse").remote())

    def take(self, answer: Answer[Any], came: Any) -> None:
        """What Ray's future of an answer has become."""
        error = came.exception()
        if error is None:
            self._take_value(answer, came.result())
        elif isinstance(error, RayTaskError):  # the answer could not be sent
            failure = WorkerError(
                self._name, kind=type(error.cause).__name__, reason=str(error.cause), trace=str(error)
            )
            self._answers.fail(answer, failure)
        else:
            # Of a worker that cannot be reached nobody knows what it has done; its end makes that certain.
            why = "its process cannot be reached. " if isinstance(error, ActorUnavailableError) else ""
            printed = "" if self._output is None else f"What it printed is in {self._output}. "
            self.end(f"{why}{printed}{error}")

    def _take_value(self, answer: Answer[Any], value: Any) -> None:
        if isinstance(value, Failed):
            failure = WorkerError(self._name, kind=value.kind, reason=value.reason, trace=value.trace)
            self._answers.fail(answer, failure)
            return
        if answer is self.built:
            self._started = value
        self._answers.settle(answer, value)

    def _send(self, answer: Answer[Any], ref: Any) -> None:
        ref.future().add_done_callback(lambda came: self._inbox.put((self, answer, came)))


type Inbox = queue.SimpleQueue[tuple[RayHandle[Any], Answer[Any], Any] | None]
