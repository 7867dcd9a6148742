"""A broadcast reaches one receiver of each machine; the others there map what that one has received and checked. So the
bytes cross the network, and are kept, once a machine."""

from collections.abc import Sequence
from functools import partial

from vla_rlaif.dist.answers import WorkerFailure, outcomes
from vla_rlaif.dist.cluster import Handle
from vla_rlaif.dist.delivery import Ballot, Fetches, HasReceiver, Key, Limits, key_of
from vla_rlaif.dist.manifest import Manifest
from vla_rlaif.dist.sender import Offer
from vla_rlaif.dist.shared_memory import SharedTicket
from vla_rlaif.dist.staging import Vote


class Relays:
    """Who lends to whom. Remembers who could not map what was lent to it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._apart: set[Key] = set()

    def groups(self, handles: Sequence[Handle[HasReceiver]]) -> list[list[Handle[HasReceiver]]]:
        """Those together that can map each other's memory; the first of each group is to lend."""
        groups: dict[str, list[Handle[HasReceiver]]] = {}
        for handle in handles:
            machine = "" if key_of(handle) in self._apart else handle.place.memory
            groups.setdefault(machine or handle.name, []).append(handle)
        return list(groups.values())

    def lend(
        self, manifest: Manifest, groups: Sequence[Sequence[Handle[HasReceiver]]], ballot: Ballot
    ) -> list[Handle[HasReceiver]]:
        """Let the others of each group map what its first has. Those that live, and still lack it."""
        groups = [group for group in groups if len(group) > 1]
        asked = [group[0].ask(partial(_lend, serial=manifest.serial), urgent=True) for group in groups]
        lent = outcomes(asked, self._limits.bucket_s, "lending weights")
        left, refused = list[Handle[HasReceiver]](), list[Handle[HasReceiver]]()
        begun: list[tuple[dict[str, Handle[HasReceiver]], Fetches]] = []
        for (first, *others), ticket in zip(groups, lent, strict=True):
            if isinstance(ticket, WorkerFailure):
                ballot.count(first.name, ticket)
                left += others
                continue
            ballot.lent.add(ticket.token)
            offer, named = Offer(manifest=manifest, tickets={"shared_memory": ticket}), {o.name: o for o in others}
            begun.append((named, Fetches(offer, dict.fromkeys(named, "shared_memory"), named)))
        for named, fetches in begun:
            found = fetches.finish(ballot, self._limits)
            refused += [named[name] for name, got in found.items() if isinstance(got, Vote) and not got.is_yes]
        self._apart |= {key_of(handle) for handle in refused}
        return left + refused


def _lend(worker: HasReceiver, *, serial: int) -> SharedTicket:
    return worker.receiver.lend(serial)
