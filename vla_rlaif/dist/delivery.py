"""One payload to several receivers that fetch it by themselves, and what that has in common with a broadcast.

Module functions that take a worker are work for that worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from vla_rlaif.dist.answers import Answer, WorkerError, WorkerFailure
from vla_rlaif.dist.cluster import Handle
from vla_rlaif.dist.manifest import Manifest, ManifestError
from vla_rlaif.dist.sender import Offer, Sender, Transport
from vla_rlaif.dist.shared_memory import SharedTicket
from vla_rlaif.dist.staging import Receiver, Vote
from vla_rlaif.dist.tickets import Ticket
from vla_rlaif.dist.votes import POLL_S, collect_votes, is_yes, problem_of

type Key = tuple[str, int]  # name and incarnation of a worker


def key_of(handle: Handle[Any]) -> Key:
    return handle.name, handle.incarnation


@runtime_checkable
class HasSender(Protocol):
    @property
    def sender(self) -> Sender: ...


@runtime_checkable
class HasReceiver(Protocol):
    @property
    def receiver(self) -> Receiver: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of a transfer."""

    bucket_bytes: int
    bucket_s: float  # deadline of one bucket, and longest silence of an end

    def seconds(self, num_bytes: int) -> float:
        """For all of it."""
        return self.bucket_s * max(1, -(-num_bytes // self.bucket_bytes))


@dataclass(kw_only=True)
class Ballot:
    """Who has a payload, staged and checked, and why the others do not."""

    yes: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)
    lent: set[str] = field(default_factory=set)  # tokens of memory that one receiver has lent to others

    def count(self, name: str, outcome: Vote | WorkerFailure) -> None:
        if is_yes(outcome):
            self.yes.add(name)
            self.problems.pop(name, None)
        else:
            self.yes.discard(name)
            self.problems[name] = problem_of(outcome)


class Fetches:
    """Receivers that fetch a payload by themselves, all at the same time; begun where it is made. Those who map the
    same memory check it together: if one of them fails, its part is unchecked, and the others check all of it again."""

    def __init__(self, offer: Offer, ways: Mapping[str, Transport], handles: Mapping[str, Handle[HasReceiver]]) -> None:
        """``ways``: the transport of each of ``handles``, by name."""
        self._manifest, self._handles = offer.manifest, handles
        self._mapped = offer.tickets.get("shared_memory")
        mapping = [name for name in handles if ways[name] == "shared_memory"]
        # The frozen weights are kept from a yes on.
        is_each_alone = offer.manifest.is_base or (isinstance(self._mapped, SharedTicket) and self._mapped.is_checked)
        self._together = [] if is_each_alone else mapping
        alone = {name: offer.tickets[ways[name]] for name in handles if name not in self._together}
        self._polls = self._ask(alone | self._parts())

    def finish(self, ballot: Ballot, limits: Limits) -> dict[str, Vote | WorkerFailure]:
        """The last outcome of each. Raises ManifestError."""
        polls, last = self._polls, dict[str, Vote | WorkerFailure]()
        while polls:
            found = collect_votes(
                polls,
                lambda name: self._handles[name].ask(partial(vote, serial=self._manifest.serial), urgent=True),
                doing="fetching weights",
                silent_s=limits.bucket_s,
                timeout_s=limits.seconds(self._manifest.num_bytes),
                until_failure=False,
            )
            for name, outcome in found.items():
                raise_mismatch(name, outcome)
                ballot.count(name, outcome)
            last |= found
            left = [name for name in self._together if is_yes(found[name])]
            is_checked = len(left) == len(self._together)
            self._together = left
            polls = {} if is_checked else self._ask(self._parts())
        return last

    def _parts(self) -> dict[str, Ticket]:
        if not self._together:
            return {}
        assert isinstance(self._mapped, SharedTicket), self._mapped
        return dict(zip(self._together, self._mapped.shared(len(self._together)), strict=True))

    def _ask(self, tickets: Mapping[str, Ticket]) -> dict[str, Answer[Vote | None]]:
        work = {name: partial(stage, manifest=self._manifest, ticket=ticket) for name, ticket in tickets.items()}
        return {name: self._handles[name].ask(each, urgent=True) for name, each in work.items()}


def raise_mismatch(name: str, outcome: object) -> None:
    """A worker's ManifestError is an error of the run, not of one worker."""
    if isinstance(outcome, WorkerError) and outcome.kind == ManifestError.__name__:
        raise ManifestError(f"{name}: {outcome.reason}") from outcome


def stage(worker: HasReceiver, *, manifest: Manifest, ticket: Ticket) -> Vote | None:
    worker.receiver.stage(manifest, ticket)
    return worker.receiver.vote(manifest.serial, POLL_S)


def vote(worker: HasReceiver, *, serial: int) -> Vote | None:
    return worker.receiver.vote(serial, POLL_S)
