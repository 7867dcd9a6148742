"""The receiver's side of a weight sync: new weights are staged beside those that act, and take their place at once.

    stage (fetch and check, in a thread) -> vote -> commit (they are the next to act) -> adopt (they act)

Old weights act until ``adopt``, which the worker calls between two rounds of episodes. Knows no Ray and no torch.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vla_rlaif.dist.link import Links
from vla_rlaif.dist.manifest import Bytes, Layout, Manifest, check_manifest
from vla_rlaif.dist.payload import num_threads, unpack
from vla_rlaif.dist.shared_memory import Rooms, Segment, SharedTicket
from vla_rlaif.dist.task import Task
from vla_rlaif.dist.tickets import NOTHING, Check, Desk, LinkTicket, Ticket
from vla_rlaif.dist.views import Views
from vla_rlaif.types import Weights


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What one end has to say about one payload."""

    serial: int
    checksums: tuple[int, ...] = ()  # of what has arrived
    problem: str = ""  # a traceback or a sentence; empty: it is all there, and as it was sent

    @property
    def is_yes(self) -> bool:
        return not self.problem


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a receiver has after a commit."""

    version: int  # that was committed
    acting: int  # the version that acts; -1: what the worker was built with
    tokens: frozenset[str]  # of the memory of others that is in use


@dataclass(kw_only=True)
class _Staged:
    """A payload, from its first byte here to its last use."""

    manifest: Manifest
    rooms: list[Segment] = field(default_factory=list)  # the first has the payload, if it came over a link
    lends: bool = False  # others will map it
    lent: frozenset[str] = frozenset()  # tokens of rooms that they use already
    base: "_Staged | None" = None  # the frozen weights that complete it
    token: str = ""  # of memory of another process
    weights: Weights = field(default_factory=dict)

    @property
    def whole(self) -> Weights:
        return {**({} if self.base is None else self.base.weights), **self.weights}

    @property
    def tokens(self) -> set[str]:
        """Of all memory that ``whole`` lies in."""
        return {self.token, *(room.token for room in self.rooms)} | (set() if self.base is None else self.base.tokens)


class Receiver:
    """Holds up to three copies of what is trained: those that act, those that are next, those that are being staged.

    The arrays given to ``load`` do not change until the next ``load`` has returned, so a policy may share their memory.
    ``expected`` is what the policy consists of; without it, any weights are taken for right.
    """

    def __init__(
        self, load: Callable[[Weights, int], None], *, expected: Layout | None = None, threads: int | None = None
    ) -> None:
        self._load, self._expected = load, expected
        self._threads = threads or num_threads()
        self._links, self._rooms = Links(), Rooms()
        self._views = Views()
        self._lock = threading.Lock()
        self._base: _Staged | None = None  # the frozen weights
        self._acting: _Staged | None = None
        self._loading: _Staged | None = None
        self._next: _Staged | None = None
        self._task: tuple[_Staged, Task[tuple[int, ...]]] | None = None
        self._given_up: list[tuple[_Staged, Task[tuple[int, ...]]]] = []

    @property
    def version(self) -> int:
        """Of the weights that act; -1: of those that the worker was built with."""
        return -1 if self._acting is None else self._acting.manifest.version

    def check(self, manifest: Manifest) -> str:
        """The manifest's digest, as this end reads it. Raises ManifestError."""
        check_manifest(manifest, held=None if self._base is None else self._base.manifest, expected=self._expected)
        return manifest.digest

    def stage(self, manifest: Manifest, ticket: Ticket) -> None:
        """Begin to fetch a payload; one that is being staged is given up. Raises ManifestError before anything else."""
        self.check(manifest)
        with self._lock:
            self._drop_staged()
            base = None if manifest.is_base else self._base
            staged = _Staged(manifest=manifest, base=base, token=ticket.token)
            if isinstance(ticket, LinkTicket):
                staged.lends, staged.lent = ticket.lends, ticket.lent
            task = Task(lambda: self._fetch(staged, ticket), name=f"stage {manifest.serial}")
            self._task = staged, task

    def vote(self, serial: int, wait_s: float) -> Vote | None:
        """None: not yet, ask again. Frozen weights are kept from a yes on; others wait for ``commit``."""
        with self._lock:
            if self._task is None or self._task[0].manifest.serial != serial:
                return Vote(serial=serial, problem=f"publication {serial} is not being staged here (any more)")
            staged, task = self._task
        if not task.wait(wait_s):
            return None
        if task.problem or task.value is None:
            return Vote(serial=serial, problem=task.problem)
        if staged.manifest.is_base:
            with self._lock:
                self._base = staged
        return Vote(serial=serial, checksums=task.value)

    def lend(self, serial: int) -> SharedTicket:
        """What came over a link and was found right, for others of this machine. They are told of as ``lent`` for as
        long as they use it.

        Raises:
            ValueError: it is not staged here.
        """
        with self._lock:
            if self._task is None or self._task[0].manifest.serial != serial or not self._task[1].is_done:
                raise ValueError(f"publication {serial} cannot be lent: it is not staged here.")
            return self._loan(self._task[0])

    def commit(self, serial: int) -> Holding:
        """What is staged is the next to act. A second call for the same publication changes nothing.

        Raises:
            ValueError: it is not staged here.
        """
        with self._lock:
            staged = self._task[0] if self._task is not None else None
            if staged is not None and staged.manifest.serial == serial and self._task is not None:
                if not self._task[1].is_done or self._task[1].problem:
                    raise ValueError(f"publication {serial} cannot be committed: it has not been staged completely.")
                self._next, self._task = staged, None
            latest = self._next or self._loading or self._acting
            if latest is None or latest.manifest.serial != serial:
                raise ValueError(f"publication {serial} cannot be committed: it is not staged here.")
            tokens = frozenset(each.token for each in self._used() if each.token)
            return Holding(version=latest.manifest.version, acting=self.version, tokens=tokens)

    def abort(self, generation: int | None = None) -> None:
        """Give up what is being staged, and the link of that generation. What acts and what is next stay."""
        if generation is not None:
            self._links.abort(generation)
        with self._lock:
            self._drop_staged()

    def adopt(self) -> bool:
        """Let the weights that were committed last act, if they do not yet. Called by the thread that acts."""
        with self._lock:
            if self._next is None:
                return False
            new = self._loading = self._next
            self._next = None
        self._views.give(new.tokens)
        try:
            self._load(new.whole, new.manifest.version)
        except BaseException:
            with self._lock:
                self._next, self._loading = self._next or new, None
            raise
        with self._lock:
            old, self._acting, self._loading = self._acting, new, None
        if old is not None:
            self._views.take_back(old.tokens - new.tokens)
        return True

    def _fetch(self, staged: _Staged, ticket: Ticket) -> tuple[int, ...]:
        """The checksums of what has arrived, if they are right."""
        check = Check(staged.manifest, threads=self._threads)
        room = lambda num_bytes: self._room(staged, num_bytes)  # noqa: E731
        memory = ticket.fetch(staged.manifest, Desk(check=check, room=room, links=self._links, views=self._views))
        if check.problem:
            raise ValueError(f"{check.problem}; they were dropped.")
        if staged.lends:  # what the policy here writes into it must not reach the others
            memory = self._loan(staged).view(len(memory), self._views)
        staged.weights = unpack(staged.manifest, memory, room)
        return check.found

    def _loan(self, staged: _Staged) -> SharedTicket:
        return replace(staged.rooms[0].ticket(self._rooms.tokens), share=NOTHING)

    def _room(self, staged: _Staged, num_bytes: int) -> Bytes:
        with self._lock:
            busy = {room.token for each in self._used() for room in each.rooms}
            room = self._rooms.take(num_bytes, busy | staged.lent)
            staged.rooms.append(room)
            return room.memory

    def _used(self) -> list[_Staged]:
        """All that may not be written over."""
        self._given_up = [(staged, task) for staged, task in self._given_up if not task.is_done]
        tasks = [staged for staged, _ in [*self._given_up, *([self._task] if self._task is not None else [])]]
        kept = [each for each in (self._acting, self._loading, self._next) if each is not None] + tasks
        bases = [self._base, *(each.base for each in kept)]
        return kept + [each for each in bases if each is not None]

    def _drop_staged(self) -> None:
        if self._task is not None:
            self._given_up.append(self._task)
            self._task = None
