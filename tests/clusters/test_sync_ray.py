"""Weight sync between Ray actors: through Ray's object store, and by what `auto` chooses on one machine."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from ray_session import START_S, start
from sync_ends import Actor, LearnerEnd, assert_equal, make_actor, make_learner, pid, play, step

from vla_rlaif.cluster_config import RayClusterConfig, SyncConfig
from vla_rlaif.dist.answers import answers
from vla_rlaif.dist.cluster import WorkerGroup
from vla_rlaif.dist.fleet import Health
from vla_rlaif.dist.weight_sync import GroupSync

# Ray starts its processes by fork, and execs at once; JAX, which other tests of this process loaded, warns of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[WorkerGroup[LearnerEnd], WorkerGroup[Actor]]]:
    start()
    from vla_rlaif.dist.ray_cluster import RayCluster

    roles = {"learner": {"cpus": 0.5}, "rollout": {"workers": 2, "cpus": 0.5}}
    config = {"type": "ray", "roles": roles, "faults": {"start_timeout_s": START_S}}
    cluster = RayCluster(RayClusterConfig.model_validate(config))
    yield cluster.start("learner", make_learner, 1), cluster.start("rollout", make_actor, 2)
    cluster.close()


def publish(groups, sync: GroupSync, transport: str) -> None:
    learners, actors = groups
    for _ in range(2):
        [version] = answers([learners.rank0(step)], 30.0, "a step")
        result = sync.publish()
        assert (result.ok, result.stale, result.problems) == (True, (), ())
        assert (result.version, result.transport) == (version, transport)
        for acting, weights in answers(actors.all(play), 30.0, "playing"):
            assert acting == version
            assert_equal(weights, version)


@pytest.mark.parametrize("transport", ["object_store", "auto"])
def test_publish(groups, transport):
    learners, actors = groups
    sync = GroupSync(learners, actors, SyncConfig(transport=transport))
    publish(groups, sync, "shared_memory" if transport == "auto" else transport)


def test_an_actor_that_is_killed_comes_back(groups):
    learners, actors = groups
    sync = GroupSync(learners, actors, SyncConfig(transport="object_store"))
    publish(groups, sync, "object_store")
    victim = actors.handles[0]
    os.kill(answers([victim.ask(pid)], 30.0, "asking")[0], signal.SIGKILL)
    begun = time.monotonic()
    result = sync.publish()
    assert time.monotonic() - begun < 10
    assert (result.ok, result.stale) == (True, ("rollout/0",)), result
    assert "rollout/0 is" in result.problems[0]
    actors.restart(victim)
    assert actors.health.having(Health.STALE) == ("rollout/0",)
    assert sync.catch_up().stale == ()
    for acting, weights in answers(actors.all(play), 30.0, "playing"):
        assert acting == result.version
        assert_equal(weights, result.version)
