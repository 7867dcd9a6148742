"""Gymnasium wrappers that give an Octo policy what it was trained on. ``octo_stack`` puts them in the one right order.

Observations are dicts of arrays: ``image_primary``, ``image_wrist``, ``proprio``, ... Axes: W frames of history.
"""

import warnings
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from jaxtyping import Float

from vla_rlaif.policies.octo.action_stats import ActionStatistics
from vla_rlaif.policies.octo.images import CROP_AREA, Size, resize

Env = gymnasium.Env[Any, Any]
Frame = dict[str, np.ndarray]
Wrapper = gymnasium.Wrapper[Any, Any, Any, Any]
Stepped = tuple[Frame, float, bool, bool, dict[str, Any]]  # observation, reward, terminated, truncated, info
PAD_MASK = "timestep_pad_mask"


class ResizeImageWrapper(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Images to the sizes of training; those in ``crop_keys`` also cropped as upstream does for evaluation."""

    def __init__(self, env: Env, sizes: Mapping[str, Size], crop_keys: Collection[str] = ()):
        super().__init__(env)
        self._sizes, self._crop_keys = dict(sizes), frozenset(crop_keys)
        if not self._crop_keys <= sizes.keys():
            raise ValueError(f"crop_keys {sorted(self._crop_keys)} have no size; sizes are for {sorted(sizes)}.")
        parts = dict(_dict_space(env))
        for key, size in self._sizes.items():
            image = _box(parts, key)
            if image.dtype != np.uint8 or len(image.shape) != 3 or image.shape[-1] != 3:
                raise ValueError(f"{key} is {image.dtype} {image.shape}; wanted uint8 (height, width, 3).")
            parts[key] = spaces.Box(0, 255, (*size, 3), np.uint8)
        self.observation_space = spaces.Dict(parts)

    def observation(self, observation: Frame) -> Frame:
        areas = {key: CROP_AREA if key in self._crop_keys else 1.0 for key in self._sizes}
        resized = {key: resize(observation[key], size, crop_area=areas[key]) for key, size in self._sizes.items()}
        return observation | resized


class NormalizeProprio(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Proprioception through ``statistics``: hand over the very object that normalised the training data."""

    def __init__(self, env: Env, statistics: ActionStatistics, key: str = "proprio"):
        super().__init__(env)
        self._statistics, self._key = statistics, key
        parts = dict(_dict_space(env))
        box, wanted = _box(parts, key), statistics.mean.shape
        if box.shape != wanted:
            raise ValueError(f"{key} has shape {box.shape}, the statistics {wanted}: they are of another robot.")
        parts[key] = spaces.Box(-np.inf, np.inf, wanted, np.float32)
        self.observation_space = spaces.Dict(parts)

    def observation(self, observation: Frame) -> Frame:
        return observation | {self._key: self._statistics.normalise(observation[self._key].astype(np.float32))}


class HistoryWrapper(Wrapper):
    """The last ``horizon`` frames of every entry, oldest first, and ``timestep_pad_mask`` [W].

    After a reset the first frame fills the window; the mask is False for those copies.
    """

    def __init__(self, env: Env, horizon: int):
        super().__init__(env)
        if horizon < 1:
            raise ValueError(f"horizon is {horizon}, wanted at least 1.")
        parts = dict(_dict_space(env))
        if PAD_MASK in parts:
            raise ValueError(f"the environment already gives {PAD_MASK}: wrap it once.")
        stacked = {key: batch_space(_box(parts, key), horizon) for key in parts}
        self.observation_space = spaces.Dict(stacked | {PAD_MASK: spaces.MultiBinary(horizon)})
        self._frames: deque[Frame] = deque(maxlen=horizon)
        self._num_real = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        frame, info = self.env.reset(seed=seed, options=options)
        self._frames.clear()
        self._num_real = 0
        return self._with(frame), info

    def step(self, action: Any) -> Stepped:
        frame, reward, terminated, truncated, info = self.env.step(action)
        return self._with(frame), float(reward), terminated, truncated, info

    def _with(self, frame: Frame) -> Frame:
        copy = {key: np.array(value) for key, value in frame.items()}  # environments may reuse their buffers
        size = self._frames.maxlen
        assert size is not None
        self._frames.extend([copy] * (1 if self._num_real else size))
        self._num_real = min(self._num_real + 1, size)
        window = {key: np.stack([frame[key] for frame in self._frames]) for key in copy}
        return window | {PAD_MASK: np.arange(size) >= size - self._num_real}


class RHCWrapper(Wrapper):
    """Receding horizon control: a step takes a chunk of actions and executes the first ``exec_horizon``.

    Rewards are summed; the chunk stops when the episode ends. ``info["num_executed"]`` counts the steps.
    """

    def __init__(self, env: Env, exec_horizon: int):
        super().__init__(env)
        if exec_horizon < 1:
            raise ValueError(f"exec_horizon is {exec_horizon}, wanted at least 1.")
        self._exec_horizon = exec_horizon
        self.action_space = batch_space(env.action_space, exec_horizon)

    def step(self, action: Float[np.ndarray, "H A"]) -> Stepped:
        if len(action) < self._exec_horizon:
            raise ValueError(f"got a chunk of {len(action)} actions, exec_horizon is {self._exec_horizon}.")
        steps: list[Stepped] = []
        for single in action[: self._exec_horizon]:
            frame, reward, terminated, truncated, info = self.env.step(single)
            steps.append((frame, float(reward), terminated, truncated, info))
            if terminated or truncated:
                break
        frame, _, terminated, truncated, info = steps[-1]
        total = sum(step[1] for step in steps)
        return frame, total, terminated, truncated, info | {"num_executed": len(steps)}


class TemporalEnsembleWrapper(Wrapper):
    """A step takes a chunk and executes the mean of what this and earlier chunks planned for now.

    Weights are exp(-exp_weight * i) with i = 0 for the OLDEST chunk (as in https://arxiv.org/abs/2304.13705); 0 is the
    plain mean.
    """

    def __init__(self, env: Env, pred_horizon: int, exp_weight: float = 0.0):
        super().__init__(env)
        if pred_horizon < 1:
            raise ValueError(f"pred_horizon is {pred_horizon}, wanted at least 1.")
        self._pred_horizon, self._exp_weight = pred_horizon, exp_weight
        self._plans: deque[np.ndarray] = deque(maxlen=pred_horizon)
        self.action_space = batch_space(env.action_space, pred_horizon)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        self._plans.clear()
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Float[np.ndarray, "H A"]) -> Stepped:
        if len(action) != self._pred_horizon:
            raise ValueError(f"got a chunk of {len(action)} actions, pred_horizon is {self._pred_horizon}.")
        self._plans.append(np.array(action))
        ages = range(len(self._plans) - 1, -1, -1)  # in steps, the oldest first
        now = np.stack([plan[age] for age, plan in zip(ages, self._plans, strict=True)])
        weights = np.exp(-self._exp_weight * np.arange(len(now)))
        mean = np.average(now, axis=0, weights=weights).astype(action.dtype)
        frame, reward, terminated, truncated, info = self.env.step(mean)
        return frame, float(reward), terminated, truncated, info


def octo_stack(
    env: Env,
    *,
    horizon: int,
    trained_window: int,
    max_horizon: int,
    image_sizes: Mapping[str, Size],
    crop_keys: Collection[str] = (),
    proprio: ActionStatistics | None = None,
    exec_horizon: int | None = None,
    pred_horizon: int | None = None,
    exp_weight: float = 0.0,
) -> Wrapper:
    """The wrappers in the order that fits the training data, innermost first.

    Resize images, normalise proprioception (frames, before they are copied into windows), history, and around all of it
    what executes chunks: ``exec_horizon`` actions of each, or an ensemble of chunks of ``pred_horizon``.

    Raises:
        ValueError: ``horizon`` is more frames than the model has positions for, or not exactly one of ``exec_horizon``
            and ``pred_horizon`` is given.
    """
    if horizon > max_horizon:
        raise ValueError(f"a history of {horizon} frames; the model has positions for max_horizon {max_horizon}.")
    if (exec_horizon is None) == (pred_horizon is None):
        raise ValueError(f"exec_horizon {exec_horizon}, pred_horizon {pred_horizon}: give exactly one of them.")
    if horizon > trained_window:
        warnings.warn(
            f"a history of {horizon} frames; the model was trained with {trained_window}, and the positions beyond were"
            " never trained: expect worse actions.",
            stacklevel=2,
        )
    env = ResizeImageWrapper(env, image_sizes, crop_keys)
    env = env if proprio is None else NormalizeProprio(env, proprio)
    env = HistoryWrapper(env, horizon)
    if exec_horizon is not None:
        return RHCWrapper(env, exec_horizon)
    assert pred_horizon is not None
    return TemporalEnsembleWrapper(env, pred_horizon, exp_weight)


def _dict_space(env: Env) -> Mapping[str, spaces.Space[Any]]:
    if not isinstance(env.observation_space, spaces.Dict):
        raise ValueError(f"observations are {env.observation_space}; wanted a Dict with keys such as image_primary.")
    return env.observation_space.spaces


def _box(parts: Mapping[str, spaces.Space[Any]], key: str) -> spaces.Box:
    box = parts.get(key)
    if not isinstance(box, spaces.Box):
        raise ValueError(f"{key} is {box}; wanted a Box. The observation has {', '.join(parts)}.")
    return box
