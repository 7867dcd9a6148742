"""Workers as threads of this process: for tests, and where several workers of one machine should share its memory."""

import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vla_rlaif.dist.answers import Answer, WorkerError
from vla_rlaif.dist.cluster import Handle, Place, WorkerContext, WorkerGroup, check_work, wait_until_built
from vla_rlaif.dist.fleet import Fleet
from vla_rlaif.dist.host import memory_id
from vla_rlaif.dist.open_answers import OpenAnswers

type _Asked = queue.SimpleQueue[tuple[Callable[[Any], Any], Answer[Any]] | None]


@dataclass(frozen=True, kw_only=True)
class KeptValue:
    """A value in this process's own memory."""

    value: Any

    def take(self, timeout_s: float) -> Any:
        return self.value


@dataclass(frozen=True)
class ProcessStore:
    """The ObjectStore of workers that share one process."""

    def put(self, value: Any) -> KeptValue:
        return KeptValue(value=value)


class ThreadHandle[W]:
    """A worker with a thread for ordinary work and one for urgent work. Arguments and results are not copied.

    A thread cannot be ended: after ``kill`` what it still does is ignored, and its worker is dropped.
    """

    def __init__(self, context: WorkerContext, make: Callable[[WorkerContext], W], health: Fleet) -> None:
        self._context = context
        self._answers = OpenAnswers(context.name, context.incarnation, health)
        self._ordinary: _Asked = queue.SimpleQueue()
        self._urgent: _Asked = queue.SimpleQueue()
        self.built = self._answers.new()
        threading.Thread(target=self._live, args=(make,), daemon=True, name=context.name).start()

    @property
    def name(self) -> str:
        return self._context.name

    @property
    def incarnation(self) -> int:
        return self._context.incarnation

    @property
    def place(self) -> Place:
        return self._context.place

    def ask[T](self, work: Callable[[W], T], *, urgent: bool = False) -> Answer[T]:
        check_work(work)
        answer = self._answers.new()
        (self._urgent if urgent else self._ordinary).put((work, answer))
        return answer

    def kill(self) -> None:
        self.end("it was killed")

    def end(self, reason: str) -> None:
        """Die, for a reason."""
        if self._answers.end(reason):
            self._ordinary.put(None)
            self._urgent.put(None)

    def _live(self, make: Callable[[WorkerContext], W]) -> None:
        """The thread of ordinary work, from the factory on."""
        try:
            worker = make(self._context)
        except Exception as error:  # whoever waits for the worker raises it
            self._answers.fail(self.built, self._failure(error))
            return
        urgent = threading.Thread(
            target=self._serve, args=(worker, self._urgent), daemon=True, name=f"{self.name} urgent"
        )
        urgent.start()
        self._answers.settle(self.built, None)
        self._serve(worker, self._ordinary)

    def _serve(self, worker: W, asked: _Asked) -> None:
        while (item := asked.get()) is not None and not self._answers.is_dead:
            work, answer = item
            try:
                value = work(worker)
            except Exception as error:  # the worker survives it
                self._answers.fail(answer, self._failure(error))
            else:
                self._answers.settle(answer, value)

    def _failure(self, error: Exception) -> WorkerError:
        trace = "".join(traceback.format_exception(error))
        return WorkerError(self.name, kind=type(error).__name__, reason=str(error), trace=trace)


class ThreadCluster:
    """A Cluster in one process."""

    def __init__(
        self, *, max_restarts: int = 3, start_s: float = 600.0, suspect_s: float = 30.0, dead_s: float = 60.0
    ) -> None:
        """``suspect_s`` and ``dead_s`` are the fleet's, for callers that look at it."""
        self._max_restarts, self._start_s = max_restarts, start_s
        self._suspect_s, self._dead_s = suspect_s, dead_s
        self._groups: list[WorkerGroup[Any]] = []
        self._place = Place(node=socket.gethostname(), address="127.0.0.1", memory=memory_id())

    def start[W](self, role: str, make: Callable[[WorkerContext], W], num: int) -> WorkerGroup[W]:
        check_work(make)
        contexts = [
            WorkerContext(role=role, index=i, num=num, incarnation=0, place=self._place, store=ProcessStore())
            for i in range(num)
        ]
        health = Fleet(
            [context.name for context in contexts],
            clock=time.monotonic,
            suspect_s=self._suspect_s,
            dead_s=self._dead_s,
        )

        def make_all(wanted: Sequence[WorkerContext]) -> list[ThreadHandle[W]]:
            handles = [ThreadHandle(context, make, health) for context in wanted]
            wait_until_built(handles, [handle.built for handle in handles], self._start_s)
            return handles

        def respawn(old: Handle[W], incarnation: int) -> Handle[W]:
            [context] = [each for each in contexts if each.name == old.name]
            return make_all([replace(context, incarnation=incarnation)])[0]

        group: WorkerGroup[W] = WorkerGroup(
            role,
            make_all(contexts),
            health=health,
            respawn=respawn,
            max_restarts=self._max_restarts,
            share=lambda work: work,
        )
        self._groups.append(group)
        return group

    def close(self) -> None:
        for group in self._groups:
            group.kill()
        self._groups = []
