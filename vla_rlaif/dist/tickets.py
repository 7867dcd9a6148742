"""How a receiver gets at the bytes of a payload. A ticket is plain data that travels to it and fetches them there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from vla_rlaif.dist.cluster import StoredValue
from vla_rlaif.dist.link import Links, LinkSpec
from vla_rlaif.dist.manifest import BLOCK, Bytes, Manifest
from vla_rlaif.dist.payload import checksums
from vla_rlaif.dist.views import Views

OBJECT_S = 60.0  # seconds to get an object that the sender has put


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the blocks an end checks: from the ``start``-th to the ``stop``-th of ``of`` equal parts."""

    start: int
    stop: int
    of: int


WHOLE = Share(start=0, stop=1, of=1)
NOTHING = Share(start=0, stop=0, of=1)


class Check:
    """Compares what has arrived with the manifest, block by block, while the rest is on its way."""

    def __init__(self, manifest: Manifest, *, threads: int) -> None:
        self._manifest, self._threads, self._done = manifest, threads, 0
        self._blocks = range(len(manifest.checksums))
        self._found: list[int] = []

    def only(self, share: Share) -> None:
        """Others check the other blocks of the same memory, or have done so."""
        num = len(self._blocks)
        self._blocks = range(num * share.start // share.of, num * share.stop // share.of)
        self._done = self._blocks.start * BLOCK

    def up_to(self, memory: Bytes, num_bytes: int) -> None:
        """The first ``num_bytes`` bytes of ``memory`` have arrived."""
        stop = num_bytes if num_bytes == len(memory) else num_bytes // BLOCK * BLOCK
        stop = min(stop, self._blocks.stop * BLOCK)
        self._found += checksums(memory[self._done : stop], threads=self._threads)
        self._done = stop

    @property
    def found(self) -> tuple[int, ...]:
        return tuple(self._found)

    @property
    def problem(self) -> str:
        """Empty if all is as it was sent."""
        sent = self._manifest.checksums
        if len(self._found) != len(self._blocks):
            return f"{len(self._found)} of {len(self._blocks)} blocks have arrived"
        wrong = [i for i, found in zip(self._blocks, self._found, strict=True) if found != sent[i]]
        if not wrong:
            return ""
        return f"{len(wrong)} of {len(self._blocks)} blocks, from block {wrong[0]} on, are not what was sent"


@dataclass(frozen=True, kw_only=True)
class Desk:
    """What a ticket finds at the receiver."""

    check: Check
    room: Callable[[int], Bytes]  # memory of so many bytes that nobody uses
    links: Links
    views: Views = field(default_factory=Views)  # of the memory of others


@runtime_checkable
class Ticket(Protocol):
    @property
    def token(self) -> str:
        """Of the sender's memory that the receiver goes on using; empty: none."""
        ...

    def fetch(self, manifest: Manifest, desk: Desk) -> Bytes:
        """The payload, all of which ``desk.check`` has seen."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinkTicket:
    """A payload that is broadcast to all members of a link."""

    spec: LinkSpec
    lends: bool = False  # others of the receiver's machine will map it
    lent: frozenset[str] = frozenset()  # tokens of what they use already
    token: str = ""

    def fetch(self, manifest: Manifest, desk: Desk) -> Bytes:
        memory = desk.room(manifest.num_bytes)
        desk.links.join(self.spec).receive(memory, lambda num_bytes: desk.check.up_to(memory, num_bytes))
        return memory


@dataclass(frozen=True, kw_only=True)
class ObjectTicket:
    """A payload in the cluster's object store."""

    value: StoredValue
    token: str = ""

    def fetch(self, manifest: Manifest, desk: Desk) -> Bytes:
        memory = self.value.take(OBJECT_S)
        if memory.flags.writeable:  # the store has kept the sender's own memory, which will change
            room = desk.room(manifest.num_bytes)
            room[:] = memory
            memory = room
        desk.check.up_to(memory, len(memory))
        return memory
