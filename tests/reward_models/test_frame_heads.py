"""The heads "progress" and "success": what they learn from clips, where the threshold lies, and what they refuse."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from synthetic import SPEC, StateEncoder, make_episodes, make_pair_data

from vla_rlaif.interfaces import FrameReward
from vla_rlaif.preferences.clips import KINDS, ends, make_clips
from vla_rlaif.reward_models.frame_heads import NUM_BINS, Layout, two_hot
from vla_rlaif.reward_models.preference import PreferenceReward
from vla_rlaif.reward_models.preference_config import PreferenceConfig
from vla_rlaif.reward_models.preference_fit import FitConfig

ALL = PreferenceConfig(hidden=(32,), heads=("return", "progress", "success"))
ONE = SPEC.instructions[:1]
QUICK = FitConfig(num_steps=200, batch_size=64, lr=1e-2)


def clip_episodes(num=120, seed=0):
    """The first state dim counts from 0 to 4 in episodes that succeed (rows 0, 2, ...), from 0 to 2 in the others."""
    episodes = make_episodes(num, seed=seed)
    state = 0.1 * episodes.state
    success = np.arange(num) % 2 == 0
    state[:, :, 0] = np.where(success[:, None], np.arange(5.0), np.arange(5.0) / 2)
    return replace(  # one instruction, for StateEncoder does not read it
        episodes, state=state, success=success, truth=np.where(success, 1.0, 0.5), instruction=ONE * num
    )


def fit_all(config=ALL, fit=QUICK, seed=0):
    reward = PreferenceReward(StateEncoder(), config, fit)
    episodes = clip_episodes()
    features = reward.features(episodes)
    pairs = np.random.default_rng(1).permutation(120).reshape(60, 2)
    gap = episodes.truth[pairs[:, 0]] - episodes.truth[pairs[:, 1]]
    data = replace(
        make_pair_data(60),
        values=features.values,
        live=features.live,
        pairs=pairs,
        target=np.sign(gap) / 2 + 0.5,
        held_out=np.arange(60) >= 45,
    )
    held = np.arange(120) >= 90
    clips = make_clips(episodes, episodes.success.astype(float), held, ONE, reward.features, 0)
    return reward, reward.fit(data, seed, clips), clips


@pytest.fixture(scope="module")
def fitted():
    return fit_all()


def test_two_hot_has_the_expectation_it_encodes():
    value = torch.tensor([0.0, 0.05, 0.37, 1.0])
    target = two_hot(value)
    torch.testing.assert_close(target.sum(-1), torch.ones(4))
    torch.testing.assert_close(target @ torch.linspace(0, 1, NUM_BINS), value)
    assert (target > 0).sum(-1).max() == 2
    # The expectation over bins that are all equally likely is their middle.
    assert Layout(heads=ALL.heads).progress(torch.zeros(1, 1 + NUM_BINS + 1)).item() == pytest.approx(0.5)


def test_progress_is_learned_from_the_time_to_the_end(fitted):
    reward, report, _ = fitted
    assert isinstance(reward, FrameReward)
    assert report.progress_error < 0.08
    progress = reward.progress(clip_episodes(8, seed=5))
    assert progress.shape == (8, 5)
    np.testing.assert_allclose(progress[0], [0, 0.25, 0.5, 0.75, 1.0], atol=0.15)
    assert progress[1, -1] < 0.65  # half way is all that a failed clip shows


def test_success_is_told_from_failure_at_the_stated_rate(fitted):
    reward, report, clips = fitted
    assert report.false_positives <= 0.05
    assert report.success_recall >= 0.9
    p = reward.success(clip_episodes(8, seed=5))
    assert (p[::2, -1] > reward.threshold).all() and (p[1::2, -1] < reward.threshold).all()
    assert (p[:, :-2] < 0.5).all()
    kinds = {KINDS[k] for k in clips.kind[ends(clips)]}
    assert kinds == {"succeeded", "failed", "rewound", "cut", "near miss"}


def test_frames_after_the_end_and_invalid_episodes_say_nothing(fitted):
    reward, _, _ = fitted
    valid = np.array([True, False, True, True])
    episodes = replace(clip_episodes(4), valid=valid, mask=np.array([[1, 1, 0, 0], [1] * 4, [1] * 4, [1] * 4], bool))
    for values in (reward.progress(episodes), reward.success(episodes)):
        assert np.isnan(values[0]).tolist() == [False, False, False, True, True]
        assert np.isnan(values[1]).all() and not np.isnan(values[2:]).any()
    assert np.isnan(reward.score(episodes)).tolist() == [False, True, False, False]


def test_the_score_is_the_head_that_the_config_names(fitted):
    reward, _, _ = fitted
    episodes = clip_episodes(40, seed=3)
    state = load(save(dict(reward.state())))
    value = {}
    for score in ("return", "progress", "success", "mix"):
        again = PreferenceReward(StateEncoder(), replace(ALL, score=score), QUICK)
        again.restore(state)
        assert again.threshold == reward.threshold
        value[score] = again.score(episodes)
        assert value[score][::2].min() > value[score][1::2].max(), score
    np.testing.assert_allclose(
        value["mix"], np.mean([value[s] for s in ("return", "progress", "success")], axis=0), atol=1e-5
    )
    last = reward.progress(episodes)[:, -1]
    assert np.corrcoef(value["progress"], last)[0, 1] > 0.98  # one scale for each member


def test_equal_seeds_are_bit_equal(fitted):
    again, report, _ = fit_all()
    assert replace(report, seconds=0.0) == replace(fitted[1], seconds=0.0)
    for name, value in fitted[0].state().items():
        np.testing.assert_array_equal(again.state()[name], value, err_msg=name)


def test_without_such_heads_clips_change_nothing():
    reward, _, clips = fit_all(replace(ALL, heads=("return",)))
    with pytest.raises(ValueError, match="'progress' of single frames is none of them"):
        reward.progress(clip_episodes(2))
    assert "threshold" not in reward.state()
    assert np.isnan(reward.threshold)
    assert len(clips.clip)


def test_one_class_only():
    reward = PreferenceReward(StateEncoder(), ALL, QUICK)
    episodes, none = clip_episodes(), np.zeros(120, bool)
    data = make_pair_data(60, num_frames=5)
    with pytest.raises(ValueError, match="learn from clips that are known to have succeeded, and there is none"):
        reward.fit(data, 0)
    failures = make_clips(episodes, np.zeros(120), none, ONE, reward.features, 0)
    with pytest.raises(ValueError, match="and there is none"):
        reward.fit(data, 0, failures)
    # Only successes: the earlier frames and the negatives made of them are the other class.
    rows = np.where(episodes.success, 1.0, np.nan)
    report = reward.fit(data, 0, make_clips(episodes, rows, np.arange(120) > 90, ONE, reward.features, 0))
    assert not np.isnan(report.success_threshold)


def test_without_held_out_failures_there_is_no_threshold():
    reward = PreferenceReward(StateEncoder(), ALL, replace(QUICK, num_steps=5))
    episodes = clip_episodes()
    clips = make_clips(episodes, episodes.success * 1.0, np.zeros(120, bool), ONE, reward.features, 0)
    report = reward.fit(make_pair_data(60, num_frames=5), 0, clips)
    assert np.isnan([report.success_threshold, report.false_positives, report.progress_error]).all()
    assert np.isnan(reward.threshold)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": ("progress",)}, "heads of a preference reward are return and then others"),
        ({"heads": ("return", "return")}, "each once"),
        ({"heads": ("return",), "score": "success"}, "The score is 'success', but the heads are"),
        ({"false_positive_rate": 0.0}, r"a share in \(0, 1\)"),
    ],
)
def test_settings_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ALL, **change)


def test_heads_of_a_saved_reward_must_be_the_same(fitted):
    other = PreferenceReward(StateEncoder(), replace(ALL, heads=("return", "progress")), QUICK)
    with pytest.raises(ValueError, match=r"has the heads \('return', 'progress', 'success'\), this one"):
        other.restore(fitted[0].state())


def test_the_change_since_the_first_frame_is_read_beside_every_frame():
    reward = PreferenceReward(StateEncoder(), replace(ALL, first_frame=True))
    episodes = clip_episodes(4)
    values = reward.features(episodes).values
    np.testing.assert_allclose(values[:, 2, :8], episodes.state[:, 2], rtol=1e-6)
    np.testing.assert_allclose(values[:, 2, 8:], episodes.state[:, 2] - episodes.state[:, 0], rtol=1e-6)
    assert not values[:, 0, 8:].any()
    only_last = PreferenceReward(StateEncoder(), PreferenceConfig(first_frame=True)).features(episodes)
    np.testing.assert_allclose(only_last.values[:, 0, :8], episodes.state[:, -1], rtol=1e-6)
    moved = episodes.state[:, -1] - episodes.state[:, 0]
    np.testing.assert_allclose(only_last.values[:, 0, 8:], moved, rtol=1e-6)


def test_the_early_stop_looks_at_the_frames_only_if_their_heads_score():
    """Of pairs labelled by a coin there is nothing to learn, of the clips there is: each side has its own best step."""
    episodes = clip_episodes()
    rng = np.random.default_rng(2)
    coin = replace(make_pair_data(100), pairs=rng.integers(0, 120, (100, 2)), target=rng.integers(0, 2, 100) * 1.0)
    stop = replace(QUICK, lr=3e-3, eval_every=10)
    steps = {}
    for score in ("return", "mix"):
        reward = PreferenceReward(StateEncoder(), replace(ALL, score=score), stop)
        features = reward.features(episodes)
        data = replace(coin, values=features.values, live=features.live, held_out=np.arange(100) >= 60)
        outcome = episodes.success.astype(float)
        clips = make_clips(episodes, outcome, np.arange(120) >= 90, ONE, reward.features, 0)
        steps[score] = reward.fit(data, 0, clips).num_steps
    assert steps["return"] <= 50 < 100 <= steps["mix"]
