import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from vla_rlaif.envs.halves import Halves
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.interfaces import Policy, VectorEnv
from vla_rlaif.policies.gaussian_jax import GaussianJax
from vla_rlaif.policy_config import GaussianConfig, OctoConfig, SmallStemConfig
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
from vla_rlaif.types import Decision, EnvSpec, Episodes, Observation, Transition, Weights


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


def octo(spec: EnvSpec) -> Policy:
    from vla_rlaif.policies.octo.construct import from_scratch

    sizes: dict[str, Any] = {"token_dim": 16, "num_layers": 1, "mlp_dim": 16, "head_dim": 16, "head_blocks": 1}
    sizes |= {"stem": SmallStemConfig(features=(4, 8), groups=2, embedding=8), "language_dim": 8, "time_dim": 8}
    return from_scratch(OctoConfig(diffusion_steps=4, tuned_steps=2, window=2, **sizes), spec, seed=1)


def torch_gaussian(spec: EnvSpec) -> Policy:
    from vla_rlaif.policies.gaussian_torch import GaussianTorch

    return GaussianTorch(GaussianConfig(backend="torch"), spec)


@dataclass
class Watched:
    """A policy that remembers how many rows it was asked for, and runs ``on_act`` before each answer."""

    inner: Policy
    on_act: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.rows: list[int] = []

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def window(self) -> int:
        return self.inner.window

    def act(self, obs: Observation, seeds: np.ndarray, *, noise_scale: float = 1.0) -> Decision:
        self.rows.append(len(seeds))
        self.on_act()
        return self.inner.act(obs, seeds, noise_scale=noise_scale)

    def load(self, weights: Weights, version: int) -> None:
        self.inner.load(weights, version)


def assert_same(a: Episodes, b: Episodes) -> None:
    for name in ("state", "action", "logp", "mask", "executed", "success", "truth", "valid"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for mine, other in ((a.images, b.images), (a.trace, b.trace)):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            np.testing.assert_array_equal(value, other[key], err_msg=key)
    assert a.instruction == b.instruction


@pytest.mark.parametrize("make", [octo, torch_gaussian])
def test_act_batch_makes_episodes_independent_of_the_number_of_members(make: Callable[[EnvSpec], Policy]) -> None:
    policy = Watched(make(PointReach(1).spec))
    starts = train_starts(seed=1, step=0, num_groups=4, group_size=4)
    whole = rollout(policy, PointReach(16), starts, seed=1, act_batch=4)
    assert set(policy.rows) == {4}
    assert_same(rollout(policy, PointReach(4), starts, seed=1, act_batch=4), whole)
    assert_same(rollout(policy, PointReach(12), starts, seed=1, act_batch=4), whole)  # 12 and 4, filled up to 12
    assert set(policy.rows) == {4}
    # Two workers with half of the groups each.
    halves = [rollout(policy, PointReach(8), train_rows(starts, i), seed=1, act_batch=4) for i in (0, 8)]
    assert_same(concatenate(halves), whole)


def train_rows(starts: Any, first: int) -> Any:
    return replace(starts, **{k: v[first : first + 8] for k, v in vars(starts).items()})


def test_act_batch_must_divide_the_members(policy: Policy) -> None:
    with pytest.raises(ValueError, match="6 members do not split into act batches of 4 rows"):
        rollout(policy, PointReach(6), train_starts(0, 0, 3, 2), seed=0, act_batch=4)


@pytest.mark.parametrize(("renderer", "num_envs"), [("ray", (4, 4)), ("egl", (2, 6))])
def test_halves_play_the_same_episodes(renderer: str, num_envs: tuple[int, int]) -> None:
    def tabletop(num: int) -> Tabletop:
        return Tabletop("push", num_envs=num, image_size=16, chunk=2, max_steps=6, renderer=renderer)

    starts = train_starts(seed=1, step=0, num_groups=3, group_size=4)  # 8 and 4, filled up to 8
    env, halves = tabletop(8), Halves(tabletop(num_envs[0]), tabletop(num_envs[1]))
    policy = GaussianJax(GaussianConfig(), env.spec)
    expected = rollout(policy, env, starts, seed=1, act_batch=2)
    assert_same(rollout(policy, halves, starts, seed=1, act_batch=2), expected)
    assert halves.seconds["physics"] > 0 and halves.faults == {}
    env.close()
    halves.close()


@dataclass
class Announcing:
    """PointReach that says when a step begins."""

    num_envs: int

    def __post_init__(self) -> None:
        self.env, self.is_stepping = PointReach(self.num_envs), threading.Event()

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    def reset(self, seeds: np.ndarray) -> Transition:
        return self.env.reset(seeds)

    def step(self, action: np.ndarray) -> Transition:
        self.is_stepping.set()
        return self.env.step(action)

    def close(self) -> None: ...


class Pair(Announcing):
    @property
    def halves(self) -> tuple[VectorEnv, VectorEnv]:
        return self.first, self.second

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first, self.second = Announcing(self.num_envs // 2), Announcing(self.num_envs // 2)


def test_one_half_computes_while_the_policy_decides_for_the_other(policy: Policy) -> None:
    pair, order, me = Pair(8), [], threading.get_ident()
    running = [pair.second.is_stepping, pair.first.is_stepping]  # of the half that was decided for before

    def on_act() -> None:
        assert threading.get_ident() == me  # never on another thread, so never two at a time
        if order:
            assert running[len(order) % 2].wait(10)
            running[len(order) % 2].clear()
        order.append(len(order) % 2)

    watched = Watched(policy, on_act)
    starts = train_starts(seed=1, step=0, num_groups=2, group_size=4)
    assert_same(rollout(watched, pair, starts, seed=1), rollout(policy, PointReach(8), starts, seed=1, act_batch=4))
    assert watched.rows == [4] * 2 * pair.spec.max_decisions


def test_an_error_in_one_half_ends_the_rollout(policy: Policy) -> None:
    pair = Pair(8)
    pair.second.env = PointReach(3)
    with pytest.raises(ValueError, match="wanted 3"):
        rollout(policy, pair, train_starts(0, 0, 2, 4), seed=0)
