"""Rollouts by several workers: the same episodes as by one, whole groups lost with a worker, stale workers idle."""

import threading
from dataclasses import fields
from functools import partial

import numpy as np
import pool_work
import pytest

from vla_rlaif.dist.crew import CrewSettings
from vla_rlaif.dist.fleet import Health
from vla_rlaif.dist.rollouts import WorkerRollouts
from vla_rlaif.dist.thread_cluster import ThreadCluster
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.evaluate import evaluate
from vla_rlaif.interfaces import Rollouts
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.rollout import Split, held_out_starts, take_starts, train_starts
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.step_metrics import MeasuredRollouts
from vla_rlaif.types import Episodes, SyncResult

WEIGHTS = {
    "weight": np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32),
    "bias": np.array([0.1, -0.2], np.float32),
}


@pytest.fixture
def start():
    cluster = ThreadCluster()
    gates = []

    def rollouts(num, num_envs=16, gate=None, *, work_s=20.0, start_s=20.0):
        gates.extend([gate] if gate else [])
        group = cluster.start("rollout", partial(pool_work.make_player, num_envs=num_envs, gate=gate), num)
        return WorkerRollouts(group, CrewSettings(work_s=work_s, start_s=start_s)), group

    yield rollouts
    for gate in gates:
        gate.opened.set()
    cluster.close()


@pytest.fixture
def here():
    env = PointReach(32)
    policy = GaussianTorch(GaussianConfig(backend="torch"), env.spec)
    policy.load(WEIGHTS, 3)
    return LocalRollouts(policy, env, act_batch=8)


def assert_same(a: Episodes, b: Episodes) -> None:
    for field in fields(Episodes):
        one, two = getattr(a, field.name), getattr(b, field.name)
        if field.name == "starts":
            one, two = vars(one), vars(two)
        if isinstance(one, dict):
            for key in one:
                np.testing.assert_array_equal(one[key], two[key])
        else:
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("num", "num_envs"), [(1, 32), (2, 16), (3, 16)])
@pytest.mark.parametrize("groups", [1, 4, 11])
def test_episodes_are_those_of_one_process(start, here, num, num_envs, groups):
    """To the bit, in the order of the starts: the policy sees 8 rows at a time here and there."""
    rollouts, _ = start(num, num_envs)
    rollouts.act_with(WEIGHTS, 3)
    starts = train_starts(0, 5, groups, 4)
    played = rollouts.play(starts, seed=7)
    assert played.lost_groups == 0
    assert_same(played.episodes, here.play(starts, seed=7).episodes)


def test_an_evaluation_is_that_of_one_process(start, here):
    rollouts, _ = start(2)
    rollouts.act_with(WEIGHTS, 3)
    mine, wanted = (evaluate(r, split=Split.TEST, episodes=21) for r in (rollouts, here))
    np.testing.assert_array_equal(mine.outcomes, wanted.outcomes)


def test_it_is_rollouts_that_measure(start):
    rollouts, _ = start(2)
    assert isinstance(rollouts, Rollouts) and isinstance(rollouts, MeasuredRollouts)
    assert (rollouts.num_envs, rollouts.window, rollouts.spec.action_dim) == (32, 1, 2)
    assert rollouts.faults == {"workers_died": 0, "workers_hung": 0}


def test_the_groups_of_a_worker_that_dies_are_lost_and_counted(start, here):
    """8 groups of 4: pieces of 4 groups for each of 2 workers. The first worker dies in the middle of its piece."""
    gate = pool_work.Gate()
    rollouts, group = start(2, gate=gate)
    rollouts.act_with(WEIGHTS, 3)
    starts = train_starts(0, 0, 8, 4)
    threading.Thread(target=lambda: gate.reached.wait(10) and group.handles[0].kill(), daemon=True).start()
    played = rollouts.play(starts, seed=0)
    assert played.lost_groups == 4
    kept = np.unique(played.episodes.starts.group)
    assert len(kept) == 4
    wanted = here.play(take_starts(starts, np.flatnonzero(np.isin(starts.group, kept))), seed=0)
    assert_same(played.episodes, wanted.episodes)
    assert rollouts.faults == {"workers_died": 1, "workers_hung": 0}


def test_a_worker_that_hangs_is_ended_and_its_successor_has_the_weights(start, here):
    gate = pool_work.Gate()
    rollouts, group = start(1, gate=gate, work_s=1.0)
    rollouts.act_with(WEIGHTS, 3)
    starts = train_starts(0, 0, 4, 4)
    played = rollouts.play(starts, seed=0)
    assert (played.episodes, played.lost_groups) == (None, 4)
    assert_same(rollouts.play(starts, seed=0).episodes, here.play(starts, seed=0).episodes)
    assert rollouts.faults == {"workers_died": 0, "workers_hung": 1}
    assert group.handles[0].incarnation == 1


def test_stale_workers_get_no_work(start):
    rollouts, group = start(2)
    health = group.health
    for handle in group.handles:
        health.holds(handle.name, handle.incarnation, 1)
    health.commit(1)
    health.stale("rollout/1", 0)
    asked = []

    class Sync:
        def catch_up(self):
            asked.append(health.health("rollout/1"))
            threading.Event().wait(0.3)
            health.holds("rollout/1", 0, 1)
            return SyncResult(version=1, ok=True)

    rollouts.follow(Sync())
    rollouts.play(train_starts(0, 0, 12, 4), seed=0)
    assert asked == [Health.STALE]


def test_held_out_starts_are_groups_of_one(start):
    rollouts, _ = start(2)
    played = rollouts.play(held_out_starts(Split.TEST, 19), seed=0)
    np.testing.assert_array_equal(played.episodes.starts.group, np.arange(19))
