"""Env workers of a cluster behind the ``VectorEnv`` seam: they play what a local env plays, and their faults cost the
episodes of their members only. The contract of every ``VectorEnv`` is checked in tests/envs/test_contract.py.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from vla_rlaif.build import build_env
from vla_rlaif.dist.answers import WorkerFailure
from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.env_worker import EnvWorker
from vla_rlaif.dist.remote_env import RemoteVectorEnv, start_remote_env
from vla_rlaif.dist.thread_cluster import ThreadCluster
from vla_rlaif.env_config import CustomEnvConfig, PointReachConfig, TabletopConfig
from vla_rlaif.envs.halves import Halves
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.policies.gaussian_jax import GaussianJax
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.rollout import rollout, train_starts
from vla_rlaif.types import EnvSpec, Transition

POINTS = PointReachConfig(num_envs=5, max_decisions=6)
TABLETOP = TabletopConfig(
    task="push", num_envs=4, image_size=16, chunk=2, max_steps=6, renderer="ray", threads=1, success_radius=0.03
)
SEEDS = np.arange(5)


class Fragile:
    """PointReach that sleeps or raises in its step when an action of it says so: 0.5 or 0.75 in the first place."""

    def __init__(self, num_envs: int) -> None:
        self._env, self.num_envs = PointReach(num_envs, max_decisions=20), num_envs
        self.faults = {"raised": 0}

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    def reset(self, seeds: np.ndarray) -> Transition:
        self.faults["raised"] += 2
        if (seeds == 7).all():
            raise RuntimeError("nothing but sevens")
        return self._env.reset(seeds)

    def step(self, action: np.ndarray) -> Transition:
        if action[0, 0, 0] == 0.5:
            time.sleep(5.0)
        if action[0, 0, 0] == 0.75:
            raise ArithmeticError("the env is broken")
        return self._env.step(action)

    def close(self) -> None: ...


def fragile_worker(context: WorkerContext) -> EnvWorker:
    return EnvWorker(Fragile(3 - context.index))  # members 0, 1, 2 and 3, 4


@pytest.fixture
def cluster() -> Iterator[ThreadCluster]:
    cluster = ThreadCluster(max_restarts=1)
    yield cluster
    cluster.close()


def start(cluster: ThreadCluster, make: Callable[[WorkerContext], EnvWorker] = fragile_worker) -> RemoteVectorEnv:
    return RemoteVectorEnv(cluster.start("env", make, 2), timeout_s=2.0)


def same(a: Transition, b: Transition, rows: Any = slice(None)) -> None:
    for name in ("done", "truncated", "success", "truth", "executed", "valid"):
        np.testing.assert_array_equal(getattr(a, name)[rows], getattr(b, name)[rows], err_msg=name)
    np.testing.assert_array_equal(a.obs.state[rows], b.obs.state[rows])
    for camera, image in a.obs.images.items():
        np.testing.assert_array_equal(image[rows], b.obs.images[camera][rows])
    assert np.array(a.obs.instruction)[rows].tolist() == np.array(b.obs.instruction)[rows].tolist()


def test_members_are_numbered_through_and_play_as_in_one_env(cluster: ThreadCluster) -> None:
    env: Any = start_remote_env(cluster, POINTS, num_workers=2, timeout_s=30.0)
    local = build_env(POINTS)
    assert env.num_envs == 5 and env.spec == local.spec
    same(env.reset(SEEDS), local.reset(SEEDS))
    for i in range(6):
        action = np.random.default_rng(i).uniform(-1, 1, (5, 2, 2))
        same(env.step(action), local.step(action))
    with pytest.raises(ValueError, match="PointReach has no expert"):
        env.expert()
    with pytest.raises(ValueError, match="PointReach cannot take snapshots"):
        env.snapshot(0)


@pytest.mark.parametrize(
    ("first", "kind", "says"), [(0.75, "raised", "the env is broken"), (0.5, "hung", "did not finish a chunk")]
)
def test_a_fault_costs_the_members_of_one_worker_their_episode(
    cluster: ThreadCluster, first: float, kind: str, says: str
) -> None:
    env, local = start(cluster), PointReach(5, max_decisions=20)
    env.reset(SEEDS)
    local.reset(SEEDS)
    action = np.zeros((5, 1, 2))
    action[3, 0, 0] = first
    begun = time.monotonic()
    now, expected = env.step(action), local.step(action)
    assert time.monotonic() - begun < 4.5  # nobody waits for it
    assert now.valid.tolist() == [True, True, True, False, False] == (~now.done).tolist()
    assert now.executed.tolist() == [1, 1, 1, 0, 0] and not now.truth[3:].any()
    same(now, expected, slice(0, 3))
    action[:] = 0.1
    same(env.step(action), local.step(action), slice(0, 3))
    assert env.faults[kind] == 1 + 4 * (kind == "raised") and says in env.last_fault  # 4: what the envs counted
    same(env.reset(SEEDS + 9), local.reset(SEEDS + 9))  # the worker was replaced
    same(env.step(action), local.step(action))
    assert [handle.incarnation for handle in env._group.handles] == [0, 1]


def test_members_that_had_finished_survive_their_worker(cluster: ThreadCluster) -> None:
    env, local = start(cluster), PointReach(5, max_decisions=20)
    now = env.reset(SEEDS)
    local.reset(SEEDS)
    to_goal = now.obs.state[3, 2:] - now.obs.state[3, :2]
    action = np.zeros((5, 11, 2))
    action[3] = to_goal / np.abs(to_goal).max() * 0.9
    now, expected = env.step(action), local.step(action)
    assert now.success.tolist() == [False, False, False, True, False]
    env._group.handles[1].kill()
    after = env.step(np.zeros((5, 1, 2)))
    same(after, local.step(np.zeros((5, 1, 2))), slice(0, 4))
    assert not after.valid[4] and after.done[4] and env.faults["died"] == 1
    assert expected.success[3]


def test_a_reset_that_fails_costs_its_worker_and_all_failing_is_an_error(cluster: ThreadCluster) -> None:
    env = start(cluster)
    now = env.reset(np.array([1, 2, 3, 7, 7]))
    assert now.valid.tolist() == [True, True, True, False, False] == (~now.done).tolist()
    with pytest.raises(RuntimeError, match=r"(?s)no environment could be reset.*nothing but sevens"):
        env.reset(np.full(5, 7))


def test_a_worker_that_was_restarted_too_often_is_an_error(cluster: ThreadCluster) -> None:
    env = start(cluster)
    for _ in range(2):
        env.reset(SEEDS)
        env._group.handles[0].kill()
        env.step(np.zeros((5, 1, 2)))
    with pytest.raises(WorkerFailure, match=r"env/0 .*restarted 1 times"):
        env.reset(SEEDS)


def test_snapshots_hashes_and_the_expert_pass_through(cluster: ThreadCluster) -> None:
    env: Any = start_remote_env(cluster, TABLETOP, num_workers=3, timeout_s=30.0)
    local: Any = build_env(TABLETOP)
    seeds = np.array([8, 8, 9, 8])
    same(env.reset(seeds), local.reset(seeds))
    assert env.state_hash() == local.state_hash()
    np.testing.assert_array_equal(env.expert(), local.expert())
    action = np.random.default_rng(0).uniform(-1, 1, (4, 2, 7))
    same(env.step(action), local.step(action))
    same(env.restore([1, 3], env.snapshot(2)), local.restore([1, 3], local.snapshot(2)))
    same(env.step(action), local.step(action))
    assert env.state_hash() == local.state_hash() and env.seconds["physics"] > 0
    env._group.handles[1].kill()
    assert env.state_hash()[2] == "invalid" and not env.expert()[2].any()
    back = env.restore([3], env.snapshot(0))  # the lost worker is back, and its member still out of play
    assert back.valid.tolist() == [True, True, False, True] and back.done[2]
    local.close()


def test_halves_of_workers_play_the_episodes_of_one_env(cluster: ThreadCluster) -> None:
    halves = start_remote_env(
        cluster, TABLETOP.model_copy(update={"double_buffer": True}), num_workers=2, timeout_s=30.0
    )
    local: Any = build_env(TABLETOP)
    assert isinstance(halves, Halves)
    policy, starts = GaussianJax(GaussianConfig(), local.spec), train_starts(0, 0, 2, 3)
    a, b = (rollout(policy, env, starts, seed=0, act_batch=2) for env in (halves, local))
    for name in ("state", "action", "logp", "mask", "success", "truth", "valid"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    halves.close()
    local.close()


@pytest.mark.parametrize(
    ("config", "num_workers", "message"),
    [
        (POINTS, 6, "6 env workers for 5 members"),
        (TABLETOP.model_copy(update={"double_buffer": True}), 3, "double_buffer wants 3 env workers"),
        (CustomEnvConfig(factory="nowhere:env"), 1, "names the module 'nowhere', which cannot be found"),
    ],
)
def test_mistakes_are_named(cluster: ThreadCluster, config: Any, num_workers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_remote_env(cluster, config, num_workers=num_workers, timeout_s=30.0)


def test_a_closed_env_says_so(cluster: ThreadCluster) -> None:
    env = start(cluster, partial(fragile_worker))
    env.reset(SEEDS)
    env.close()
    env.close()
    with pytest.raises(ValueError, match="closed"):
        env.step(np.zeros((5, 1, 2)))
