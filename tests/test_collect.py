"""Demonstrations of the scripted expert: what is recorded, and what is not (the noise of their execution)."""

import numpy as np
import pytest

from vla_rlaif.collect import collect_demonstrations
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.rollout import Split, dealt, held_out_starts, start_seed, train_starts
from vla_rlaif.warm_start_config import CollectConfig

NUM_ENVS = 6
CONFIG = CollectConfig(episodes=10, noise=0.1, scatter_steps=2, max_steps=8)


class Spy:
    """A real env whose seeds and steps can be looked at afterwards."""

    def __init__(self, env: Tabletop) -> None:
        self.env, self.seeds, self.executed, self.expected = env, [], [], []

    @property
    def num_envs(self):
        return self.env.num_envs

    @property
    def spec(self):
        return self.env.spec

    def reset(self, seeds):
        self.seeds += seeds.tolist()
        return self.env.reset(seeds)

    def step(self, action):
        self.executed.append(action[:, 0])
        return self.env.step(action)

    def close(self):
        self.env.close()

    def expert(self):
        action = self.env.expert()
        self.expected.append(action)
        return action


@pytest.fixture(scope="module")
def env():
    env = Tabletop("reach", num_envs=NUM_ENVS, image_size=16, max_steps=11, renderer="ray", physics_threads=1)
    yield env
    env.close()


@pytest.fixture(scope="module")
def collected(env):
    spy = Spy(env)
    return spy, collect_demonstrations(spy, CONFIG, seed=3)


def test_the_expert_succeeds_and_the_number_is_exact(collected):
    _, demos = collected
    assert demos.success.shape == (10,) and demos.success.mean() >= 0.9
    assert demos.images["wrist"].shape == (10, 8, 16, 16, 3)
    assert demos.state.shape == (10, 8, 8) and demos.action.shape == (10, 8, 7)
    assert len(demos.instruction) == 10 and set(demos.instruction) == {"move the gripper to the green disc"}


def test_the_mask_ends_with_success_and_never_comes_back(collected, env):
    _, demos = collected
    length = demos.mask.sum(axis=1)
    assert (np.arange(8) < length[:, None]).tolist() == demos.mask.tolist()
    assert length.min() > 0 and length.max() <= 8 and (length < 8).any()
    # After the end nothing moves: the frames of a finished episode repeat.
    for e in np.flatnonzero(length < 8):
        np.testing.assert_array_equal(demos.state[e, length[e]], demos.state[e, -1])
        assert (demos.state[e, length[e]] != demos.state[e, length[e] - 1]).any()
    assert demos.is_end_seen


def test_recorded_actions_are_the_experts_not_the_noisy_ones(collected):
    spy, demos = collected
    scatter, steps = CONFIG.scatter_steps, CONFIG.max_steps
    expected = np.concatenate([np.stack(spy.expected[r * steps :][:steps], axis=1) for r in range(2)])[:10]
    np.testing.assert_array_equal(demos.action, np.clip(expected, -1, 1))
    rounds = [spy.executed[r * (scatter + steps) :][scatter : scatter + steps] for r in range(2)]
    executed = np.concatenate([np.stack(part, axis=1) for part in rounds])[:10]
    noise = (executed - demos.action)[demos.mask]
    assert not noise[:, 3:].any()  # only the translation is disturbed
    inside = np.abs(executed[..., :3][demos.mask]) < 1  # the rest is cut off at the bounds
    assert 0.07 < noise[:, :3][inside].std() < 0.13


def test_label_noise_is_recorded(env):
    clean, loud = (
        collect_demonstrations(env, CollectConfig(episodes=6, max_steps=2, scatter_steps=0, noise=0, label_noise=n), 0)
        for n in (0.0, 0.3)
    )
    np.testing.assert_array_equal(clean.state[:, 0], loud.state[:, 0])
    assert np.abs(clean.action[:, 0] - loud.action[:, 0]).mean() > 0.05


def test_starts_are_fresh_and_of_their_own_split(collected):
    spy, _ = collected
    assert spy.seeds == [start_seed(Split.DEMONSTRATION, 3, i) for i in range(2 * NUM_ENVS)]
    others = [held_out_starts(split, 50).seed for split in (Split.VALIDATION, Split.TEST)]
    others += [train_starts(3, 0, 50, 1, split).seed for split in (Split.TRAIN, Split.REWARD)]
    assert len(set(spy.seeds)) == 2 * NUM_ENVS and not set(spy.seeds) & set(np.concatenate(others).tolist())


def test_numbers_deal_out_all_tasks_and_all_start_states_of_each():
    hashed = [start_seed(Split.DEMONSTRATION, 3, i) for i in range(24)]
    seeds = [dealt(seed, i, 3, 4) for i, seed in enumerate(hashed)]
    kinds = [(seed % 3, seed // 3 % 4) for seed in seeds]
    assert sorted(kinds) == sorted(2 * [(task, start) for task in range(3) for start in range(4)])
    assert len(set(kinds[:12])) == 12 and [task for task, _ in kinds[:4]] == [0, 1, 2, 0]
    assert len(set(seeds)) == 24 and {seed >> 48 for seed in seeds} == {int(Split.DEMONSTRATION)}
    assert [dealt(seed, i, 1, 1) for i, seed in enumerate(hashed)] == hashed


def test_scattered_starts_differ_from_home(env):
    at_home, scattered = (
        collect_demonstrations(env, CollectConfig(episodes=6, max_steps=1, scatter_steps=n), 0).state[:, 0, :3]
        for n in (0, 3)
    )
    moved = np.linalg.norm(scattered - at_home, axis=1)  # metres
    assert (moved > 0.01).any() and moved.max() < 0.3


def test_collecting_repeats_itself(env, collected):
    again = collect_demonstrations(env, CONFIG, seed=3)
    np.testing.assert_array_equal(again.action, collected[1].action)
    np.testing.assert_array_equal(again.images["primary"], collected[1].images["primary"])


def test_an_env_without_an_expert_is_named():
    with pytest.raises(ValueError, match=r"PointReach has no expert\(\).*checkpoint"):
        collect_demonstrations(PointReach(4), CONFIG, 0)
