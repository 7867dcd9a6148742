"""The learned reward: it recovers what labels say, knows what it cannot score, and continues bit by bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from synthetic import DIM, SPEC, UTILITY, StateEncoder, make_episodes, make_pair_data

from vla_rlaif.interfaces import RewardModel
from vla_rlaif.preferences.data import EpisodeFeatures, pair_accuracy
from vla_rlaif.reward_models.encoders import PixelEncoder
from vla_rlaif.reward_models.networks import CnnConfig, Heads
from vla_rlaif.reward_models.preference import PreferenceConfig, PreferenceReward
from vla_rlaif.reward_models.preference_fit import FitConfig, _minibatches

SMALL = PreferenceConfig(hidden=(32,))
QUICK = FitConfig(num_steps=100, batch_size=64, lr=3e-3)


def fitted(config=SMALL, fit=QUICK, data=None, seed=0):
    reward = PreferenceReward(StateEncoder(), config, fit)
    return reward, reward.fit(make_pair_data(300) if data is None else data, seed)


def test_is_a_reward_model_that_must_be_fitted():
    reward = PreferenceReward(StateEncoder())
    assert isinstance(reward, RewardModel)
    assert reward.version == 0
    with pytest.raises(ValueError, match="has not been fitted yet"):
        reward.score(make_episodes(4))


def test_the_threads_of_others_are_left_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        reward, _ = fitted()
        reward.score(make_episodes(4))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_recovers_a_linear_utility():
    reward, report = fitted()
    assert report.held_out_accuracy >= 0.9
    assert report.train_accuracy >= 0.9
    assert report.num_pairs == (~make_pair_data(300).held_out).sum()
    episodes = make_episodes(64)  # their truth is the same utility of the last state
    assert np.corrcoef(reward.score(episodes), episodes.truth)[0, 1] > 0.95


def test_sums_over_live_frames():
    reward, report = fitted(replace(SMALL, frames="all"), data=make_pair_data(300, num_frames=5))
    assert report.held_out_accuracy >= 0.9
    length = np.array([1, 4, 2, 4])
    episodes = make_episodes(4, length=length)
    features = reward.features(episodes)
    assert features.live.sum(axis=1).tolist() == [2, 5, 3, 5]  # the frame before each decision and the last
    padded = np.where(features.live[..., None], features.values, 99.0).astype(np.float32)
    np.testing.assert_array_equal(
        reward.score_features(features), reward.score_features(EpisodeFeatures(values=padded, live=features.live))
    )


def test_ties_train_to_even_odds():
    data = make_pair_data(300)
    reward, _ = fitted(data=replace(data, target=np.full(300, 0.5), held_out=np.zeros(300, bool)))
    logits = reward.member_logits(EpisodeFeatures(values=data.values, live=data.live))
    even = 1 / (1 + np.exp(-(logits[:, data.pairs[:, 0]] - logits[:, data.pairs[:, 1]])))
    assert np.abs(even - 0.5).mean() < 0.05


def test_probabilities_are_calibrated_and_complement_each_other():
    reward, report = fitted()
    assert report.ece < 0.15
    assert report.temperature != 1
    episodes = make_episodes(8)
    pairs = np.array([[0, 1], [1, 0], [2, 3]])
    p = reward.probabilities(episodes, pairs)
    assert p[0] == pytest.approx(1 - p[1])
    gap = episodes.truth[3] - episodes.truth[2]
    assert gap > 3
    assert p[2] < 0.05


def test_invalid_episodes_are_nan_and_spare_the_others():
    reward, _ = fitted()
    whole = make_episodes(8)
    state = whole.state.copy()
    state[2] = np.nan  # what a broken simulation leaves
    broken = replace(whole, valid=np.arange(8) != 2, state=state)
    score = reward.score(broken)
    assert np.flatnonzero(np.isnan(score)).tolist() == [2]
    np.testing.assert_allclose(np.delete(score, 2), np.delete(reward.score(whole), 2), rtol=1e-5)
    assert np.isnan(reward.probabilities(broken, np.array([[2, 3], [4, 5]]))).tolist() == [True, False]
    assert np.isnan(reward.disagreement(broken)).sum() == 1


def test_combinations_are_ordered():
    state = fitted()[0].state()
    scores = {}
    for combination in ("mean", "min", "pessimistic"):
        reward = PreferenceReward(StateEncoder(), replace(SMALL, combination=combination, variance_weight=2.0))
        reward.restore(state)
        scores[combination] = reward.score(make_episodes(16))
    spread = reward.disagreement(make_episodes(16))
    assert (scores["min"] <= scores["mean"]).all()
    np.testing.assert_allclose(scores["pessimistic"], scores["mean"] - 2.0 * spread**2, atol=1e-5)


def test_scores_are_standardised_on_the_oldest_episodes():
    reward, _ = fitted(replace(SMALL, num_reference=100, num_members=1))
    data = make_pair_data(300)
    score = reward.score_features(EpisodeFeatures(values=data.values[:100], live=data.live[:100]))
    assert score.mean() == pytest.approx(0, abs=1e-4)
    assert score.std() == pytest.approx(1, abs=1e-4)


def test_state_continues_bit_by_bit():
    reward, _ = fitted()
    state = load(save(dict(reward.state())))
    again = PreferenceReward(StateEncoder(), SMALL, QUICK)
    again.restore(state)
    episodes = make_episodes(16)
    assert again.version == 1
    np.testing.assert_array_equal(again.score(episodes), reward.score(episodes))
    pairs = np.array([[0, 1], [2, 3]])
    np.testing.assert_array_equal(again.probabilities(episodes, pairs), reward.probabilities(episodes, pairs))
    more = make_pair_data(320)
    first, second = reward.fit(more, 7), again.fit(more, 7)
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)
    np.testing.assert_array_equal(again.score(episodes), reward.score(episodes))
    assert again.version == 2


def test_an_unfitted_state_comes_back_unfitted():
    reward, _ = fitted()
    reward.restore(PreferenceReward(StateEncoder(), SMALL).state())
    assert reward.version == 0


def test_a_state_of_another_encoder_is_refused():
    state = fitted()[0].state()
    with pytest.raises(ValueError, match=f"fitted on {DIM} features, but its encoder now gives"):
        PreferenceReward(PixelEncoder(SPEC, image_size=4), SMALL).restore(state)


def test_the_seed_decides_the_fit_and_global_generators_do_not():
    torch.manual_seed(1)
    a = fitted()[0].score(make_episodes(4))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    b = fitted()[0].score(make_episodes(4))
    np.testing.assert_array_equal(a, b)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not np.array_equal(a, fitted(seed=1)[0].score(make_episodes(4)))


def test_without_held_out_pairs_nothing_is_calibrated():
    data = make_pair_data(60)
    _, report = fitted(data=replace(data, held_out=np.zeros(60, bool)))
    assert np.isnan(report.held_out_accuracy) and np.isnan(report.ece)
    assert (report.temperature, report.num_steps) == (1.0, QUICK.num_steps)


def test_early_stop_keeps_the_best_look():
    data = make_pair_data(200, dim=DIM, held_out=0.5)
    noise = np.random.default_rng(0).random(200) < 0.4  # 40 % of the training labels are wrong: it must overfit
    target = np.where(noise & ~data.held_out, 1 - data.target, data.target)
    _, report = fitted(fit=replace(QUICK, num_steps=1000, eval_every=10), data=replace(data, target=target))
    assert report.num_steps < 1000
    assert report.num_steps % 10 == 0


def test_taking_labels_to_be_mistaken_learns_more_from_mistaken_ones():
    """A quarter of the training labels is wrong; those held out tell the truth and choose no step."""
    data = make_pair_data(300, held_out=0.4)
    wrong = ~data.held_out & (np.random.default_rng(1).random(300) < 0.25)
    data = replace(data, target=np.where(wrong, 1 - data.target, data.target))
    plain = replace(QUICK, num_steps=300, eval_every=301)
    found = [fitted(fit=replace(plain, mistakes=m), data=data)[1].held_out_accuracy for m in (0.0, 0.25)]
    assert found[1] > found[0] + 0.02
    with pytest.raises(ValueError, match="share of wrong labels"):
        FitConfig(mistakes=0.5)


def test_only_held_out_labels_are_nothing_to_train_on():
    data = make_pair_data(10)
    with pytest.raises(ValueError, match="no pair to train on"):
        fitted(data=replace(data, held_out=np.ones(10, bool)))


def test_half_of_every_minibatch_is_recent():
    config = FitConfig(num_steps=20, batch_size=128, recent_share=0.5, num_recent=100, bootstrap=True)
    train = np.arange(1000, 2000)
    batches = _minibatches(train, 3, config, 0)
    assert batches.shape == (20, 3, 128)
    assert batches.min() >= 1000
    # A resample's newest 100 of 1000 entries reach back over 100 +- 3 * 10 pairs. Half of the rest is not recent.
    recent = (batches >= 1870).mean(axis=(0, 2))
    assert ((recent > 0.5) & (recent < 0.62)).all()  # 64 of 128, and a tenth to an eighth of the other 64


def test_members_resample_the_pairs():
    batches = _minibatches(np.arange(50), 2, FitConfig(num_steps=100, bootstrap=True), 0)
    seen = [set(batches[:, member].ravel().tolist()) for member in range(2)]
    assert all(20 < len(pairs) < 45 for pairs in seen)  # 1 - 1/e of 50 is 32
    assert seen[0] != seen[1]


def test_heads_are_independent_networks():
    heads = Heads(3, 5, (4,), torch.Generator().manual_seed(0))
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(1))
    (w0, w1), (b0, b1) = heads.weight, heads.bias
    for member in range(3):
        hidden = torch.nn.functional.gelu(x[member] @ w0[member] + b0[member], approximate="tanh")
        torch.testing.assert_close(heads(x)[member], hidden @ w1[member] + b1[member])


def test_a_cnn_trains_with_the_heads():
    """Brightness is the truth, and the state is noise: only the torso can find it."""
    encoder = PixelEncoder(SPEC, image_size=8)
    config = PreferenceConfig(hidden=(16,), cnn=CnnConfig(num_cameras=1, image_size=8, width=8, dim=8))
    reward = PreferenceReward(encoder, config, replace(QUICK, num_steps=150))
    episodes = make_episodes(200)
    level = np.random.default_rng(3).integers(0, 255, 200).astype(np.uint8)
    images = np.broadcast_to(level[:, None, None, None, None], episodes.images["top"].shape).copy()
    episodes = replace(episodes, images={"top": images}, state=np.zeros_like(episodes.state))
    features = reward.features(episodes)
    pairs = np.arange(200).reshape(100, 2)
    target = np.sign(level[pairs[:, 0]].astype(float) - level[pairs[:, 1]]) / 2 + 0.5
    data = replace(make_pair_data(100), values=features.values, live=features.live, pairs=pairs, target=target)
    assert reward.fit(data, 0).held_out_accuracy >= 0.9


def test_accuracy_ignores_ties_and_halves_equal_scores():
    score = np.array([2.0, 1.0, 1.0])
    pairs = np.array([[0, 1], [1, 0], [1, 2], [0, 2], [0, 1]])
    target = np.array([1.0, 1.0, 1.0, 0.5, np.nan])  # right, wrong, equal, tie, skip
    assert pair_accuracy(score, pairs, target) == 0.5
    assert np.isnan(pair_accuracy(score, pairs[3:], target[3:]))


def test_utility_of_the_fixture_is_what_it_says():
    episodes = make_episodes(3)
    np.testing.assert_array_equal(episodes.truth, episodes.state[:, -1] @ UTILITY)
