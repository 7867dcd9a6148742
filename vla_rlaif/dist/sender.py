"""The learner's side of a weight sync: weights are packed once, and offered by every transport that is asked for.

Knows no Ray and no torch.
"""

import hashlib
import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from vla_rlaif.dist.cluster import ObjectStore
from vla_rlaif.dist.disk import DiskTicket, write_payload
from vla_rlaif.dist.link import Links, LinkSpec
from vla_rlaif.dist.manifest import Entry, Manifest, Wire, lay_out, layout_of
from vla_rlaif.dist.payload import num_threads, pack
from vla_rlaif.dist.shared_memory import Segment
from vla_rlaif.dist.staging import Vote
from vla_rlaif.dist.task import Task
from vla_rlaif.dist.tickets import ObjectTicket, Ticket
from vla_rlaif.types import Weights

Transport = Literal["shared_memory", "relay", "process_group", "object_store", "disk"]


@runtime_checkable
class Published(Protocol):
    """What a sender needs of a learner."""

    @property
    def version(self) -> int: ...

    def weights(self, *, averaged: bool = False) -> Weights: ...

    def trained(self, *, averaged: bool) -> Weights: ...


@runtime_checkable
class Lends(Protocol):
    """A learner that can show what is trained without copying it."""

    def lent(self, *, averaged: bool) -> Weights:
        """To be read before the next update. Collective over the ranks of a learner, as ``trained``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a sender is to prepare."""

    serial: int
    averaged: bool
    wire: Wire
    transports: frozenset[Transport]
    held: frozenset[str]  # tokens of segments that receivers still use
    keep_frozen: bool  # packed, for receivers that come later
    folder: Path | None = None  # for files


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A payload that is ready to be fetched or broadcast."""

    manifest: Manifest
    tickets: dict[Transport, Ticket]  # where receivers can fetch it by themselves


@dataclass(frozen=True, kw_only=True)
class _Packed:
    segment: Segment
    manifest: Manifest


class Sender:
    """Holds the packed weights until nobody needs them. ``is_root`` is False for all ranks of a learner but the first:
    they take part in collecting the weights, and send none."""

    def __init__(
        self,
        learner: Published,
        *,
        is_root: bool = True,
        store: ObjectStore | None = None,
        threads: int | None = None,
    ) -> None:
        self.meeting: object = None  # where the members of process groups meet; kept here as long as this object
        self._learner, self._is_root, self._store = learner, is_root, store
        self._threads = threads or num_threads()
        self._links = Links()
        self._segments: list[Segment] = []  # for what is trained, in turns
        self._trained: _Packed | None = None
        self._frozen: _Packed | None = None
        self._base: str | None = None  # name of the frozen weights; empty: nothing is frozen
        self._kept: dict[bool, dict[Transport, Ticket]] = {}  # the newest objects and files, by whether they are frozen
        self._task: tuple[int, Task[None]] | None = None

    def gather_frozen(self, order: Order) -> Offer | None:
        """Pack what never changes. Collective over the ranks of a learner; None if there is nothing, and for all ranks
        but the first."""
        names = self._learner.trained(averaged=False).keys()
        whole = self._learner.weights(averaged=False)
        if not self._is_root:
            return None
        frozen = {name: value for name, value in whole.items() if name not in names}
        if frozen:
            entries, num_bytes = lay_out(layout_of(frozen), wire=order.wire)
            segment = Segment(num_bytes)
            checksums = pack(frozen, entries, segment.memory, threads=self._threads)
            manifest = Manifest(
                serial=order.serial,
                version=self._learner.version,
                base=_name(entries, checksums),
                is_base=True,
                entries=entries,
                num_bytes=num_bytes,
                checksums=checksums,
            )
            self._frozen = _Packed(segment=segment, manifest=manifest)
        self._base = "" if self._frozen is None else self._frozen.manifest.base
        return None if self._frozen is None else self._offer(order, self._frozen)

    def gather(self, order: Order) -> Offer | None:
        """Pack what is trained. Collective over the ranks of a learner; the first gets the offer."""
        learner = self._learner
        collect = learner.lent if isinstance(learner, Lends) else learner.trained
        weights = collect(averaged=order.averaged)
        if not self._is_root:
            return None
        assert self._base is not None, "gather_frozen() comes before the first gather()"
        if not order.keep_frozen:
            self._frozen = None
        entries, num_bytes = lay_out(layout_of(weights), wire=order.wire)
        if not entries:
            raise ValueError("No parameter is trained, so there is nothing to send. Change policy.tune.")
        segment = self._free_segment(num_bytes, order.held)
        checksums = pack(weights, entries, segment.memory, threads=self._threads)
        manifest = Manifest(
            serial=order.serial,
            version=self._learner.version,
            base=self._base,
            is_base=False,
            entries=entries,
            num_bytes=num_bytes,
            checksums=checksums,
        )
        self._trained = _Packed(segment=segment, manifest=manifest)
        return self._offer(order, self._trained)

    def again(self, order: Order, *, is_base: bool) -> Offer:
        """What is packed already, under its old serial number, for those who have missed it."""
        packed = self._frozen if is_base else self._trained
        assert packed is not None, "nothing has been gathered, or it was not to be kept"
        return self._offer(order, packed)

    def send(self, serial: int, spec: LinkSpec) -> None:
        """Begin to broadcast that publication."""
        found = [each for each in (self._trained, self._frozen) if each and each.manifest.serial == serial]
        assert len(found) == 1, f"publication {serial} is not packed"
        memory = found[0].segment.memory
        self._task = serial, Task(lambda: self._links.join(spec).send(memory), name=f"send {serial}")

    def sent(self, serial: int, wait_s: float) -> Vote | None:
        """How the broadcast went; None: not yet, ask again."""
        if self._task is None or self._task[0] != serial:
            return Vote(serial=serial, problem=f"publication {serial} is not being sent")
        task = self._task[1]
        return Vote(serial=serial, problem=task.problem) if task.wait(wait_s) else None

    def abort(self, generation: int) -> None:
        """End the link of that generation."""
        self._links.abort(generation)

    def _offer(self, order: Order, packed: _Packed) -> Offer:
        manifest, segment, tickets = packed.manifest, packed.segment, dict[Transport, Ticket]()
        if "shared_memory" in order.transports:
            others = {each.token for each in self._segments} | ({self._frozen.segment.token} if self._frozen else set())
            tickets["shared_memory"] = segment.ticket(others)
        if "object_store" in order.transports:
            if self._store is None:
                raise ValueError("sync.transport is object_store, but this cluster has none; use cluster.type ray.")
            tickets["object_store"] = ObjectTicket(value=self._store.put(segment.memory))
        if "disk" in order.transports:
            if order.folder is None:
                raise ValueError("sync.transport is disk, but no folder is given that all nodes can read.")
            path = order.folder / f"{'frozen' if manifest.is_base else 'trained'}-{manifest.serial}.safetensors"
            tickets["disk"] = write_payload(path, manifest, segment.memory)
        self._keep(manifest.is_base, tickets)
        return Offer(manifest=manifest, tickets=tickets)

    def _keep(self, is_base: bool, tickets: dict[Transport, Ticket]) -> None:
        """Objects live as long as the reference to them; files are removed when newer ones are there."""
        old, self._kept[is_base] = self._kept.get(is_base, {}), tickets
        if isinstance(file := old.get("disk"), DiskTicket) and file != tickets.get("disk"):
            file.path.unlink(missing_ok=True)

    def _free_segment(self, num_bytes: int, held: Set[str]) -> Segment:
        """One that no receiver holds and that is not being sent. Others are freed when their last holder lets go."""
        sending = self._trained if self._task is not None and not self._task[1].is_done else None
        busy = held | ({sending.segment.token} if sending is not None else set())
        self._segments = [each for each in self._segments if len(each.memory) == num_bytes]
        for segment in self._segments:
            if segment.token not in busy:
                return segment
        self._segments.append(Segment(num_bytes))
        return self._segments[-1]


def _name(entries: Sequence[Entry], checksums: Sequence[int]) -> str:
    """Equal for equal weights, whichever learner has packed them."""
    text = json.dumps([[asdict(entry) for entry in entries], list(checksums)])
    return hashlib.sha256(text.encode()).hexdigest()
