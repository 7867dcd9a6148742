"""Gymnasium wrappers against upstream's traces; the pains of upstream's users by issue number."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from vla_rlaif.policies.octo.action_stats import ActionStatistics
from vla_rlaif.policies.octo.images import resize
from vla_rlaif.policies.octo.wrappers import (
    HistoryWrapper,
    NormalizeProprio,
    ResizeImageWrapper,
    RHCWrapper,
    TemporalEnsembleWrapper,
    octo_stack,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "octo" / "extra_golden.npz"
SIZES = {"image_primary": (16, 16), "image_wrist": (8, 8)}
PROPRIO = ActionStatistics.from_official({"mean": [1.0, 2.0], "std": [2.0, 4.0], "mask": [True, False]})


@cache
def golden(name: str) -> np.ndarray:
    return np.load(GOLDEN)[f"wrappers/{name}"]


class Counter(gymnasium.Env[Any, Any]):
    """Counts its steps: x is the count, and so is the reward. Its buffers are reused, as some simulators do."""

    def __init__(self, last: int = 100, more: Mapping[str, spaces.Space[Any]] | None = None):
        self.observation_space = spaces.Dict({"x": spaces.Box(0, 100, (1,), np.float32), **(more or {})})
        self.action_space = spaces.Box(-10, 10, (2,), np.float32)
        self.actions: list[np.ndarray] = []
        self._last, self._buffer = last, np.zeros(1, np.float32)
        self._rest = {key: space.sample() for key, space in (more or {}).items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._buffer[:] = 0
        return {"x": self._buffer, **self._rest}, {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self._buffer += 1
        count = float(self._buffer[0])
        return {"x": self._buffer, **self._rest}, count, count >= self._last, False, {"count": count}


def camera_env() -> Counter:
    image = spaces.Box(0, 255, (24, 32, 3), np.uint8)
    return Counter(more={"image_primary": image, "image_wrist": image, "proprio": spaces.Box(-9, 9, (2,), np.float64)})


def test_history_is_upstreams() -> None:
    env = HistoryWrapper(Counter(), 3)
    for _ in range(2):  # the second episode remembers nothing of the first
        frames = [env.reset()[0]] + [env.step(np.zeros(2))[0] for _ in range(4)]
        np.testing.assert_array_equal([frame["x"] for frame in frames], golden("history/x"))
        np.testing.assert_array_equal([frame["timestep_pad_mask"] for frame in frames], golden("history/mask"))
        assert all(env.observation_space.contains(frame) for frame in frames)


def test_receding_horizon_is_upstreams() -> None:
    env = RHCWrapper(HistoryWrapper(Counter(last=7), 2), 3)
    env.reset()
    steps = [env.step(np.zeros((4, 2), np.float32)) for _ in range(3)]
    np.testing.assert_array_equal([step[0]["x"] for step in steps], golden("rhc/x"))
    np.testing.assert_array_equal([step[1] for step in steps], golden("rhc/reward"))
    np.testing.assert_array_equal([step[2] for step in steps], golden("rhc/done"))
    assert [step[4] for step in steps] == [{"count": c, "num_executed": n} for c, n in ((3.0, 3), (6.0, 3), (7.0, 1))]


def test_receding_horizon_executes_the_first_actions() -> None:
    inner = Counter()
    env = RHCWrapper(inner, 2)
    env.reset()
    env.step(np.arange(6, dtype=np.float32).reshape(3, 2))
    np.testing.assert_array_equal(inner.actions, [[0, 1], [2, 3]])
    assert env.action_space.shape == (2, 2)
    with pytest.raises(ValueError, match="chunk of 1 actions, exec_horizon is 2"):
        env.step(np.zeros((1, 2), np.float32))


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_ensemble_is_upstreams(weight: float) -> None:
    inner = Counter()
    env = TemporalEnsembleWrapper(inner, 4, weight)
    for _ in range(2):  # the second episode remembers nothing of the first
        env.reset()
        inner.actions.clear()
        for plan in golden("ensemble/plans"):
            env.step(plan)
        np.testing.assert_allclose(inner.actions, golden(f"ensemble/executed_w{weight:g}"), rtol=0, atol=1e-6)
    assert env.action_space.shape == (4, 2) and inner.actions[0].dtype == np.float32
    with pytest.raises(ValueError, match="chunk of 3 actions, pred_horizon is 4"):
        env.step(np.zeros((3, 2), np.float32))


def test_images_are_resized_and_cropped_by_key() -> None:
    env = ResizeImageWrapper(camera_env(), SIZES, crop_keys=["image_primary"])
    inner, _ = env.env.reset()
    frame, _ = env.reset()
    np.testing.assert_array_equal(frame["image_primary"], resize(inner["image_primary"], (16, 16), crop_area=0.9))
    np.testing.assert_array_equal(frame["image_wrist"], resize(inner["image_wrist"], (8, 8)))
    assert env.observation_space.contains(frame)


def test_images_that_cannot_be_resized_are_refused() -> None:
    with pytest.raises(ValueError, match=r"image_side is None; wanted a Box\. .* image_primary, image_wrist"):
        ResizeImageWrapper(camera_env(), {"image_side": (8, 8)})
    with pytest.raises(ValueError, match=r"x is float32 \(1,\); wanted uint8"):
        ResizeImageWrapper(camera_env(), {"x": (8, 8)})
    with pytest.raises(ValueError, match=r"crop_keys \['image_side'\] have no size"):
        ResizeImageWrapper(camera_env(), SIZES, crop_keys=["image_side"])


def test_pain_11_proprio_is_normalised_in_evaluation_as_in_training() -> None:
    """octo-models/octo issues 80 and 127. By hand: (x - 1) / 2 in dim 0, dim 1 is not in the mask."""
    env = NormalizeProprio(camera_env(), PROPRIO)
    raw, _ = env.env.reset()
    frame, _ = env.reset()
    training = PROPRIO.normalise(raw["proprio"].astype(np.float32)[None])[0]  # what a data loader does
    np.testing.assert_array_equal(frame["proprio"], training)
    by_hand = [(raw["proprio"][0] - 1) / 2, raw["proprio"][1]]
    np.testing.assert_allclose(frame["proprio"], by_hand, rtol=0, atol=1e-6)
    assert env.observation_space.contains(frame)
    seven = ActionStatistics.from_official({"mean": [0.0] * 7, "std": [1.0] * 7})
    with pytest.raises(ValueError, match=r"proprio has shape \(2,\), the statistics \(7,\)"):
        NormalizeProprio(camera_env(), seven)


STACK: dict[str, Any] = {"trained_window": 2, "max_horizon": 4, "image_sizes": SIZES}


def test_pain_7_one_order_of_the_wrappers() -> None:
    """octo-models/octo issue 93. Every entry is as in training: resized, normalised, then stacked."""
    env = octo_stack(camera_env(), horizon=2, **STACK, crop_keys=["image_primary"], proprio=PROPRIO, exec_horizon=3)
    raw, _ = env.unwrapped.reset()
    env.reset()
    frame, reward, _, _, _ = env.step(np.zeros((3, 2), np.float32))
    assert env.observation_space.contains(frame) and reward == 1 + 2 + 3
    assert {key: value.shape for key, value in frame.items()} == {
        "x": (2, 1),
        "image_primary": (2, 16, 16, 3),
        "image_wrist": (2, 8, 8, 3),
        "proprio": (2, 2),
        "timestep_pad_mask": (2,),
    }
    np.testing.assert_array_equal(frame["x"][:, 0], [2, 3])
    np.testing.assert_array_equal(frame["proprio"], PROPRIO.normalise(raw["proprio"].astype(np.float32)[None])[[0, 0]])
    cropped = resize(raw["image_primary"], (16, 16), crop_area=0.9)
    np.testing.assert_array_equal(frame["image_primary"], np.stack([cropped, cropped]))


def test_pain_7_the_history_fits_the_model() -> None:
    with pytest.raises(ValueError, match="history of 5 frames; the model has positions for max_horizon 4"):
        octo_stack(camera_env(), horizon=5, **STACK, exec_horizon=1)
    with pytest.warns(UserWarning, match="history of 3 frames; the model was trained with 2"):
        octo_stack(camera_env(), horizon=3, **STACK, exec_horizon=1)


def test_the_stack_executes_in_one_way() -> None:
    env = octo_stack(camera_env(), horizon=1, **STACK, pred_horizon=4, exp_weight=0.5)
    assert isinstance(env, TemporalEnsembleWrapper)
    choices: list[dict[str, Any]] = [{}, {"exec_horizon": 2, "pred_horizon": 4}]
    for both in choices:
        with pytest.raises(ValueError, match="give exactly one of them"):
            octo_stack(camera_env(), horizon=2, **STACK, **both)


def test_environments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="already gives timestep_pad_mask"):
        HistoryWrapper(HistoryWrapper(Counter(), 2), 2)
    with pytest.raises(ValueError, match="wanted a Dict"):
        HistoryWrapper(gymnasium.wrappers.FlattenObservation(Counter()), 2)
    text = Counter(more={"instruction": spaces.Text(9)})
    with pytest.raises(ValueError, match="instruction is Text"):
        HistoryWrapper(text, 2)
    for make in (HistoryWrapper, RHCWrapper, TemporalEnsembleWrapper):
        with pytest.raises(ValueError, match="wanted at least 1"):
            make(Counter(), 0)
