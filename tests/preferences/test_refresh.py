"""The preference learner: what it measures, what it holds out, and that a resumed run repeats itself bit by bit."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save
from synthetic import StateEncoder, make_episodes

from vla_rlaif.preferences.oracle import OracleLabeller
from vla_rlaif.preferences.refresh import FittableReward, PreferenceLearner, RefreshConfig
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_models.preference import PreferenceConfig, PreferenceReward
from vla_rlaif.reward_models.preference_fit import FitConfig

FIT = FitConfig(num_steps=60, batch_size=32, lr=5e-3)


def build(path, *, labeller=None, **config):
    reward = PreferenceReward(StateEncoder(), PreferenceConfig(hidden=(16,)), FIT)
    learner = PreferenceLearner(
        labeller=labeller or OracleLabeller(),
        store=PreferenceStore(path),
        reward=reward,
        config=RefreshConfig(**config),
    )
    return learner, reward


def ids(step: int, num: int = 32) -> list[str]:
    return [f"{step}:{row}" for row in range(num)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "preferences.sqlite"


def test_refreshes_are_measured_first_then_learned_from(path):
    learner, reward = build(path)
    assert isinstance(reward, FittableReward)
    first = learner.refresh(make_episodes(32), ids(0), 0, 100)
    assert np.isnan(first["reward/on_policy_accuracy"])
    before = reward.state()
    fresh = make_episodes(32, seed=1)
    old_score = reward.score(fresh)
    second = learner.refresh(fresh, ids(1), 1, 40)
    with PreferenceStore(path) as store:
        new = [r for r in store.records() if r.step == 1]
    right = [(old_score[row(r.first)] > old_score[row(r.second)]) == (r.p_first == 1) for r in new]
    assert second["reward/on_policy_accuracy"] == pytest.approx(np.mean(right))
    assert second["reward/on_policy_accuracy"] > 0.75
    assert (second["labels/total"], second["labels/budget_left"], second["reward/version"]) == (140, 860, 2)
    assert any(not np.array_equal(before[name], value) for name, value in reward.state().items())


def row(episode_id: str) -> int:
    return int(episode_id.split(":")[1])


def test_held_out_episodes_are_never_trained_on(path):
    learner, _ = build(path, held_out_share=0.2)
    for step in range(3):
        learner.refresh(make_episodes(32, seed=step), ids(step), step, 50)
    with PreferenceStore(path) as store:
        records = store.records()
    held = {i for r in records if r.held_out for i in (r.first, r.second)}
    trained = {i for r in records if not r.held_out for i in (r.first, r.second)}
    assert not held & trained
    assert sum(r.held_out for r in records) == 30


def test_the_budget_is_never_exceeded(path):
    learner, reward = build(path, budget=50)
    totals = [learner.refresh(make_episodes(32, seed=s), ids(s), s, 30)["labels/total"] for s in range(3)]
    assert totals == [30, 50, 50]
    assert (learner.num_labels, learner.budget_left, reward.version) == (50, 0, 2)


def test_ties_are_learned_from_and_skips_are_not(path):
    truth = np.repeat([0.9, 0.9, 0.1, 0.1], 8)
    learner, _ = build(path, labeller=OracleLabeller(skip_threshold=0.5))
    metrics = learner.refresh(make_episodes(32, group_size=4, truth=truth), ids(0), 0, 60)
    with PreferenceStore(path) as store:
        records = store.records()
    assert metrics["labels/skips"] == sum(r.is_skip for r in records) > 0
    assert metrics["labels/ties"] == sum(r.is_tie for r in records) > 0
    assert len(learner.state()["data/target"]) == 60 - metrics["labels/skips"]


def test_a_resumed_run_is_bit_equal(path, tmp_path):
    learner, reward = build(path)
    learner.refresh(make_episodes(32), ids(0), 0, 60)
    checkpoint = load(save(dict(learner.state())))
    learner.refresh(make_episodes(32, seed=1), ids(1), 1, 40)
    expected = reward.score(make_episodes(16, seed=2))

    resumed, resumed_reward = build(path)
    resumed.restore(checkpoint)
    assert resumed.state().keys() == checkpoint.keys()
    for name, value in resumed.state().items():
        if name == "counts":  # the last one is the position in the store, which has moved on
            value, checkpoint[name] = value[:-1], checkpoint[name][:-1]
        np.testing.assert_array_equal(value, checkpoint[name])
    metrics = resumed.refresh(make_episodes(32, seed=1), ids(1), 1, 40)
    np.testing.assert_array_equal(resumed_reward.score(make_episodes(16, seed=2)), expected)
    with PreferenceStore(path) as store:
        everything = [replace(r, id=None, time=0.0) for r in store.records(history=True)]
        assert store.count == metrics["labels/total"] == 100
    assert everything[60:100] == everything[100:]


def test_a_run_that_starts_again_leaves_the_lost_labels_out(path):
    for _ in range(2):
        learner, _ = build(path)
        learner.refresh(make_episodes(32), ids(0), 0, 60)
    with PreferenceStore(path) as store:
        assert (store.count, len(store.records(history=True))) == (60, 120)


def test_half_of_the_pairs_share_a_group_as_far_as_they_exist(path):
    learner, _ = build(path)
    assert learner.refresh(make_episodes(32), ids(0), 0, 40)["labels/within_group"] >= 20
    # Groups of 2, one half of them valid, hold no pair.
    alone = make_episodes(32, group_size=2, seed=1, valid=np.arange(32) % 2 == 0)
    metrics = learner.refresh(alone, ids(1), 1, 40)
    assert metrics["labels/within_group"] == 0
    assert metrics["labels/total"] == 77  # three groups are held out, whose three valid episodes make 3 pairs, not 6


def test_pairs_by_disagreement_start_out_uniform(path):
    learner, _ = build(path, mix={"disagreement": 1.0})
    for step in range(2):
        learner.refresh(make_episodes(32, seed=step), ids(step), step, 40)
    assert learner.num_labels == 80


def test_invalid_episodes_are_never_compared(path):
    learner, _ = build(path)
    learner.refresh(make_episodes(32, valid=np.arange(32) % 2 == 0), ids(0), 0, 40)
    with PreferenceStore(path) as store:
        assert all(row(i) % 2 == 0 for r in store.records() for i in (r.first, r.second))


def test_ids_must_be_fresh_and_complete(path):
    learner, _ = build(path)
    with pytest.raises(ValueError, match="32 episodes need as many different ids, got 31"):
        learner.refresh(make_episodes(32), ids(0, 31), 0, 10)
    learner.refresh(make_episodes(32), ids(0), 0, 60)
    with pytest.raises(ValueError, match="is labelled already"):
        learner.refresh(make_episodes(32), ids(0), 1, 10)


class LoudLabeller:
    """Answers in percent."""

    @property
    def name(self) -> str:
        return "loud/1"

    def label(self, episodes, pairs, seed):
        return np.full(len(pairs), 100.0)


def test_a_labeller_out_of_range_is_named(path):
    learner, _ = build(path, labeller=LoudLabeller())
    with pytest.raises(ValueError, match=r"'loud/1' must give 10 probabilities in \[0, 1\] or NaN"):
        learner.refresh(make_episodes(32), ids(0), 0, 10)


@pytest.mark.parametrize("values", [{"budget": 0}, {"held_out_share": 0.9}])
def test_impossible_configs_are_refused(values):
    with pytest.raises(ValueError, match="Preferences need a budget"):
        RefreshConfig(**values)
