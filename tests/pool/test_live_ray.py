"""The pool on real Ray, one node with 4 fake GPUs: what is created once, what is seen of the dead, who is obeyed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from live_work import audited, make_work, until

from vla_rlaif.pool.actions import Warm
from vla_rlaif.pool.observe import Heard
from vla_rlaif.pool.ray_pool import NAMESPACE, RayPool, SupersededError, tear_down
from vla_rlaif.pool.replica import Claim
from vla_rlaif.pool.state import Gpu, Phase
from vla_rlaif.pool.work import Work

START_S = 60.0  # for an actor, on a busy machine

# Ray starts its processes by fork, and execs at once; JAX, which other tests of this process loaded, warns of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home folder
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=1,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    del os.environ["RAY_AUTH_MODE"]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return make_work(tmp_path)


@pytest.fixture
def pool(cluster: None, work: Work) -> Iterator[RayPool]:
    yield RayPool("test", work)
    tear_down("test")


def claim(name: str, *slots: int, pool: RayPool) -> Claim:
    [node] = pool.nodes(1, 4)
    return Claim(replica=name, role="train", gpus=tuple(Gpu(node.name, slot) for slot in slots))


def heard(pool: RayPool, name: str, token: int = 1) -> Heard:
    return pool.listen(token, pool.entries(token))[name]


def start(pool: RayPool, made: Claim) -> None:
    pool.claim(1, f"acquire:{made.replica}", made)
    pool.create("train", made)
    until(lambda: heard(pool, made.replica).status is not None, "the actor answers", START_S)


def test_a_replica_is_made_once_found_by_the_next_scheduler_and_seen_to_die(pool: RayPool, work: Work) -> None:
    [node] = pool.nodes(1, 4)
    assert node.healthy == (True,) * 4
    made = claim("train-a-0", 0, 1, pool=pool)
    start(pool, made)
    pool.create("train", made)  # again: the first scheduler was killed before it noted that it had done so
    status = heard(pool, made.replica).status
    assert status is not None and status.claim == made
    assert len(status.gpu_ids) == 2
    warm = Warm(replica=made.replica, reason="")
    pool.order(1, [(made, warm)])
    other = RayPool("test", work)  # the next scheduler's view: everything is there
    other.order(2, [(made, warm)])
    until(lambda: phase(other, made) is Phase.WARM, "warm")
    assert audited(work) == [f"acquire:{made.replica}", warm.key]
    with pytest.raises(SupersededError):
        pool.order(1, [(made, warm)])
    with pytest.raises(SupersededError):
        pool.claim(1, "acquire:b", claim("train-b-0", 2, pool=pool))
    ray.kill(ray.get_actor(f"test/train/{made.replica}", namespace=NAMESPACE))
    until(lambda: heard(other, made.replica, 2).is_lost, "its death is seen")
    other.remove(2, made)
    assert other.entries(2) == {}
    until(lambda: ray.available_resources().get("GPU", 0.0) == 4.0, "its GPUs are free")


def phase(pool: RayPool, made: Claim) -> Phase | None:
    status = heard(pool, made.replica, 2).status
    return None if status is None else status.phase


def test_a_board_that_died_is_made_anew_from_the_replicas(pool: RayPool) -> None:
    made = claim("train-a-3", 1, pool=pool)
    start(pool, made)
    ray.kill(ray.get_actor("test/board", namespace=NAMESPACE))
    until(lambda: not _is_there("test/board"), "the board is gone")
    [entry] = pool.entries(1).values()
    assert entry.claim == made and entry.is_created
    assert pool.generation()[made.gpus[0]] == 4  # behind the generation in the name


def _is_there(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def test_a_claim_that_fits_nowhere_waits_and_can_be_given_up(pool: RayPool) -> None:
    made = claim("train-a-0", 0, 1, 2, 3, pool=pool)
    start(pool, made)
    late = claim("train-b-0", 0, pool=pool)  # a plan would not ask for it: the GPU is taken
    late = Claim(replica=late.replica, role="train", gpus=(Gpu(late.gpus[0].node, 9),))
    pool.claim(1, "acquire:train-b-0", late)
    pool.create("train", late)
    assert heard(pool, late.replica) == Heard()  # not there, not dead
    pool.remove(1, late)
    assert list(pool.entries(1)) == [made.replica]
