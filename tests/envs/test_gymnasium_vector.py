"""The registered tabletop ids in gymnasium's three ways to make a vector of them, and its recorder."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from vla_rlaif.envs.tabletop.gym_env import register

SETTINGS: dict[str, Any] = {"image_size": 16, "max_steps": 4, "renderer": "ray"}
# Spawned, never forked: a fork of a process that has rendered hangs.
MODES: dict[str, dict[str, Any]] = {
    "sync": {"autoreset_mode": AutoresetMode.DISABLED},
    "async": {"autoreset_mode": AutoresetMode.DISABLED, "context": "spawn"},
    "vector_entry_point": {},
}


def make_vec(mode: str, **change: Any) -> Any:
    register()
    return gymnasium.make_vec(
        "VlaRlaif/Push-v0", num_envs=2, vectorization_mode=mode, vector_kwargs=MODES[mode], **SETTINGS | change
    )


def played(env: Any) -> list[Any]:
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 2, 7)).astype(np.float32)
    assert env.action_space.contains(actions[0])
    obs = env.reset(seed=5)[0]
    found: list[Any] = [obs]
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        found += [obs, reward, terminated, truncated]
    assert env.observation_space.contains(obs)
    return found


def test_three_modes_play_the_same() -> None:
    expected = None
    for mode in MODES:
        env = make_vec(mode)
        found = played(env)
        env.close()
        env.close()
        if expected is None:
            expected = found
        for a, b in zip(found, expected, strict=True):
            for key in b if isinstance(b, dict) else [...]:
                np.testing.assert_array_equal(a[key], b[key])


def test_some_members_can_be_reset() -> None:
    env = make_vec("vector_entry_point")
    obs, _ = env.reset(seed=5)
    for _ in range(2):
        obs, *_ = env.step(np.full((2, 7), 0.5, np.float32))
    again, info = env.reset(seed=[9, 8], options={"reset_mask": np.array([False, True])})
    for key, values in again.items():
        np.testing.assert_array_equal(values[0], obs[key][0])
    fresh = make_vec("vector_entry_point")
    for key, values in fresh.reset(seed=[7, 8])[0].items():
        np.testing.assert_array_equal(again[key][1], values[1])
    assert info["instruction"][0].startswith("push the") and info["_instruction"].all()
    zero = np.zeros((2, 7), np.float32)
    assert env.step(zero)[3].tolist() == [False, False] and env.step(zero)[3].tolist() == [True, False]
    env.close()
    fresh.close()


def test_gymnasium_records_a_video(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    register()
    env = gymnasium.make("VlaRlaif/Reach-v0", render_mode="rgb_array", **SETTINGS)
    env = gymnasium.wrappers.RecordVideo(env, str(tmp_path / "videos"))
    env.reset(seed=0)
    while not any(env.step(np.zeros(7, np.float32))[2:4]):
        pass
    env.close()
    (video,) = tmp_path.glob("videos/*.mp4")
    assert video.stat().st_size > 1000


def test_gymnasium_records_a_video_of_all_members(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    env: Any = make_vec("vector_entry_point", render_mode="rgb_array")
    env = gymnasium.wrappers.vector.RecordVideo(env, str(tmp_path / "videos"), video_length=3)
    env.reset(seed=0)
    for _ in range(4):
        env.step(np.zeros((2, 7), np.float32))
    env.close()
    (video,) = tmp_path.glob("videos/*.mp4")
    assert video.stat().st_size > 1000


@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_bad_actions_are_named(mode: str) -> None:
    env = make_vec(mode)
    env.reset(seed=5)
    wild = env.step(np.full((2, 7), 9, np.float32))[0]
    with pytest.raises(ValueError, match="not finite"):
        env.step(np.full((2, 7), np.nan, np.float32))
    env.close()
    env = make_vec(mode)
    env.reset(seed=5)
    bounded = env.step(np.ones((2, 7), np.float32))[0]
    np.testing.assert_array_equal(wild["state"], bounded["state"])  # clipped, as everywhere here
    env.close()
