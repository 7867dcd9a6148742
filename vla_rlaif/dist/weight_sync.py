"""The coordinator of a weight sync: from one learner to all receivers, wherever they are.

    gather and pack -> every receiver checks the manifest, fetches and votes -> commit -> each adopts when it plays next

Nothing acts before all of it is there and checked; whoever fails goes on with what it had, and is STALE. A broadcast
that fails is ended for everybody at once and begun again, under another generation, with those who still answer.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from vla_rlaif.cluster_config import SyncConfig
from vla_rlaif.dist.answers import WorkerFailure, answers, outcomes
from vla_rlaif.dist.broadcast import Broadcasts
from vla_rlaif.dist.cluster import Handle, WorkerGroup
from vla_rlaif.dist.delivery import Ballot, Fetches, HasReceiver, HasSender, Key, Limits, key_of
from vla_rlaif.dist.fleet import Health
from vla_rlaif.dist.sender import Offer, Order, Transport
from vla_rlaif.dist.staging import Holding
from vla_rlaif.types import SyncResult

GATHER_S = 3600.0  # seconds for a learner to finish what it is doing, and to collect its weights


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun


class GroupSync[L: HasSender, R: HasReceiver]:
    """A WeightSync over worker groups. ``learners`` are the ranks of one learner; the first of them sends.

    ``publish`` and ``catch_up`` may be called from any thread; they wait for each other.
    """

    def __init__(
        self,
        learners: WorkerGroup[L],
        receivers: WorkerGroup[R],
        config: SyncConfig,
        *,
        folder: Path | None = None,
    ) -> None:
        """``folder``: one that all nodes see, for the transport ``disk``."""
        self._learners, self._receivers = learners, receivers
        self._config, self._folder = config, folder
        self._limits = Limits(bucket_bytes=config.bucket_mb << 20, bucket_s=config.timeout_s)
        self._broadcasts = Broadcasts(config.backend, self._limits, relays=config.transport in ("auto", "relay"))
        self._lock = threading.Lock()
        self._serial = 0
        self._published: int | None = None  # serial of the newest publication that was gathered
        self._source: Key | None = None  # whose it is
        self._base: str | None = None  # name of its frozen weights; empty: it has none
        self._is_kept = False  # they are still packed there
        self._bases: dict[Key, str] = {}  # frozen weights of each receiver
        self._held: dict[Key, frozenset[str]] = {}  # memory of senders that each receiver may be using
        self._has: dict[Key, int] = {}  # the publication that each receiver has committed

    def publish(self, *, averaged: bool = False) -> SyncResult:
        """The newest weights, or their running average, to all receivers that can be reached.

        Raises:
            ManifestError: a receiver has another model than the learner.
            WorkerFailure: the learner's.
        """
        with self._lock:
            if self._source != (sender := key_of(self._learners.handles[0])):
                self._source, self._published, self._base, self._is_kept = sender, None, None, False
            return self._run(self._gather, self._new_serial(), averaged=averaged)

    def catch_up(self) -> SyncResult:
        """What was published last, to those who have missed it; the result is about all receivers.

        Raises:
            ManifestError, WorkerFailure: as ``publish``.
            ValueError: the learner was restarted, or has published nothing yet.
        """
        with self._lock:
            if self._published is None or self._source != key_of(self._learners.handles[0]):
                raise ValueError("The learner has published nothing since it was started: publish() comes first.")
            return self._run(self._gather_again, self._published, averaged=False)

    def _run(self, gather: Callable[[Order], Offer], serial: int, *, averaged: bool) -> SyncResult:
        watch, ballot = Stopwatch(), Ballot()
        handles = self._reachable(serial, ballot)
        order = self._order(serial, handles, averaged=averaged)
        with watch.phase("gather"):
            frozen = self._gather_frozen(replace(order, serial=self._new_serial()), handles)
        with watch.phase("transfer"):
            if frozen is not None:
                self._deliver_frozen(frozen, handles, ballot)
        with watch.phase("gather"):
            offer = gather(order)
        self._published = serial
        handles = [handle for handle in handles if self._bases.get(key_of(handle)) == self._base]
        with watch.phase("transfer"):
            self._deliver(offer, handles, ballot)
        with watch.phase("commit"):
            self._commit(offer, [handle for handle in handles if handle.name in ballot.yes], ballot)
        stale = [each.name for each in self._receivers.handles if self._has.get(key_of(each)) != serial]
        return SyncResult(
            version=offer.manifest.version,
            ok=len(stale) < len(self._receivers.handles),
            stale=tuple(stale),
            problems=tuple(ballot.problems.get(name, "it was not reached") for name in stale),
            num_bytes=offer.manifest.num_bytes + (0 if frozen is None else frozen.manifest.num_bytes),
            gather_s=watch.seconds["gather"],
            transfer_s=watch.seconds["transfer"],
            commit_s=watch.seconds["commit"],
            transport="+".join(sorted(order.transports)),
        )

    def _reachable(self, serial: int, ballot: Ballot) -> list[Handle[R]]:
        """Receivers that answer and do not have this publication. What is known of the dead is forgotten."""
        states = {handle: self._receivers.health.health(handle.name) for handle in self._receivers.handles}
        living = {key_of(handle) for handle, state in states.items() if state is not Health.DEAD}
        for known in (self._bases, self._held, self._has):
            for key in known.keys() - living:
                del known[key]
        silent = [handle for handle, state in states.items() if state in (Health.DEAD, Health.SUSPECT)]
        ballot.problems |= {handle.name: f"{handle.name} is {states[handle]}" for handle in silent}
        return [each for each in states if each not in silent and self._has.get(key_of(each)) != serial]

    def _order(self, serial: int, handles: Sequence[Handle[R]], *, averaged: bool) -> Order:
        transports: frozenset[Transport] = frozenset(self._transport(handle) for handle in handles)
        return Order(
            serial=serial,
            averaged=averaged,
            wire=self._config.wire,
            transports=transports,
            held=self._held_tokens(),
            # Receivers that map it share its memory. Ranks collect it together, which must not cross an update.
            keep_frozen="shared_memory" in transports or len(self._learners.handles) > 1,
            folder=self._folder,
        )

    def _transport(self, handle: Handle[R]) -> Transport:
        if self._config.transport != "auto":
            return self._config.transport
        here = self._learners.handles[0].place.memory
        return "shared_memory" if here and handle.place.memory == here else "relay"

    def _gather_frozen(self, order: Order, handles: Sequence[Handle[R]]) -> Offer | None:
        """The frozen weights, if a receiver lacks them."""
        if self._base is not None and all(self._bases.get(key_of(handle)) == self._base for handle in handles):
            return None
        offer = None
        if self._is_kept and self._base:
            work = partial(_again, order=order, is_base=True)
            [offer] = answers([self._learners.rank0(work, urgent=True)], GATHER_S, "finding the frozen weights")
        elif self._base != "":
            offer = answers(
                self._learners.all(partial(_gather_frozen, order=order)), GATHER_S, "collecting the frozen weights"
            )[0]
            self._base, self._is_kept = "" if offer is None else offer.manifest.base, True
        if offer is None:
            self._bases |= {key_of(handle): "" for handle in handles}
        return offer

    def _gather(self, order: Order) -> Offer:
        asked = self._learners.all(partial(_gather, order=order))
        offer = answers(asked, GATHER_S, "collecting the weights")[0]
        assert offer is not None, f"{self._learners.handles[0].name} was built with is_root=False"
        self._is_kept = self._is_kept and order.keep_frozen
        return offer

    def _gather_again(self, order: Order) -> Offer:
        work = partial(_again, order=order, is_base=False)
        return answers([self._learners.rank0(work, urgent=True)], GATHER_S, "finding the weights")[0]

    def _deliver_frozen(self, offer: Offer, handles: Sequence[Handle[R]], ballot: Ballot) -> None:
        lacking = [handle for handle in handles if self._bases.get(key_of(handle)) != self._base]
        got = Ballot()
        self._deliver(offer, lacking, got)
        ballot.problems |= got.problems
        ready = [key_of(handle) for handle in lacking if handle.name in got.yes]
        self._bases |= dict.fromkeys(ready, offer.manifest.base)
        self._held |= {key: self._held.get(key, frozenset()) | got.lent for key in ready}

    def _deliver(self, offer: Offer, handles: Sequence[Handle[R]], ballot: Ballot) -> None:
        """To all of them at once, each by its transport."""
        ways: dict[Handle[R], Transport] = {handle: self._transport(handle) for handle in handles}
        told = [handle for handle, way in ways.items() if way in ("relay", "process_group")]
        fetching = {handle.name: handle for handle in handles if handle not in told}
        fetches = Fetches(offer, {handle.name: way for handle, way in ways.items()}, fetching)
        if told:
            self._broadcasts.run(offer.manifest, self._learners.handles[0], told, ballot, held=self._held_tokens())
        fetches.finish(ballot, self._limits)

    def _commit(self, offer: Offer, handles: Sequence[Handle[R]], ballot: Ballot) -> None:
        """Whoever does not answer may have done it all the same: what it would use then is taken for used."""
        used = ballot.lent | {ticket.token for ticket in offer.tickets.values() if ticket.token}
        for handle in handles:
            self._held[key_of(handle)] = self._held.get(key_of(handle), frozenset()) | used
        asked = [handle.ask(partial(_commit, serial=offer.manifest.serial), urgent=True) for handle in handles]
        found = outcomes(asked, self._limits.bucket_s, "committing weights")
        version, health = offer.manifest.version, self._receivers.health
        committed = [(h, each) for h, each in zip(handles, found, strict=True) if isinstance(each, Holding)]
        if committed:
            health.commit(version)
        for handle, holding in committed:
            self._held[key_of(handle)], self._has[key_of(handle)] = holding.tokens, offer.manifest.serial
            health.holds(handle.name, handle.incarnation, version)
        ballot.problems |= {h.name: str(e) for h, e in zip(handles, found, strict=True) if isinstance(e, WorkerFailure)}
        for handle in self._receivers.handles if committed else ():
            if self._has.get(key_of(handle)) != offer.manifest.serial:
                health.stale(handle.name, handle.incarnation)

    def _held_tokens(self) -> frozenset[str]:
        return frozenset(token for tokens in self._held.values() for token in tokens)

    def _new_serial(self) -> int:
        self._serial += 1
        return self._serial


def _gather_frozen(worker: HasSender, *, order: Order) -> Offer | None:
    return worker.sender.gather_frozen(order)


def _gather(worker: HasSender, *, order: Order) -> Offer | None:
    return worker.sender.gather(order)


def _again(worker: HasSender, *, order: Order, is_base: bool) -> Offer:
    return worker.sender.again(order, is_base=is_base)


def _commit(worker: HasReceiver, *, serial: int) -> Holding:
    return worker.receiver.commit(serial)
