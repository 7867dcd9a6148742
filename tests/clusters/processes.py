"""Workers that are real processes of this machine, so that they can be killed. For tests only: no restarts of its own
making, no placement."""

import multiprocessing
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from vla_rlaif.dist.answers import Answer, WorkerError
from vla_rlaif.dist.cluster import Handle, Place, WorkerContext, WorkerGroup
from vla_rlaif.dist.fleet import Fleet
from vla_rlaif.dist.host import memory_id
from vla_rlaif.dist.open_answers import OpenAnswers
from vla_rlaif.dist.thread_cluster import ProcessStore

SPAWN = multiprocessing.get_context("spawn")


class ProcessHandle:
    """A worker in a process: a thread for ordinary work, one for urgent work."""

    def __init__(self, context: WorkerContext, make: Callable[[WorkerContext], Any], health: Fleet) -> None:
        self.name, self.incarnation, self.place = context.name, context.incarnation, context.place
        self._open = OpenAnswers(self.name, self.incarnation, health)
        self._lock, self._waiting, self._number = threading.Lock(), dict[int, Answer[Any]](), 0
        self._link, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_live, args=(theirs, context, make), daemon=True)
        self.process.start()
        theirs.close()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, work: Callable[[Any], Any], *, urgent: bool = False) -> Answer[Any]:
        answer = self._open.new()
        with self._lock:
            self._number += 1
            self._waiting[self._number] = answer
            try:
                self._link.send((self._number, urgent, work))
            except OSError:
                self._open.end("its pipe is closed")
        return answer

    def kill(self) -> None:
        self.process.kill()

    def _listen(self) -> None:
        try:
            while True:
                number, value, failed = self._link.recv()
                answer = self._waiting.pop(number)
                if failed is None:
                    self._open.settle(answer, value)
                else:
                    self._open.fail(answer, WorkerError(self.name, **failed))
        except (EOFError, OSError):
            self._open.end("its process has ended")


def _live(link: Connection, context: WorkerContext, make: Callable[[WorkerContext], Any]) -> None:
    worker, lock = make(context), threading.Lock()
    queues = {urgent: queue.SimpleQueue[Any]() for urgent in (False, True)}

    def serve(asked: queue.SimpleQueue[Any]) -> None:
        while True:
            number, work = asked.get()
            try:
                answer = (number, work(worker), None)
            except Exception as error:
                failed = {"kind": type(error).__name__, "reason": str(error), "trace": traceback.format_exc()}
                answer = (number, None, failed)
            with lock:
                link.send(answer)

    for each in queues.values():
        threading.Thread(target=serve, args=(each,), daemon=True).start()
    while True:
        number, urgent, work = link.recv()
        queues[urgent].put((number, work))


class ProcessCluster:
    def __init__(self, *, memory: str | None = None) -> None:
        """``memory``: another than the true one, so that nobody takes shared memory by himself."""
        address = "127.0.0.1"
        self._place = Place(node="here", address=address, memory=memory_id() if memory is None else memory)
        self._started: list[ProcessHandle] = []

    def start[W](self, role: str, make: Callable[[WorkerContext], W], num: int) -> WorkerGroup[W]:
        contexts = [
            WorkerContext(role=role, index=i, num=num, incarnation=0, place=self._place, store=ProcessStore())
            for i in range(num)
        ]
        names = [context.name for context in contexts]
        health = Fleet(names, clock=time.monotonic, suspect_s=100.0, dead_s=200.0, version=-1)
        handles = [ProcessHandle(context, make, health) for context in contexts]
        self._started += handles

        def respawn(old: Handle[W], incarnation: int) -> ProcessHandle:
            context = contexts[names.index(old.name)]
            self._started.append(ProcessHandle(replace(context, incarnation=incarnation), make, health))
            return self._started[-1]

        group = WorkerGroup(role, handles, health=health, respawn=respawn, max_restarts=9, share=lambda work: work)
        return group

    def close(self) -> None:
        for handle in self._started:
            handle.kill()
            handle.process.join(5)
