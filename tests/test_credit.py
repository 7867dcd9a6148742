"""The halves of the algorithms that see episodes, on made-up ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic import DIM, NUM_DECISIONS, StateEncoder, make_episodes

from vla_rlaif.algorithm_config import CriticConfig
from vla_rlaif.credit import GroupCredit, KeptCredit
from vla_rlaif.critic import Critic
from vla_rlaif.critic_credit import CriticCredit, at_the_end
from vla_rlaif.filtered_bc import FilteredBC
from vla_rlaif.grpo import GRPO
from vla_rlaif.interfaces import Credit
from vla_rlaif.learning import split_minibatches, units_of
from vla_rlaif.pair_credit import LabelledPairs, RankedPairs, pair_batch
from vla_rlaif.ppo import PPO
from vla_rlaif.types import Credited, Episodes

REWARD = np.array([0.0, 3.0, 1.0, np.nan, 5.0, 4.0, 4.0, 2.0])  # two groups of four
LENGTH = np.array([4, 2, 4, 4, 1, 3, 4, 4])


def episodes() -> Episodes:
    return make_episodes(8, length=LENGTH)


def critic(**settings: Any) -> Critic:
    return Critic(StateEncoder(), CriticConfig(hidden=(16,), **settings), PPO(value_clip=None), seed=0)


CREDITS = {
    "grpo": lambda: GroupCredit(algorithm=GRPO(group_size=4), normalizer="constant"),
    "ppo": lambda: CriticCredit(PPO(kl_coef=0.1, kl_target=0.02), critic()),
    "dpo": lambda: LabelledPairs(pairs_per_step=3, seed=0),
    "tpo": lambda: RankedPairs(pairs_per_group=2, margin=0.0),
    "filtered_bc": lambda: KeptCredit(algorithm=FilteredBC(share=0.5)),
}


def assign(credit: Credit, *, step: int = 0, reward: np.ndarray = REWARD) -> Credited:
    return credit.assign(episodes(), reward, step=step, window=1, is_stale=False)


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.mark.parametrize("name", CREDITS)
def test_every_credit_keeps_the_contract(name):
    """Asking twice changes nothing, an episode without a reward has no gradient, a restored one goes on alike."""
    credit, other = CREDITS[name](), CREDITS[name]()
    assert isinstance(credit, Credit)
    if isinstance(credit, LabelledPairs):
        credit.add(episodes(), np.array([[0, 1], [4, 5], [6, 7], [1, 2]]), np.array([0.0, 1.0, np.nan, 0.5]))
    first, again = assign(credit), assign(credit)
    same(vars(first.batch.obs) | {"images": 0}, vars(again.batch.obs) | {"images": 0})
    np.testing.assert_array_equal(first.batch.advantage, again.batch.advantage)
    assert first.advantage.shape == (8,) and first.advantage[3] == 0
    assert first.metrics["groups/total"] == 2 and first.metrics["groups/live"] == 2
    credit.learned({"reference_kl": 1.0}, 0)
    other.restore(credit.state())
    same(other.state(), credit.state())
    for step in (1, 2):
        a, b = (assign(each, step=step) for each in (credit, other))
        np.testing.assert_array_equal(a.batch.advantage, b.batch.advantage)
        np.testing.assert_array_equal(a.batch.obs.state, b.batch.obs.state)
        assert a.batch.obs.instruction == b.batch.obs.instruction
        assert credit.learned({"reference_kl": 0.0}, step) == other.learned({"reference_kl": 0.0}, step)
    same(other.state(), credit.state())


@pytest.mark.parametrize("name", ["ppo", "dpo", "tpo", "filtered_bc"])
def test_without_any_reward_nothing_is_learned(name):
    credited = assign(CREDITS[name](), reward=np.full(8, np.nan))
    assert not credited.batch.mask.any() and credited.metrics["groups/live"] == 0


def test_the_reward_falls_to_the_last_live_decision():
    mask = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
    np.testing.assert_array_equal(at_the_end(np.array([2.0, 3.0, 4.0]), mask), [[0, 2, 0], [0, 0, 3], [0, 0, 0]])


def test_ppo_without_a_trained_critic_gives_each_decision_its_return():
    """gamma = lam = 1, values 0: the return is the reward, whitened over the live decisions of scored episodes."""
    credited = assign(CriticCredit(PPO(gamma=1.0, lam=1.0), critic()))
    rows = np.repeat(np.delete(REWARD, 3), np.delete(LENGTH, 3))
    np.testing.assert_allclose(credited.batch.advantage, (rows - rows.mean()) / rows.std(), rtol=1e-5)
    assert credited.batch.num_valid == len(rows) == 22
    assert credited.batch.kl_coef == 0.0


def test_the_critic_learns_the_returns():
    """Truth is linear in the state: after some fits the values explain nearly all of what is returned."""
    made, played = critic(epochs=60, lr=1e-2), make_episodes(64)
    mask = played.mask
    features = made.features(played)
    assert features.shape == (64, NUM_DECISIONS, DIM + 1)
    np.testing.assert_allclose(features[0, :, -1], [1, 0.75, 0.5, 0.25])  # what is left
    returns = played.state[:, :NUM_DECISIONS, :2].sum(axis=2) + 0.5 * features[..., -1]
    assert (made.values(features) == 0).all()
    logs = [made.fit(features[mask], returns[mask], made.values(features)[mask], seed=seed) for seed in range(3)]
    log = logs[-1]
    assert log["critic/explained"] > 0.9 > 0.5 > log["critic/loss"]
    error = made.values(features)[mask] - returns[mask]
    assert np.var(error) < 0.1 * np.var(returns[mask])


def test_the_critic_sees_no_truth():
    plain = episodes()
    lie = replace(plain, success=~plain.success, truth=-plain.truth)
    np.testing.assert_array_equal(critic().features(plain), critic().features(lie))


def test_the_kl_coefficient_is_of_the_next_step():
    credit = CriticCredit(PPO(kl_coef=0.1, kl_target=0.02), critic())
    assert assign(credit).batch.kl_coef == 0.1
    assert credit.learned({"reference_kl": 1.0}, 0)["kl_coef"] == 0.1
    assert assign(credit).batch.kl_coef == 0.2


def test_ranked_pairs_by_hand():
    """0, 3, 1, NaN: 3 with 0, and the middle has no partner. 5, 4, 4, 2: 5 with 2, and 4 with 4 is too near."""
    group = np.repeat([7, 9], 4)
    pairs = RankedPairs(pairs_per_group=2, margin=0.01).pairs(REWARD, group)
    np.testing.assert_array_equal(pairs, [[1, 0], [4, 7]])
    credited = assign(RankedPairs(pairs_per_group=2, margin=0.01))
    np.testing.assert_array_equal(credited.advantage, [-1, 1, 0, 0, 1, 0, 0, -1])
    assert credited.metrics["pairs/trained"] == 2


def test_a_pair_is_laid_out_as_the_loss_reads_it():
    played = episodes()
    batch = pair_batch(played, np.array([[1, 4], [0, 2]]), np.array([1.0, -0.5]), window=1)
    assert batch.unit == 2 * NUM_DECISIONS and batch.num_valid == 2
    shape = (2, 2, NUM_DECISIONS)
    np.testing.assert_array_equal(batch.mask.reshape(shape).sum(axis=2), LENGTH[[[1, 4], [0, 2]]])
    np.testing.assert_array_equal(batch.advantage.reshape(shape)[:, :, 0], [[1, -1], [-0.5, 0.5]])
    state = batch.obs.state.reshape(*shape, DIM)
    np.testing.assert_array_equal(state[1, 0], played.state[0, :NUM_DECISIONS])
    np.testing.assert_array_equal(state[0, 1], played.state[4, [0, 0, 0, 0]])  # padding repeats the first decision
    assert batch.obs.instruction[0] == played.instruction[1]


def test_dpo_keeps_only_what_is_compared():
    credit = LabelledPairs(pairs_per_step=9, seed=0)
    credit.add(episodes(), np.array([[0, 1], [1, 5], [2, 3]]), np.array([1.0, 0.5, np.nan]))
    credit.add(episodes(), np.array([[6, 7]]), np.array([0.25]))
    assert credit.num_episodes == 3 + 2
    credited = assign(credit)
    assert credited.metrics["pairs/labelled"] == credited.metrics["pairs/trained"] == 3
    labels = credited.batch.advantage.reshape(3, 2, NUM_DECISIONS)[:, :, 0]
    assert sorted(map(tuple, labels.tolist())) == [(-0.5, 0.5), (0.0, 0.0), (1.0, -1.0)]
    np.testing.assert_array_equal(credited.advantage, np.zeros(8))


def test_units_stay_together_in_minibatches():
    parts = split_minibatches(np.random.default_rng(0), 11 * 6, minibatch=24, micro_batches=2, unit=6)
    assert units_of(24, 2, 6) == 4  # two in each of two micro-batches
    seen = []
    for part in parts:
        for index, valid in part:
            assert len(index) == 12
            units, whole = index.reshape(-1, 6), valid.reshape(-1, 6)
            assert (units == units[:, :1] + np.arange(6)).all() and (units[:, 0] % 6 == 0).all()
            assert (whole == whole[:, :1]).all()
            seen += units[whole[:, 0], 0].tolist()
    assert sorted(seen) == list(range(0, 66, 6))
    with pytest.raises(ValueError, match="at least 14"):
        units_of(12, 2, 7)
