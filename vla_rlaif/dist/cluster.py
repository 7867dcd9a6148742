"""Workers, and how they are asked: the only way in which a run touches another process or machine.

Work is a picklable callable on the worker, ``partial(RolloutWorker.play, starts=starts)``: an unbound method, a module
function, or a partial of one. Its answer never outlives its worker (see answers.py). Deadlines are the caller's.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from vla_rlaif.dist.answers import Answer, WorkerError, WorkerFailure, WorkerLost, answers
from vla_rlaif.dist.fleet import Fleet


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker runs."""

    node: str  # name of the node
    address: str  # IP by which other nodes reach it
    gpus: tuple[str, ...] = ()  # of that node, as CUDA_VISIBLE_DEVICES names them
    memory: str = ""  # workers with the same one can map each other's memory


@runtime_checkable
class StoredValue(Protocol):
    """A ticket for a value in the object store. It can be sent to other workers."""

    def take(self, timeout_s: float) -> Any:
        """The value; its arrays may be read-only. Raises TimeoutError."""
        ...


@runtime_checkable
class ObjectStore(Protocol):
    """What workers can leave for each other without the driver carrying it."""

    def put(self, value: Any) -> StoredValue: ...


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What the factory of a worker is told."""

    role: str
    index: int  # among the ``num`` workers of the role
    num: int
    incarnation: int  # +1 with every restart
    place: Place
    store: ObjectStore

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


@runtime_checkable
class Handle[W](Protocol):
    """One incarnation of one worker. After its death every answer of it is WorkerLost, the open ones included."""

    @property
    def name(self) -> str:
        """Of the worker, ``role/index``: the same for all incarnations."""
        ...

    @property
    def incarnation(self) -> int: ...

    @property
    def place(self) -> Place: ...

    def ask[T](self, work: Callable[[W], T], *, urgent: bool = False) -> Answer[T]:
        """Work of a worker is done one after the other, in the order of asking; urgent work beside it, by a thread of
        its own. Never raises: what goes wrong is in the answer."""
        ...

    def kill(self) -> None:
        """End it now, whatever it is doing. A second call does nothing."""
        ...


class WorkerGroup[W]:
    """The workers of one role. Knows nothing of Ray, nor of what they do."""

    def __init__(
        self,
        role: str,
        handles: Sequence[Handle[W]],
        *,
        health: Fleet,
        respawn: Callable[[Handle[W], int], Handle[W]],
        max_restarts: int,
        share: Callable[[Callable[[W], Any]], Callable[[W], Any]],
    ) -> None:
        """``respawn`` makes the incarnation of that number in place of a dead one and waits until it is built.
        ``share`` makes of work something that can be sent to several workers for the price of one."""
        self.role, self.health = role, health
        self._handles = list(handles)
        self._respawn, self._share = respawn, share
        self._max_restarts = max_restarts
        self._restarting = [threading.Lock() for _ in handles]

    @property
    def handles(self) -> tuple[Handle[W], ...]:
        """The newest incarnation of each worker, by index."""
        return tuple(self._handles)

    def all[T](self, work: Callable[[W], T], *, urgent: bool = False) -> list[Answer[T]]:
        """The same work for every worker."""
        shared = self._share(work) if len(self._handles) > 1 else work
        return [handle.ask(shared, urgent=urgent) for handle in self._handles]

    def shard[T](self, make_work: Callable[[slice], Callable[[W], T]], rows: int, *, unit: int = 1) -> list[Answer[T]]:
        """``rows`` rows split among the workers, ``unit`` rows always together. In order, so that the results
        concatenate; workers for which no row is left are not asked."""
        parts = split_rows(rows, len(self._handles), unit=unit)
        return [handle.ask(make_work(part)) for handle, part in zip(self._handles, parts, strict=False)]

    def rank0[T](self, work: Callable[[W], T], *, urgent: bool = False) -> Answer[T]:
        """Work for the first worker only."""
        return self._handles[0].ask(work, urgent=urgent)

    def restart(self, handle: Handle[W]) -> Handle[W]:
        """End ``handle`` and start the worker's next incarnation, STALE; the newest one if that has happened already.

        Raises:
            WorkerLost: it was restarted as often as is allowed.
            WorkerFailure, ValueError: the new one could not be built.
        """
        index = [each.name for each in self._handles].index(handle.name)
        with self._restarting[index]:
            newest = self._handles[index]
            if newest.incarnation != handle.incarnation:
                return newest
            handle.kill()
            self.health.lost(handle.name, handle.incarnation)
            if self.health.members()[handle.name].incarnation >= self._max_restarts:
                raise WorkerLost(handle.name, f"it was restarted {self._max_restarts} times (faults.max_restarts)")
            incarnation = self.health.restarted(handle.name)
            try:
                self._handles[index] = self._respawn(handle, incarnation)
            except BaseException:
                self.health.lost(handle.name, incarnation)
                raise
            return self._handles[index]

    def kill(self) -> None:
        """End all workers."""
        for handle in self._handles:
            handle.kill()


@runtime_checkable
class Cluster(Protocol):
    """Starts workers where the config places them."""

    def start[W](self, role: str, make: Callable[[WorkerContext], W], num: int) -> WorkerGroup[W]:
        """``num`` workers made by ``make``, a module function or a partial of one, each in its own process or thread;
        returns when all are built.

        Raises:
            ValueError: they cannot be placed, or ``make`` raised one (a mistake in the config).
            WorkerFailure: ``make`` raised anything else, a worker died, or was not built in time.
        """
        ...

    def close(self) -> None:
        """End all workers."""
        ...


def split_rows(rows: int, parts: int, *, unit: int = 1) -> list[slice]:
    """At most ``parts`` contiguous slices of nearly equal length, none empty, the longer ones first.

    Raises:
        ValueError: ``rows`` is no multiple of ``unit``.
    """
    if rows % unit:
        raise ValueError(f"{rows} rows do not split into units of {unit}.")
    base, more = divmod(rows // unit, parts)
    ends = [unit * (base * i + min(i, more)) for i in range(parts + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends) if end > start]


def wait_until_built(handles: Sequence[Handle[Any]], built: Sequence[Answer[None]], timeout_s: float) -> None:
    """Wait for the factories of workers; if one fails, end them all.

    Raises:
        ValueError: a factory raised one.
        WorkerFailure: anything else went wrong.
    """
    try:
        answers(built, timeout_s, "building itself")
    except WorkerFailure as failure:
        for handle in handles:
            handle.kill()
        if isinstance(failure, WorkerError) and failure.kind == "ValueError":
            raise ValueError(failure.reason) from failure
        raise


def function_of(work: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside nested partials."""
    while isinstance(work, partial):
        work = work.func
    return work


def check_work(work: Callable[..., Any]) -> None:
    """Work must be found again by name in another process; a lambda would only fail there, or carry its scope along."""
    name = getattr(function_of(work), "__qualname__", "<an object>")
    assert "<" not in name, f"{name} is not sent to workers: name a method or a module function, or a partial of one"
