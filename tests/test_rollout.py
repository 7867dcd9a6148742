from dataclasses import replace

import numpy as np
import pytest

from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.policies.gaussian_jax import GaussianJax
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.rollout import (
    Split,
    concatenate,
    held_out_starts,
    make_batch,
    noise_seeds,
    rollout,
    start_seed,
    take,
    train_starts,
)


@pytest.fixture
def policy():
    return GaussianJax(GaussianConfig(), PointReach(1).spec)


def test_splits_share_no_start_state():
    seeds = {split: {start_seed(split, 0, i) for i in range(500)} for split in Split}
    assert all(len(s) == 500 for s in seeds.values())
    assert len(set.union(*seeds.values())) == 500 * len(Split)
    # By construction, not by luck: the split is in bits that the hash cannot reach.
    assert {seed >> 48 for seed in seeds[Split.TEST]} == {int(Split.TEST)}


def test_members_share_the_start_and_differ_in_noise(policy):
    starts = train_starts(seed=0, step=3, num_groups=4, group_size=8)
    assert (starts.seed.reshape(4, 8) == starts.seed.reshape(4, 8)[:, :1]).all()
    assert len(np.unique(noise_seeds(0, starts, 0))) == 32
    episodes = rollout(policy, PointReach(32), starts, seed=0)
    first = episodes.state[:, 0].reshape(4, 8, -1)
    assert (first == first[:, :1]).all()
    assert (episodes.action[:, 0].reshape(4, 8, -1).std(axis=1) > 0).all()


def test_an_episode_does_not_depend_on_its_neighbours(policy):
    starts = train_starts(seed=1, step=0, num_groups=4, group_size=4)
    whole = rollout(policy, PointReach(16), starts, seed=1)
    in_rounds = rollout(policy, PointReach(6), starts, seed=1)  # 6 + 6 + 4, the last round filled up and cut
    for name in ("state", "action", "mask", "executed", "success", "truth"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(in_rounds, name), err_msg=name)


def test_noise_scale_zero_is_deterministic_in_the_noise_seed(policy):
    starts = held_out_starts(Split.TEST, 8)
    a, b = (rollout(policy, PointReach(8), starts, seed=s, noise_scale=0.0) for s in (0, 1))
    np.testing.assert_array_equal(a.action, b.action)


def test_held_out_starts_deal_out_the_tasks_of_an_env():
    seeds = held_out_starts(Split.TEST, 25, num_tasks=10).seed
    assert (seeds % 10).tolist() == [*range(10), *range(10), *range(5)]
    assert len(set(seeds.tolist())) == 25 and (seeds >> 48 == Split.TEST).all()


def test_decisions_after_the_end_are_masked(policy):
    episodes = rollout(policy, PointReach(64), train_starts(0, 0, 16, 4), seed=0)
    assert episodes.success.any()
    for row in np.flatnonzero(episodes.success):
        n = int(episodes.num_decisions[row])
        assert episodes.mask[row, :n].all() and not episodes.mask[row, n:].any()
        assert (episodes.executed[row, n:] == 0).all() and episodes.executed[row, n - 1] >= 1
        assert (episodes.state[row, n:] == episodes.state[row, n]).all()  # frames after the end repeat the last


def test_take_and_concatenate_are_inverse(policy):
    episodes = rollout(policy, PointReach(16), train_starts(0, 0, 4, 4), seed=0)
    back = concatenate([take(episodes, np.arange(5)), take(episodes, np.arange(5, 16))])
    np.testing.assert_array_equal(back.state, episodes.state)
    np.testing.assert_array_equal(back.starts.group, episodes.starts.group)
    assert back.instruction == episodes.instruction
    with pytest.raises(AssertionError, match="never mixes"):
        concatenate([episodes, replace(episodes, version=1)])


def test_batch_keeps_live_decisions_of_episodes_with_an_advantage(policy):
    episodes = rollout(policy, PointReach(16), train_starts(0, 0, 4, 4), seed=0)
    advantage = np.where(np.arange(16) % 4 == 0, 0.0, np.arange(16.0))
    batch = make_batch(episodes, advantage, num_valid=7.0)
    used = advantage != 0
    assert len(batch.mask) == episodes.mask[used].sum()
    np.testing.assert_array_equal(np.unique(batch.advantage), advantage[used].astype(np.float32))
    row = np.flatnonzero(batch.advantage == 5.0)
    np.testing.assert_array_equal(batch.obs.state[row], episodes.state[5, : len(row)])
    np.testing.assert_array_equal(batch.executed[row], episodes.executed[5, : len(row)])
