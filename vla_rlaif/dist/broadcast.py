"""One payload to several receivers over a process group: one group for each set of members, until it fails.

Module functions that take a worker are work for that worker.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

from vla_rlaif.dist.answers import Answer, WorkerFailure, answers, outcomes
from vla_rlaif.dist.cluster import Handle
from vla_rlaif.dist.delivery import (
    Ballot,
    HasReceiver,
    HasSender,
    Key,
    Limits,
    key_of,
    raise_mismatch,
    stage,
    vote,
)
from vla_rlaif.dist.link import LinkSpec
from vla_rlaif.dist.manifest import Manifest, ManifestError
from vla_rlaif.dist.relay import Relays
from vla_rlaif.dist.staging import Vote
from vla_rlaif.dist.tickets import LinkTicket
from vla_rlaif.dist.votes import POLL_S, collect_votes, is_yes, problem_of

ATTEMPTS = 3  # broadcasts of one payload
ABORT_S = 2.0  # seconds to answer an abort; whoever does not is left out
CHECK_S = 10.0  # seconds to compare a manifest, or to open a store
IMPORT_S = 300.0  # seconds to import torch, which a worker on a busy machine does once


class Broadcasts:
    """Broadcasts over process groups: one group for each set of members, until it fails."""

    def __init__(self, backend: Literal["gloo", "nccl", "auto"], limits: Limits, *, relays: bool) -> None:
        """``relays``: one receiver of each machine is a member, and the others there map its memory."""
        self._backend: Literal["gloo", "nccl", "auto"] = backend
        self._limits, self._relays = limits, Relays(limits) if relays else None
        self._generation = time.time_ns()  # above those of any coordinator that the workers have known before
        self._members: tuple[Key, ...] = ()
        self._ports: dict[Key, int] = {}  # of the senders' stores
        self._ready: set[Key] = set()  # have torch
        self._agreed: dict[Key, str] = {}  # the form of payload that a receiver has found right

    def run(
        self,
        manifest: Manifest,
        sender: Handle[HasSender],
        handles: Sequence[Handle[HasReceiver]],
        ballot: Ballot,
        *,
        held: frozenset[str],
    ) -> None:
        """Broadcast to all, and after a failure again to those who still answer: without relays then, so that none
        depends on another. ``held``: tokens of memory that receivers use.

        Raises:
            ManifestError: a receiver has another model. No collective operation has been entered then.
            WorkerFailure: the sender's, if it is lost.
        """
        left = self._with_torch(sender, self._checked(manifest, handles, ballot), ballot)
        relays = self._relays
        for _ in range(ATTEMPTS):
            if not left:
                return
            groups = [[handle] for handle in left] if relays is None else relays.groups(left)
            members = [group[0] for group in groups]
            found = self._once(manifest, sender, members, [len(group) > 1 for group in groups], held)
            for handle in members:
                if handle.name in found:
                    ballot.count(handle.name, found[handle.name])
            if len(found) == len(members) + 1 and all(is_yes(outcome) for outcome in found.values()):
                left = [] if relays is None else relays.lend(manifest, groups, ballot)
            else:
                waiting = [handle for group in groups for handle in group[1:]]
                left = self._abort(sender, members, ballot, found) + waiting
            relays = None

    def _checked(
        self, manifest: Manifest, handles: Sequence[Handle[HasReceiver]], ballot: Ballot
    ) -> list[Handle[HasReceiver]]:
        """Receivers that read the manifest as the sender does. Raises ManifestError for one that does not."""
        new = [handle for handle in handles if self._agreed.get(key_of(handle)) != manifest.form]
        asked = [handle.ask(partial(_check, manifest=manifest), urgent=True) for handle in new]
        for handle, outcome in zip(new, outcomes(asked, CHECK_S, "comparing the manifest"), strict=True):
            raise_mismatch(handle.name, outcome)
            if isinstance(outcome, WorkerFailure):
                ballot.problems[handle.name] = str(outcome)
            elif outcome != manifest.digest:
                raise ManifestError(f"{handle.name} reads the manifest as {outcome[:8]}, not {manifest.digest[:8]}.")
            else:
                self._agreed[key_of(handle)] = manifest.form
        return [handle for handle in handles if self._agreed.get(key_of(handle)) == manifest.form]

    def _with_torch(
        self, sender: Handle[HasSender], handles: Sequence[Handle[HasReceiver]], ballot: Ballot
    ) -> list[Handle[HasReceiver]]:
        """Receivers that have imported it, so that no deadline of a transfer counts that time."""
        from vla_rlaif.dist.process_groups import has_torch  # brings torch, which JAX runs may lack

        new = [handle for handle in (sender, *handles) if key_of(handle) not in self._ready]
        asked = [handle.ask(has_torch, urgent=True) for handle in new]
        for handle, outcome in zip(new, outcomes(asked, IMPORT_S, "importing torch"), strict=True):
            if not isinstance(outcome, WorkerFailure):
                self._ready.add(key_of(handle))
            elif handle is sender:
                raise outcome
            else:
                ballot.problems[handle.name] = str(outcome)
        return [handle for handle in handles if key_of(handle) in self._ready]

    def _once(
        self,
        manifest: Manifest,
        sender: Handle[HasSender],
        handles: Sequence[Handle[HasReceiver]],
        lend: Sequence[bool],
        held: frozenset[str],
    ) -> dict[str, Vote | WorkerFailure]:
        """The outcomes by name, the sender's among them. ``lend``: which of ``handles`` will."""
        specs = self._specs(sender, handles)
        tickets = [LinkTicket(spec=s, lends=lends, lent=held) for s, lends in zip(specs, (False, *lend), strict=True)]
        polls: dict[str, Answer[Vote | None]] = {}
        for handle, ticket in zip(handles, tickets[1:], strict=True):
            polls[handle.name] = handle.ask(partial(stage, manifest=manifest, ticket=ticket), urgent=True)
        polls[sender.name] = sender.ask(partial(_send, serial=manifest.serial, ticket=tickets[0]), urgent=True)
        receivers = {handle.name: handle for handle in handles}

        def again(name: str) -> Answer[Vote | None]:
            if name == sender.name:
                return sender.ask(partial(_sent, serial=manifest.serial), urgent=True)
            return receivers[name].ask(partial(vote, serial=manifest.serial), urgent=True)

        return collect_votes(
            polls,
            again,
            doing="a broadcast of weights",
            silent_s=self._limits.bucket_s,
            timeout_s=self._limits.seconds(manifest.num_bytes),
            until_failure=True,
        )

    def _specs(self, sender: Handle[HasSender], handles: Sequence[Handle[HasReceiver]]) -> list[LinkSpec]:
        """One for each member, the sender first; a new generation if the members are not those of the last time."""
        from vla_rlaif.dist.process_groups import GroupSpec, open_store

        members = (sender, *handles)
        identity = tuple(key_of(each) for each in members)
        if identity != self._members:
            self._generation, self._members = self._generation + 1, identity
        if (source := key_of(sender)) not in self._ports:
            [port] = answers([sender.ask(open_store, urgent=True)], CHECK_S, "opening the store of a process group")
            self._ports[source] = port
        gpus = {(each.place.node, each.place.gpus[:1]) for each in members if each.place.gpus}
        fitting: Literal["gloo", "nccl"] = "nccl" if len(gpus) == len(members) else "gloo"
        return [
            GroupSpec(
                generation=self._generation,
                address=sender.place.address,
                port=self._ports[source],
                rank=rank,
                size=len(members),
                own_address=each.place.address,
                backend=fitting if self._backend == "auto" else self._backend,
                bucket_bytes=self._limits.bucket_bytes,
                timeout_s=self._limits.bucket_s,
            )
            for rank, each in enumerate(members)
        ]

    def _abort(
        self,
        sender: Handle[HasSender],
        handles: Sequence[Handle[HasReceiver]],
        ballot: Ballot,
        found: dict[str, Vote | WorkerFailure],
    ) -> list[Handle[HasReceiver]]:
        """End the group for everybody; the receivers that still answer. What they have staged is dropped."""
        generation, self._members = self._generation, ()
        asked = [handle.ask(partial(_give_up, generation=generation), urgent=True) for handle in handles]
        answers([sender.ask(partial(_stop_sending, generation=generation), urgent=True)], CHECK_S, "ending a broadcast")
        why = next((problem_of(each) for each in found.values() if not is_yes(each)), "an end failed")
        left = []
        for handle, outcome in zip(handles, outcomes(asked, ABORT_S, "ending a broadcast"), strict=True):
            ballot.yes.discard(handle.name)
            ballot.problems.setdefault(handle.name, why)
            if isinstance(outcome, WorkerFailure):
                ballot.problems[handle.name] = str(outcome)
            else:
                left.append(handle)
        return left


def _check(worker: HasReceiver, *, manifest: Manifest) -> str:
    return worker.receiver.check(manifest)


def _give_up(worker: HasReceiver, *, generation: int) -> None:
    worker.receiver.abort(generation)


def _send(worker: HasSender, *, serial: int, ticket: LinkTicket) -> Vote | None:
    worker.sender.send(serial, ticket.spec)
    return worker.sender.sent(serial, POLL_S)


def _sent(worker: HasSender, *, serial: int) -> Vote | None:
    return worker.sender.sent(serial, POLL_S)


def _stop_sending(worker: HasSender, *, generation: int) -> None:
    worker.sender.abort(generation)
