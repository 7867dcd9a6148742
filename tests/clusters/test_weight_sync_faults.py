"""GroupSync when something goes wrong: learners that raise, payloads that are damaged, receivers that die."""

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sync_ends import (
    FROZEN_BYTES,
    TRAINED,
    TRAINED_BYTES,
    TRANSPORTS,
    Actor,
    LearnerEnd,
    a_sync,
    assert_equal,
    make_actor,
    make_learner,
    play,
    played,
    stepped,
    values,
)

from vla_rlaif.cluster_config import SyncConfig
from vla_rlaif.dist.answers import WorkerError, WorkerLost, answers
from vla_rlaif.dist.fleet import Health
from vla_rlaif.dist.manifest import BLOCK
from vla_rlaif.dist.weight_sync import GroupSync


def test_a_learner_that_fails_is_the_callers_error(cluster, tmp_path):
    learners = cluster.start("learner", make_learner, 1)
    actors = cluster.start("rollout", make_actor, 1)
    sync = GroupSync(learners, actors, SyncConfig())
    assert sync.publish().ok
    answers([learners.rank0(break_table)], 5.0, "breaking")
    with pytest.raises(WorkerError, match="AttributeError"):
        sync.publish()
    learners.kill()
    with pytest.raises(WorkerLost, match="learner/0"):
        sync.publish()
    assert played(actors)[0][0] == 0


def break_table(learner: LearnerEnd) -> None:
    learner.table.shapes = None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_payload_that_is_damaged_is_not_committed(cluster, tmp_path):
    """The file is written over between being offered and being read."""
    sync, learners, actors = a_sync(cluster, "disk", tmp_path, receivers=2)
    sync.publish()
    played(actors)
    stepped(learners)
    answers([actors.handles[1].ask(partial(spoil, folder=tmp_path))], 5.0, "spoiling")
    result = sync.publish()
    assert result.stale == ("rollout/1",) and result.ok
    assert "not what was sent" in result.problems[0] and result.problems[0].endswith("they were dropped.")
    assert [acting for acting, _ in played(actors)] == [1, 0]
    assert actors.health.having(Health.STALE) == ("rollout/1",)
    answers([actors.handles[1].ask(heal)], 5.0, "healing")
    again = sync.catch_up()
    assert (again.ok, again.stale, again.version) == (True, (), 1)
    for acting, weights in played(actors):
        assert acting == 1
        assert_equal(weights, 1)


def spoil(actor: Actor, *, folder: Path) -> None:
    receiver, stage = actor.receiver, actor.receiver.stage

    def spoilt(manifest, ticket):
        entry = manifest.entries[2]  # head/kernel
        data = ticket.path.read_bytes()
        path = folder / "spoilt.safetensors"
        at = data.index(values(TRAINED, 1)["head/kernel"].tobytes()[:64])
        assert entry.name == "head/kernel"
        path.write_bytes(data[:at] + bytes(64) + data[at + 64 :])
        stage(manifest, replace(ticket, path=path))

    receiver.stage = spoilt


def heal(actor: Actor) -> None:
    del actor.receiver.stage


@pytest.mark.parametrize("is_one_silent", [False, True])
@pytest.mark.parametrize("block", range(6))
def test_damage_that_one_end_sees_keeps_all_from_committing(cluster, tmp_path, block, is_one_silent):
    """Three receivers look at two of the six blocks each. If one fails, the others look at its blocks too."""
    sync, learners, actors = a_sync(cluster, "shared_memory", tmp_path, receivers=3)
    sync.publish()
    played(actors)
    stepped(learners)
    answers([learners.rank0(partial(spoil_memory, block=block))], 5.0, "spoiling")
    if is_one_silent:
        answers([actors.handles[block // 2].ask(refuse)], 5.0, "preparing")
    result = sync.publish()
    assert (result.ok, result.stale) == (False, ("rollout/0", "rollout/1", "rollout/2"))
    assert sum(f"from block {block} on, are not what was sent" in problem for problem in result.problems) >= 1
    assert [acting for acting, _ in played(actors)] == [0, 0, 0]
    answers([learners.rank0(stop_spoiling)], 5.0, "healing")
    if is_one_silent:
        answers([actors.handles[block // 2].ask(heal)], 5.0, "healing")
    assert sync.publish().stale == ()
    for acting, weights in played(actors):
        assert acting == 1
        assert_equal(weights, 1)


def test_the_part_of_one_that_fails_is_checked_by_the_others(cluster, tmp_path):
    sync, learners, actors = a_sync(cluster, "shared_memory", tmp_path, receivers=3)
    sync.publish()
    played(actors)
    stepped(learners)
    answers([actors.handles[1].ask(refuse)], 5.0, "preparing")
    seen = answers([actors.handles[i].ask(note_checked) for i in (0, 2)], 5.0, "preparing")
    result = sync.publish()
    assert (result.ok, result.stale) == (True, ("rollout/1",)) and "not today" in result.problems[0]
    assert [acting for acting, _ in played(actors)] == [1, 0, 1]
    assert [ballots[-1] for ballots in seen] == [3, 3]  # of six, the two of the one that refused among them


def spoil_memory(learner: LearnerEnd, *, block: int) -> None:
    sender, gather = learner.sender, learner.sender.gather

    def spoilt(order):
        offer = gather(order)
        assert offer is not None and sender._trained is not None
        sender._trained.segment.memory[block * BLOCK + 100] ^= 1
        return offer

    sender.gather = spoilt


def stop_spoiling(learner: LearnerEnd) -> None:
    del learner.sender.gather


def refuse(actor: Actor) -> None:
    def stage(manifest, ticket):
        raise RuntimeError("not today")

    actor.receiver.stage = stage


def note_checked(actor: Actor) -> list[int]:
    """A list that grows by the number of blocks that it has checked whenever it votes."""
    counts, vote = list[int](), actor.receiver.vote

    def counted(serial, wait_s):
        found = vote(serial, wait_s)
        if found is not None:
            counts.append(len(found.checksums))
        return found

    actor.receiver.vote = counted
    return counts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_receiver_does_not_keep_the_others(cluster, tmp_path, transport):
    sync, learners, actors = a_sync(cluster, transport, tmp_path, receivers=3)
    sync.publish()
    stepped(learners)
    actors.handles[1].kill()
    begun = time.monotonic()
    result = sync.publish()
    assert time.monotonic() - begun < 15  # the deadline of a bucket is 20
    assert (result.ok, result.stale, result.version) == (True, ("rollout/1",), 1)
    assert "dead" in result.problems[0]
    for i in (0, 2):
        [(acting, weights)] = answers([actors.handles[i].ask(play)], 5.0, "playing")
        assert acting == 1
        assert_equal(weights, 1)

    again = actors.restart(actors.handles[1])  # it has what it was built with, which does not count
    assert actors.health.having(Health.STALE) == ("rollout/1",)
    result = sync.catch_up()
    assert (result.ok, result.stale, result.version) == (True, (), 1)
    assert result.num_bytes == TRAINED_BYTES + FROZEN_BYTES
    assert actors.health.having(Health.STALE) == ()
    [(acting, weights)] = answers([again.ask(play)], 5.0, "playing")
    assert acting == 1
    assert_equal(weights, 1)
    stepped(learners)
    assert sync.publish().num_bytes == TRAINED_BYTES
    assert [acting for acting, _ in played(actors)] == [2, 2, 2]


@pytest.mark.parametrize(("transport", "rounds"), [("shared_memory", 25), ("relay", 12), ("process_group", 8)])
def test_kills_at_random_moments(cluster, tmp_path, transport, rounds):
    """Whoever is not said to be stale has exactly what was sent; whoever lives after that can be brought up to date."""
    sync, learners, actors = a_sync(cluster, transport, tmp_path, receivers=4)
    rng, seconds = np.random.default_rng(0), 0.02
    for version in range(rounds):
        victims = rng.choice(4, size=int(rng.integers(0, 3)), replace=False)
        timers = [threading.Timer(rng.uniform(0, 1.5 * seconds), actors.handles[i].kill) for i in victims]
        for timer in timers:
            timer.start()
        begun = time.monotonic()
        result = sync.publish()
        seconds = 0.7 * seconds + 0.3 * min(time.monotonic() - begun, 0.2)
        assert time.monotonic() - begun < 10
        for timer in timers:
            timer.join()
        assert set(result.stale) <= {f"rollout/{i}" for i in victims} and result.version == version
        for handle in actors.handles:
            if actors.health.health(handle.name) is Health.DEAD:
                actors.restart(handle)
        assert sync.catch_up().stale == ()
        for acting, weights in played(actors):
            assert acting == version
            assert_equal(weights, version)
        stepped(learners)


def test_nobody_is_left(cluster, tmp_path):
    sync, _, actors = a_sync(cluster, "process_group", tmp_path, receivers=2)
    sync.publish()
    actors.kill()
    result = sync.publish()
    assert (result.ok, result.stale) == (False, ("rollout/0", "rollout/1"))
    for handle in actors.handles:
        actors.restart(handle)
    assert sync.catch_up().ok


def test_the_learners_ranks_get_the_same_orders(cluster, tmp_path):
    """Several ranks collect weights together: a receiver that joins late must not make them do it out of turn."""
    sync, learners, actors = a_sync(cluster, "process_group", tmp_path, ranks=3, receivers=1)
    sync.publish()
    actors.handles[0].kill()
    actors.restart(actors.handles[0])
    asked = learners.handles[1].ask(wait_for_nothing)  # a rank that is busy: a collective would wait for it
    assert sync.catch_up().ok
    assert not asked.done()
    answers([asked], 10.0, "sleeping")
    assert played(actors)[0][0] == 0


def wait_for_nothing(learner: LearnerEnd) -> None:
    del learner
    time.sleep(3)
