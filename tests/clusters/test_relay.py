"""One receiver of each machine gets the broadcast, and lends it to the others there."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from sync_ends import FROZEN_BYTES, TRAINED_BYTES, Actor, a_sync, assert_equal, looked_at, play, played, stepped, values

from vla_rlaif.dist.answers import answers
from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.shared_memory import SharedTicket
from vla_rlaif.dist.tickets import LinkTicket


def note_tickets(actor: Actor) -> list[object]:
    """A list that grows by every ticket that it gets."""
    tickets, stage = list[object](), actor.receiver.stage

    def noted(manifest, ticket):
        tickets.append(ticket)
        stage(manifest, ticket)

    actor.receiver.stage = noted
    return tickets


def watched(actors) -> list[list[object]]:
    return answers(actors.all(note_tickets), 5.0, "preparing")


def kinds(tickets: list[list[object]]) -> list[list[str]]:
    return [[type(ticket).__name__ for ticket in each] for each in tickets]


def put_on(actors, machines: str) -> None:
    """Pretend that the receivers are on these machines."""
    for handle, machine in zip(actors.handles, machines, strict=True):
        handle._context = replace(handle._context, place=replace(handle.place, memory=machine))


def test_one_of_each_machine_is_sent_to(cluster, tmp_path):
    sync, learners, actors = a_sync(cluster, "auto", tmp_path, receivers=5)
    put_on(actors, "aabba")
    tickets = watched(actors)
    for version in range(3):
        result = sync.publish()
        assert (result.ok, result.stale, result.transport) == (True, (), "relay")
        assert result.num_bytes == TRAINED_BYTES + (0 if version else FROZEN_BYTES)
        for acting, weights in played(actors):
            assert acting == version
            assert_equal(weights, version)
        stepped(learners)
    sent, mapped = ["LinkTicket"] * 4, ["SharedTicket"] * 4  # the frozen weights, and three versions
    assert kinds(tickets) == [sent, mapped, sent, mapped, mapped]


def test_one_that_joins_late_is_sent_to(cluster, tmp_path):
    sync, _, actors = a_sync(cluster, "relay", tmp_path, receivers=3)
    sync.publish()
    actors.handles[2].kill()
    again = actors.restart(actors.handles[2])
    [tickets] = answers([again.ask(note_tickets)], 5.0, "preparing")
    assert sync.catch_up().stale == ()
    assert kinds([tickets]) == [["LinkTicket", "LinkTicket"]]
    assert_equal(answers([again.ask(play)], 5.0, "playing")[0][1], 0)


class Writing(Actor):
    """Shares the memory it is given, and writes into it."""

    def load(self, weights, version):
        self.weights = weights
        self.loaded.append(version)
        weights["head/kernel"][:] = -1.0


class Reading(Actor):
    def load(self, weights, version):
        self.weights = weights
        self.loaded.append(version)


def make_mixed(context: WorkerContext, *, writer: int) -> Actor:
    return (Writing if context.index == writer else Reading)(context, threads=1)


@pytest.mark.parametrize("writer", [0, 1])  # the one that lends, and one that borrows
def test_what_one_writes_is_its_own(cluster, tmp_path, writer):
    sync, learners, actors = a_sync(cluster, "relay", tmp_path, receivers=3, make=partial(make_mixed, writer=writer))
    for version in range(6):  # buffers are used again
        assert sync.publish().stale == ()
        for i, (acting, weights) in enumerate(played(actors)):
            assert acting == version
            if i == writer:
                assert np.all(weights["head/kernel"] == -1.0)
            else:
                assert_equal(weights, version)
        stepped(learners)


def test_what_is_lent_is_not_written_over(cluster, tmp_path):
    """A borrower acts with an old version while its lender goes through as many as there are buffers."""
    make = partial(make_mixed, writer=-1)
    sync, learners, actors = a_sync(cluster, "relay", tmp_path, receivers=2, make=make)
    sync.publish()
    played(actors)
    for version in range(1, 8):
        stepped(learners)
        assert sync.publish().stale == ()
        [(acting, weights)] = answers([actors.handles[0].ask(play)], 5.0, "playing")
        assert acting == version
        assert_equal(weights, version)
        assert_equal(looked_at(actors)[1][1].weights, 0)


def lose_the_lender(actor: Actor) -> None:
    stage = actor.receiver.stage

    def elsewhere(manifest, ticket):
        if isinstance(ticket, SharedTicket):
            ticket = replace(ticket, pid=2**22 - 1, token="another")
        stage(manifest, ticket)

    actor.receiver.stage = elsewhere


def test_who_cannot_map_is_sent_to(cluster, tmp_path):
    sync, learners, actors = a_sync(cluster, "relay", tmp_path, receivers=3)
    sync.publish()
    stepped(learners)
    answers([actors.handles[1].ask(lose_the_lender)], 5.0, "preparing")
    tickets = watched(actors)
    assert sync.publish().stale == ()
    assert kinds(tickets) == [["LinkTicket"], ["SharedTicket", "LinkTicket"], ["SharedTicket"]]
    for acting, weights in played(actors):
        assert acting == 1
        assert_equal(weights, 1)
    stepped(learners)
    assert sync.publish().stale == ()
    assert kinds(tickets)[1] == ["SharedTicket", "LinkTicket", "LinkTicket"]  # it is not tried again


def break_off(actor: Actor) -> None:
    stage = actor.receiver.stage

    def refuse(manifest, ticket):
        if isinstance(ticket, LinkTicket) and ticket.lends:
            raise RuntimeError("not today")
        stage(manifest, ticket)

    actor.receiver.stage = refuse


def test_when_the_lender_fails_all_are_sent_to(cluster, tmp_path):
    sync, learners, actors = a_sync(cluster, "relay", tmp_path, receivers=3)
    sync.publish()
    stepped(learners)
    answers([actors.handles[0].ask(break_off)], 5.0, "preparing")
    tickets = watched(actors)
    assert sync.publish().stale == ()
    assert kinds(tickets) == [["LinkTicket", "LinkTicket"], ["LinkTicket"], ["LinkTicket"]]
    assert [acting for acting, _ in played(actors)] == [1, 1, 1]


def test_the_lender_dies_after_it_has_received(cluster, tmp_path):
    sync, learners, actors = a_sync(cluster, "relay", tmp_path, receivers=3)
    sync.publish()
    stepped(learners)
    lender = actors.handles[0]
    answers([lender.ask(partial(refuse_to_lend, die=lender.kill))], 5.0, "preparing")
    result = sync.publish()
    assert (result.ok, result.stale) == (True, ("rollout/0",)) and "killed" in result.problems[0]
    for handle in actors.handles[1:]:
        [(acting, weights)] = answers([handle.ask(play)], 5.0, "playing")
        assert acting == 1
        assert_equal(weights, 1)
    actors.restart(lender)
    assert sync.catch_up().stale == ()
    assert [acting for acting, _ in played(actors)] == [1, 1, 1]


def refuse_to_lend(actor: Actor, *, die) -> None:
    def lend(serial):
        del serial
        die()

    actor.receiver.lend = lend  # pyright: ignore[reportAttributeAccessIssue]


def test_rounded_weights_are_lent_too(cluster, tmp_path):
    sync, _, actors = a_sync(cluster, "relay", tmp_path, receivers=2, wire="bfloat16")
    assert sync.publish().stale == ()
    (_, first), (_, second) = played(actors)
    exact = values({"head/kernel": (700, 500)}, 0)["head/kernel"]
    for weights in (first, second):
        np.testing.assert_allclose(weights["head/kernel"], exact, rtol=2**-8)
        assert weights["stem/steps"] == 8
    np.testing.assert_array_equal(first["head/kernel"], second["head/kernel"])
