"""Rewards that are not learned, and the contract that all of them keep."""

import sys
import types

import numpy as np
import pytest
from synthetic import make_episodes

from vla_rlaif.interfaces import RewardModel
from vla_rlaif.reward_models.pixel_distance import PixelDistance
from vla_rlaif.reward_models.python import PythonReward
from vla_rlaif.reward_models.success import SuccessReward

VALID = np.array([True, False, True, True])


@pytest.fixture(autouse=True)
def user_module(monkeypatch):
    """A user's module with good and bad rewards."""
    module = types.ModuleType("user_rewards")
    code = """
import numpy as np
def good(episodes): return episodes.state[:, -1, 0]
def integers(episodes): return [1, 2, 3, 4]
def unsure(episodes): return np.array([np.nan, 1.0, 2.0, 3.0])
def scalar(episodes): return 1.0
def column(episodes): return np.zeros((len(episodes.valid), 1))
def text(episodes): return np.array(["a", "b", "c", "d"])
def infinite(episodes): return np.full(len(episodes.valid), np.inf)
constant = 3
"""
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "user_rewards", module)


@pytest.mark.parametrize(
    "build",
    [SuccessReward, PixelDistance, lambda: PythonReward("user_rewards:good")],
    ids=["success", "pixel", "python"],
)
def test_every_reward_scores_each_episode_and_leaves_broken_ones_out(build):
    reward = build()
    assert isinstance(reward, RewardModel)
    score = reward.score(make_episodes(4, valid=VALID))
    assert score.shape == (4,)
    assert score.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(score), ~VALID)
    assert reward.version == 0


def test_privileged_rewards_say_so():
    assert SuccessReward.privileged and PythonReward.privileged
    assert not PixelDistance.privileged


def test_success_is_one_or_zero():
    success = np.array([True, False, False, True])
    assert SuccessReward().score(make_episodes(4, success=success)).tolist() == [1, 0, 0, 1]


def test_pixel_distance_is_that_of_the_brightest_dots():
    episodes = make_episodes(1)
    frames = np.zeros_like(episodes.images["top"])
    frames[0, -1, 1, 2, 0] = 255
    frames[0, -1, 4, 6, 1] = 255  # 3 rows and 4 columns away
    vars(episodes)["images"]["top"] = frames
    assert PixelDistance().score(episodes).tolist() == [-5]
    with pytest.raises(ValueError, match=r"No camera 'wrist' among \['top'\]"):
        PixelDistance(camera="wrist").score(episodes)


def test_python_rewards_may_be_integers_or_unsure():
    assert PythonReward("user_rewards:integers").score(make_episodes(4)).tolist() == [1, 2, 3, 4]
    assert np.isnan(PythonReward("user_rewards:unsure").score(make_episodes(4))).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scalar", r"returned shape \(\) for 4 episodes"),
        ("column", r"returned shape \(4, 1\) for 4 episodes"),
        ("text", "returned dtype <U1: return floats"),
        ("infinite", "returned infinities"),
    ],
)
def test_a_bad_return_value_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        PythonReward(f"user_rewards:{name}").score(make_episodes(4))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("user_rewards.good", "wanted 'package.module:name'"),
        (":good", "wanted 'package.module:name'"),
        ("no_such_package.rewards:f", "names the module 'no_such_package', which cannot be found"),
        ("user_rewards:missing", "has no 'missing'"),
        ("user_rewards:constant", "constant is a .*, wanted something to call"),
    ],
)
def test_a_bad_path_is_named(path, message):
    with pytest.raises(ValueError, match=message):
        PythonReward(path)


def test_an_import_error_inside_the_users_module_is_theirs(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("import a_package_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        PythonReward("broken_rewards:f")
