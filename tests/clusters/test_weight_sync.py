"""GroupSync with workers that are threads: every transport, every size of the pools, and what may go wrong."""

import gc
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sync_ends import (
    FROZEN,
    FROZEN_BYTES,
    TRAINED,
    TRAINED_BYTES,
    TRANSPORTS,
    Actor,
    a_sync,
    assert_equal,
    looked_at,
    make_actor,
    make_learner,
    played,
    stepped,
    values,
)
from waiting import within

from vla_rlaif.cluster_config import SyncConfig
from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.fleet import Health
from vla_rlaif.dist.manifest import ManifestError, layout_of
from vla_rlaif.dist.weight_sync import GroupSync


@pytest.mark.parametrize("receivers", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_size_of_the_pools(cluster, tmp_path, ranks, receivers):
    for transport in ("shared_memory", "process_group"):
        sync, learners, actors = a_sync(cluster, transport, tmp_path, ranks=ranks, receivers=receivers)
        for version in range(3):
            result = sync.publish()
            assert (result.ok, result.stale, result.problems) == (True, (), ())
            assert (result.version, result.transport) == (version, transport)
            assert result.num_bytes == TRAINED_BYTES + (0 if version else FROZEN_BYTES)
            for acting, weights in played(actors):
                assert acting == version
                assert_equal(weights, version)
            stepped(learners)
        cluster.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_five_receivers_and_the_average(cluster, tmp_path, transport):
    sync, learners, actors = a_sync(cluster, transport, tmp_path, receivers=5)
    stepped(learners)
    for averaged in (False, True, False):  # the average has the version of the newest weights
        result = sync.publish(averaged=averaged)
        assert (result.ok, result.stale, result.version) == (True, (), 1)
        for acting, weights in played(actors):
            assert acting == 1
            assert_equal(weights, 1, averaged=averaged)
    assert actors.health.having(Health.HEALTHY) == tuple(f"rollout/{i}" for i in range(5))
    files = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert files == (["frozen", "trained"] if transport == "disk" else [])  # no file of an old version is left


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_old_weights_act_until_they_are_told(cluster, tmp_path, transport):
    sync, learners, actors = a_sync(cluster, transport, tmp_path, receivers=2)
    sync.publish()
    played(actors)
    before = [actor.weights for _, actor in looked_at(actors)]
    for _ in range(4):  # more than there are buffers
        stepped(learners)
        assert sync.publish().ok
        for version, actor in looked_at(actors):
            assert version == 0
            assert_equal(actor.weights, 0)
    assert [actor.weights for _, actor in looked_at(actors)] == before
    for acting, weights in played(actors):
        assert acting == 4
        assert_equal(weights, 4)
    assert [actor.loaded for _, actor in looked_at(actors)] == [[0, 4], [0, 4]]


class Sharing(Actor):
    """Loads by sharing the memory it is given."""

    def load(self, weights, version):
        self.weights = weights
        self.loaded.append(version)


def make_sharing(context: WorkerContext) -> Sharing:
    return Sharing(context, threads=1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_policy_may_share_the_memory(cluster, tmp_path, transport, wire):
    """What acts must not change while newer versions arrive, which use memory again."""
    sync, learners, actors = a_sync(cluster, transport, tmp_path, receivers=2, make=make_sharing, wire=wire)
    rng = np.random.default_rng(0)
    for _ in range(12):
        sync.publish()
        if rng.random() < 0.5:
            played(actors)
        for version, actor in looked_at(actors):
            if version >= 0:
                near = values(TRAINED, version)["head/kernel"]
                np.testing.assert_allclose(actor.weights["head/kernel"], near, rtol=2**-8 if wire == "bfloat16" else 0)
        stepped(learners)


def test_nothing_is_frozen(cluster, tmp_path):
    learners = cluster.start("learner", partial(make_learner, frozen={}), 1)
    actors = cluster.start("rollout", make_actor, 2)
    sync = GroupSync(learners, actors, SyncConfig())
    for version in range(2):
        assert sync.publish().num_bytes == TRAINED_BYTES
        for _, weights in played(actors):
            assert_equal(weights, version, frozen=False)
        stepped(learners)


def test_half_the_bytes(cluster, tmp_path):
    sync, _, actors = a_sync(cluster, "process_group", tmp_path, wire="bfloat16")
    frozen, trained = 42_048 + 64, 700_032 + 1024 + 64
    assert sync.publish().num_bytes == frozen + trained
    [(_, weights)] = played(actors)
    exact = values(TRAINED, 0)["head/kernel"]
    assert np.max(np.abs(weights["head/kernel"] - exact)) > 0 and weights["head/kernel"].dtype == np.float32
    np.testing.assert_allclose(weights["head/kernel"], exact, rtol=2**-8)
    assert weights["stem/steps"] == 8  # what is no float32 is never rounded


def make_expecting(context: WorkerContext, *, shapes) -> Actor:
    layout = layout_of({**values(FROZEN, -1), **values(TRAINED, 0)})
    return Actor(context, expected={**layout, **shapes})


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shapes", [{"head/bias": ("float32", (499,))}, {"head/more": ("float32", (1,))}])
def test_another_model_is_an_error_within_a_second(cluster, tmp_path, transport, shapes):
    make = partial(make_expecting, shapes=shapes)
    sync, _, actors = a_sync(cluster, transport, tmp_path, receivers=2, make=make)
    begun = time.monotonic()
    with pytest.raises(ManifestError, match=r"rollout/0: .*Both ends must have the same policy section"):
        sync.publish()
    assert time.monotonic() - begun < 1
    assert [version for version, _ in looked_at(actors)] == [-1, -1]
    assert actors.health.having(Health.HEALTHY) == actors.health.having(*Health)  # nobody is to blame


@pytest.mark.parametrize("transport", ["shared_memory", "relay", "process_group"])
def test_two_hundred_rounds(cluster, tmp_path, transport):
    """No growth of memory, threads or descriptors, and never anything but what was sent."""
    sync, learners, actors = a_sync(cluster, transport, tmp_path, receivers=4)
    workers, used = threading.active_count(), []
    for version in range(200):
        assert sync.publish().stale == ()
        if version % 3:
            assert {acting for acting, _ in played(actors)} == {version}
        if version % 50 == 49:
            gc.collect()
            # What did some work of a round ends a moment after it has said that it is done.
            assert within(10.0, lambda: threading.active_count() <= workers), threading.enumerate()
            used.append((len(list(Path("/proc/self/fd").iterdir())), _resident()))
        stepped(learners)
    for _, weights in played(actors):
        assert_equal(weights, 199)
    assert used[-1][0] <= used[0][0]
    assert used[-1][1] - used[0][1] < 8 << 20  # of 1.4 MB x 200 x 4 that were sent


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
