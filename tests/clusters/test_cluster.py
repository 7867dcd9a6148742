"""What every Cluster must do, by threads and on real Ray: answers, errors, deaths, deadlines, restarts, urgent work."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from counting import Counter, make_broken, make_counter, make_nothing
from ray_session import NUM_CPUS, NUM_GPUS, START_S, start
from waiting import within

from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.dist.answers import Answer, WorkerError, WorkerFailure, WorkerLate, WorkerLost, answers, outcomes
from vla_rlaif.dist.cluster import Cluster, Handle, WorkerGroup, split_rows
from vla_rlaif.dist.fleet import Health
from vla_rlaif.dist.thread_cluster import ThreadCluster, ThreadHandle

ANSWER_S = 60.0  # on a busy machine

# Ray starts its processes by fork, and execs at once; JAX, which other tests of this process loaded, warns of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")


def ray_config(mode: str = "disaggregated", **roles: Any) -> RayClusterConfig:
    faults = {"start_timeout_s": START_S, "max_restarts": 2}
    data = {"type": "ray", "address": "local", "mode": mode, "roles": roles, "faults": faults}
    return RayClusterConfig.model_validate(data)


@pytest.fixture(scope="module", params=["threads", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "threads":
        made: Cluster = ThreadCluster(max_restarts=2)
    else:
        start()
        from vla_rlaif.dist.ray_cluster import RayCluster

        made = RayCluster(ray_config(rollout={"workers": 2, "cpus": 0.5}, learner={"cpus": 0.5}))
    yield made
    made.close()


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> WorkerGroup[Counter]:
    return cluster.start("rollout", partial(make_counter, start=10), 2)


@pytest.fixture
def handle(group: WorkerGroup[Counter]) -> Handle[Counter]:
    return group.handles[0]


def one(asked: Answer[Any], doing: str = "the test's work") -> Any:
    return answers([asked], ANSWER_S, doing)[0]


def murder(handle: Handle[Any]) -> None:
    """kill -9, where there is a process."""
    if isinstance(handle, ThreadHandle):
        handle.end("killed by the test")
        return
    from vla_rlaif.dist.ray_handle import RayHandle

    assert isinstance(handle, RayHandle)
    os.kill(handle.pid, signal.SIGKILL)


def test_work_is_done_in_the_order_of_asking(handle: Handle[Counter]) -> None:
    asked = [handle.ask(partial(Counter.add, num=i)) for i in range(5)]
    assert answers(asked, ANSWER_S, "adding") == [10, 11, 13, 16, 20]
    assert one(handle.ask(Counter.history)) == [0, 1, 2, 3, 4]


def test_the_three_splits(group: WorkerGroup[Counter]) -> None:
    rows = np.arange(10)
    assert [place.node for place in answers(group.all(Counter.place), ANSWER_S, "telling")] == [
        handle.place.node for handle in group.handles
    ]
    assert one(group.rank0(partial(Counter.total, rows=rows))) == 45.0
    parts = answers(group.shard(lambda part: partial(Counter.add_rows, rows=rows[part]), 10), ANSWER_S, "adding")
    assert np.concatenate(parts).tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    # One row is left for one worker only; groups of 4 are not torn.
    assert len(group.shard(lambda part: partial(Counter.add_rows, rows=rows[part]), 1)) == 1
    parts = answers(group.shard(lambda part: partial(Counter.add_rows, rows=rows[part]), 8, unit=4), ANSWER_S, "adding")
    assert [len(part) for part in parts] == [4, 4]


def test_large_arguments_for_all(group: WorkerGroup[Counter]) -> None:
    rows = np.ones(2_000_000)
    assert answers(group.all(partial(Counter.total, rows=rows)), ANSWER_S, "summing") == [2e6, 2e6]


def test_values_go_from_worker_to_worker_through_the_store(group: WorkerGroup[Counter]) -> None:
    stored = one(group.handles[0].ask(partial(Counter.put, rows=np.ones(300_000))))
    assert one(group.handles[1].ask(partial(Counter.take, stored=stored))) == 3e5


def test_an_error_ends_with_the_workers_traceback_and_the_worker_lives_on(handle: Handle[Counter]) -> None:
    failed = handle.ask(Counter.fail)
    with pytest.raises(WorkerError, match="rollout/0 failed:\n") as caught:
        answers([failed], ANSWER_S, "failing")
    lines = str(caught.value).splitlines()
    assert lines[-1] == 'KeyError: "the worker\'s own words"'
    assert "counting.py" in lines[-3] and "in fail" in lines[-3]
    assert caught.value.kind == "KeyError"
    assert one(handle.ask(Counter.incarnation)) == 0


def test_an_error_is_told_before_the_others_are_done(group: WorkerGroup[Counter]) -> None:
    slow: Answer[Any] = group.handles[0].ask(Counter.wait)
    failed: Answer[Any] = group.handles[1].ask(Counter.fail)
    with pytest.raises(WorkerError, match="rollout/1 failed"):
        answers([slow, failed], ANSWER_S, "waiting")
    assert not slow.done()
    found = outcomes([failed, slow], 0.2, "waiting")
    assert isinstance(found[0], WorkerError) and isinstance(found[1], WorkerLate)
    one(group.handles[0].ask(Counter.release, urgent=True))
    assert one(slow) == "released"


def test_urgent_work_is_done_beside_ordinary_work_and_deadlines_are_kept(handle: Handle[Counter]) -> None:
    slow = handle.ask(partial(Counter.sleep, seconds=2.0))
    begun = time.monotonic()
    with pytest.raises(WorkerLate, match=r"rollout/0 did not finish sleeping within 0\.2 s"):
        answers([slow], 0.2, "sleeping")
    assert time.monotonic() - begun < 1.9
    assert one(handle.ask(Counter.incarnation, urgent=True)) == 0
    assert not slow.done()
    one(slow)


def test_workers_without_gpus_see_none(handle: Handle[Counter]) -> None:
    assert handle.place.gpus == ()
    if not isinstance(handle, ThreadHandle):
        assert one(handle.ask(partial(Counter.variable, name="CUDA_VISIBLE_DEVICES"))) == ""
        assert one(handle.ask(partial(Counter.variable, name="JAX_PLATFORMS"))) == "cpu"


def test_only_what_has_a_name_is_sent(handle: Handle[Counter]) -> None:
    with pytest.raises(AssertionError, match="<lambda> is not sent to workers"):
        handle.ask(lambda counter: counter.value)


def test_factories_that_fail(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match=r"^no reward can be made of this; give another config\.$"):
        cluster.start("reward", make_nothing, 1)
    with pytest.raises(WorkerError, match=r"KeyError: 'reward/0 is broken'"):
        cluster.start("reward", make_broken, 1)


def test_death_hang_and_return(group: WorkerGroup[Counter]) -> None:
    first, second = group.handles
    open_answers = [second.ask(Counter.wait), second.ask(Counter.incarnation), second.ask(Counter.wait, urgent=True)]
    epoch = group.health.membership_epoch
    murder(second)
    begun = time.monotonic()
    found = outcomes(open_answers, ANSWER_S, "waiting")
    assert all(isinstance(each, WorkerLost) for each in found)
    assert time.monotonic() - begun < ANSWER_S / 2
    assert group.health.health("rollout/1") is Health.DEAD
    assert group.health.membership_epoch == epoch + 1
    [late] = outcomes([second.ask(Counter.incarnation)], 1.0, "asking the dead")
    assert isinstance(late, WorkerLost) and late.worker == "rollout/1"

    again = group.restart(second)
    assert group.restart(second) is again  # a second one who noticed
    assert (again.name, again.incarnation) == ("rollout/1", 1)
    assert one(again.ask(Counter.incarnation)) == 1
    assert one(again.ask(partial(Counter.add, num=1))) == 11  # made anew
    assert group.health.health("rollout/1") is Health.STALE
    group.health.holds("rollout/1", 1, group.health.committed)
    assert group.health.having(Health.HEALTHY) == ("rollout/0", "rollout/1")

    hanging = again.ask(Counter.wait)  # a hang past its deadline: the worker is ended, whatever it does
    with pytest.raises(WorkerLate):
        answers([hanging], 0.1, "hanging")
    third = group.restart(again)
    assert isinstance(hanging.exception(ANSWER_S), WorkerLost)
    assert third.incarnation == 2
    with pytest.raises(WorkerLost, match=r"restarted 2 times \(faults.max_restarts\)"):
        group.restart(third)
    assert one(first.ask(Counter.incarnation)) == 0  # the other one has noticed nothing


def test_workers_on_ray_see_their_gpus_and_start_their_own_env_workers() -> None:
    start()
    from vla_rlaif.dist.ray_cluster import RayCluster

    config = ray_config(
        "hybrid",
        learner={"gpus": 2, "share": 0.5, "cpus": 2, "labels": {"kind": "simulated"}},
        rollout={"workers": 2, "gpus": 0.5, "cpus": 0.5, "colocate_with": "learner"},
        reward={"gpus": 1, "cpus": 0.5},
        env={"workers": 2, "cpus": 0.25},
    )
    cluster = RayCluster(config)
    try:
        seen = {}
        for role, num in (("learner", 1), ("rollout", 2), ("reward", 1)):
            group = cluster.start(role, make_counter, num)
            names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_PLATFORMS")
            tunables = [one(handle.ask(partial(Counter.variable, name="GLIBC_TUNABLES"))) for handle in group.handles]
            assert all(("non_temporal" in (each or "")) == (role == "learner") for each in tunables)
            for handle in group.handles:
                found = [one(handle.ask(partial(Counter.variable, name=name))) for name in names]
                assert tuple(found[0].split(",") if found[0] else ()) == handle.place.gpus
                seen[handle.name] = found
            if role == "rollout":
                lent = cluster.lend("env", 1, 2)
                assert [(each.bundle.name, each.bundle.cpus) for each in lent] == [("env/0", 0.25)]
                inner = partial(Counter.through_workers_of_its_own, config=config, lent=lent, num=3)
                assert one(group.handles[1].ask(inner)) == [3]
    finally:
        cluster.close()
    first, second = seen["learner/0"][0].split(",")
    assert {first, second} < {str(i) for i in range(NUM_GPUS)}
    assert seen["learner/0"][1:] == ["2", "0.450", None]
    assert seen["rollout/0"] == [first, "1", "0.450", None]
    assert seen["rollout/1"] == [second, "1", "0.450", None]
    assert seen["reward/0"][0] in {str(i) for i in range(NUM_GPUS)} - {first, second}  # nobody else is there
    assert seen["reward/0"][1:] == ["1", None, None]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"rollout": {"workers": NUM_CPUS}}, "asks for 10 CPUs, and the cluster has 8"),
        ({"learner": {"gpus": 3}, "rollout": {"gpus": 2}}, "asks for 5 GPUs, and the cluster has 4"),
        ({"learner": {"labels": {"zone": "b"}}}, r"zone=b\) asked for, and the nodes hold 0 of them"),
    ],
)
def test_what_does_not_fit_on_ray_is_refused_at_once(roles: dict[str, Any], message: str) -> None:
    start()
    from vla_rlaif.dist.ray_cluster import RayCluster

    begun = time.monotonic()
    with pytest.raises(ValueError, match=message):
        RayCluster(ray_config(**roles))
    assert time.monotonic() - begun < 10.0


def test_what_others_hold_is_not_waited_for_for_ever() -> None:
    start()
    import ray

    from vla_rlaif.dist.ray_cluster import RayCluster

    small = {"cpus": 0.5}

    def reserved() -> set[str]:  # what nodes say of their free CPUs comes late
        table = ray.util.placement_group_table()
        return {name for name, group in table.items() if group["state"] != "REMOVED"}

    first = RayCluster(ray_config(learner={"cpus": 2.5}, rollout=small, reward=small))
    before = reserved()
    second = ray_config(learner={"cpus": 7}, rollout=small, reward=small)
    late = second.model_copy(update={"faults": second.faults.model_copy(update={"start_timeout_s": 1.0})})
    with pytest.raises(ValueError, match=r"learner/0 wants 0 GPUs and 7 CPUs of .* within 1 s: others use them"):
        RayCluster(late)
    assert within(ANSWER_S, lambda: reserved() <= before)  # it has given back what it got
    first.close()
    assert within(ANSWER_S, lambda: len(reserved()) < len(before))


def test_rows_are_split_in_order_and_in_whole_units() -> None:
    assert split_rows(10, 3) == [slice(0, 4), slice(4, 7), slice(7, 10)]
    assert split_rows(12, 3, unit=4) == [slice(0, 4), slice(4, 8), slice(8, 12)]
    assert split_rows(8, 3, unit=4) == [slice(0, 4), slice(4, 8)]
    with pytest.raises(ValueError, match="10 rows do not split into units of 4"):
        split_rows(10, 2, unit=4)
    assert issubclass(WorkerLost, WorkerFailure)
