"""LeRobot's saved processors at the host's edge of a policy: observations in, env actions out.

Images stay uint8 until they are on the device: what a batch carries is a quarter of its floats.
Axes: see types.py; C channels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from lerobot.configs import FeatureType, NormalizationMode
from lerobot.lerobot_types import TransitionKey
from lerobot.processor import (
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    RelativeActionsProcessorStep,
    UnnormalizerProcessorStep,
)
from lerobot.utils.constants import (
    ACTION,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OBS_STATE,
)

from vla_rlaif.types import Observation

IMAGE = "image/"  # inputs with this prefix are uint8 frames, by LeRobot key
TOKENS, TOKEN_MASK, STATE = "tokens", "token_mask", "state"
_NAMES = {TOKENS: OBS_LANGUAGE_TOKENS, TOKEN_MASK: OBS_LANGUAGE_ATTENTION_MASK, STATE: OBS_STATE}
_NEEDED = {
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}
Step = Any  # a processor step; LeRobot's registry hides their classes from pyright
Pipelines = tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]


class Processors:
    """Both pipelines of one policy folder, with the cameras of an env and the range of its actions."""

    def __init__(
        self,
        pipelines: Pipelines,
        *,
        cameras: Mapping[str, str],
        action_low: Float[np.ndarray, " A"] | None,
        action_high: Float[np.ndarray, " A"] | None,
    ):
        """``cameras``: LeRobot key to camera of the env. ``action_low`` and ``action_high`` are the values of the
        folder's action units that an env calls -1 and 1; None: the folder has env units already.

        Raises:
            ValueError: a statistic is missing, has the wrong name or shape, or has no spread.
        """
        self.cameras = dict(cameras)
        self._pre, self._post = pipelines
        self._low, self._high = action_low, action_high
        self._normaliser = _only(self._pre, NormalizerProcessorStep)
        check_statistics(self._normaliser)
        check_statistics(_only(self._post, UnnormalizerProcessorStep))

    @property
    def relative(self) -> bool:
        """Actions are relative to the state of the observation."""
        found: list[Step] = [step for step in self._pre.steps if isinstance(step, RelativeActionsProcessorStep)]
        return any(step.enabled for step in found)

    def encode(self, obs: Observation) -> dict[str, np.ndarray]:
        """What the model reads, leaves "N ...": frames by LeRobot key, normalised state, token ids and their mask."""
        data = {OBS_STATE: torch.as_tensor(obs.state), "task": list(obs.instruction)}
        found = self._pre(data)
        encoded = {name: found[key].numpy() for name, key in _NAMES.items() if key in found}
        return {IMAGE + key: obs.images[camera] for key, camera in self.cameras.items()} | encoded

    def batch(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """LeRobot's batch of ``encode``'s arrays, on their device."""
        images = {k.removeprefix(IMAGE): to_float(v) for k, v in inputs.items() if k.startswith(IMAGE)}
        visual = self._normalised(TransitionKey.OBSERVATION, images)
        return {**visual, **{key: inputs[name] for name, key in _NAMES.items() if name in inputs}}

    def executable(self, action: Float[torch.Tensor, "N H A"]) -> Float[np.ndarray, "N H A"]:
        """The model's actions in env units, in [-1, 1]."""
        raw = self._post(action.float().cpu()).numpy()
        if self._low is not None and self._high is not None:
            raw = 2 * (raw - self._low) / (self._high - self._low) - 1
        return np.clip(raw, -1.0, 1.0).astype(np.float32)

    def normalise_action(self, action: Float[torch.Tensor, "B H A"]) -> Float[torch.Tensor, "B H A"]:
        """Env units to what the model predicts."""
        if self._low is not None and self._high is not None:
            low, high = (torch.as_tensor(v, device=action.device, dtype=action.dtype) for v in (self._low, self._high))
            action = low + 0.5 * (action + 1) * (high - low)
        return self._normalised(TransitionKey.ACTION, action)

    def _normalised(self, part: TransitionKey, value: Any) -> Any:
        transition: Any = {part: value}  # LeRobot's type of it wants all parts
        return self._normaliser(transition)[part]


def to_float(frames: UInt8[torch.Tensor, "*b h w C"]) -> Float[torch.Tensor, "*b C h w"]:
    """As LeRobot's ``preprocess_observation``: channels first, in [0, 1]."""
    return torch.movedim(frames, -1, -3).contiguous().type(torch.float32) / 255


def check_statistics(step: Step) -> None:
    """LeRobot passes a feature without statistics through unchanged, and divides by 1e-8 where there is no spread.

    Raises:
        ValueError: either would happen.
    """
    stats: Mapping[str, Mapping[str, Any]] = step.stats or {}
    for key, feature in step.features.items():
        mode = step.norm_map.get(feature.type, NormalizationMode.IDENTITY)
        if mode == NormalizationMode.IDENTITY:
            continue
        if key not in stats:
            have = ", ".join(sorted(stats)) or "nothing"
            raise ValueError(
                f"the processors normalise {key} by {mode.value}, but have statistics of {have} only. Save the folder "
                "with its dataset's statistics, or name a stats.json as policy.statistics."
            )
        _check_one(key, feature.type, feature.shape, mode, stats[key])


def _check_one(
    key: str, kind: FeatureType, shape: tuple[int, ...], mode: NormalizationMode, stats: Mapping[str, Any]
) -> None:
    names = _NEEDED[mode]
    missing = [name for name in names if name not in stats]
    if missing:
        raise ValueError(
            f"{key} is normalised by {mode.value}, which needs {' and '.join(names)}, but its statistics are "
            f"{', '.join(sorted(stats))}. Compute the missing ones on the dataset."
        )
    low, high = (np.asarray(stats[name], np.float64) for name in names)
    wanted = (shape[0],) if kind is FeatureType.VISUAL else shape
    if low.size != wanted[0] or high.size != wanted[0]:
        raise ValueError(f"statistics of {key} have {low.size} numbers, the policy's {key} has {wanted[0]}.")
    spread = high if mode == NormalizationMode.MEAN_STD else high - low
    bad = np.flatnonzero(~(np.isfinite(low) & np.isfinite(spread) & (spread > 0)))
    if bad.size:
        raise ValueError(
            f"statistics of {key} have no spread ({names[1]}{'' if names[1] == 'std' else f' - {names[0]}'} is not "
            f"positive) in dims {bad.tolist()}: they would be divided by 1e-8. Give them a floor, or drop the dims."
        )


def _only(pipeline: PolicyProcessorPipeline, kind: type[Any]) -> Step:
    found = [step for step in pipeline.steps if isinstance(step, kind)]
    if len(found) != 1:
        raise ValueError(
            f"{pipeline.name} has {len(found)} steps of type {kind.__name__}, wanted 1: its actions or observations "
            "would not be in known units. Save the processors with LeRobot 0.6."
        )
    return found[0]


def measured(
    action: Float[np.ndarray, "n A"], state: Float[np.ndarray, "m P"], floor: float = 0.1
) -> dict[str, dict[str, list[float]]]:
    """LeRobot's statistics of demonstrations, in every form its normalisers read; spreads below ``floor`` (env units)
    are raised to it."""
    return {ACTION: _moments(action, floor), OBS_STATE: _moments(state, floor)}


def identity(action_dim: int, state_dim: int) -> dict[str, dict[str, list[float]]]:
    """Statistics that change nothing, whichever normaliser reads them."""
    ones = {ACTION: np.ones(action_dim), OBS_STATE: np.ones(state_dim)}
    low, high = ("min", "q01", "q10"), ("max", "q99", "q90", "std")
    values = {k: {"mean": 0 * v} | {n: -v for n in low} | {n: v for n in high} for k, v in ones.items()}
    return {k: {name: v.tolist() for name, v in stats.items()} for k, stats in values.items()}


def _moments(x: Float[np.ndarray, "n d"], floor: float) -> dict[str, list[float]]:
    x = x.astype(np.float64)
    stats = {"mean": x.mean(0), "std": np.maximum(x.std(0), floor)}
    pairs = (("min", "max", 0.0), ("q01", "q99", 0.01), ("q10", "q90", 0.1))
    for low, high, share in pairs:
        bottom, top = np.quantile(x, share, axis=0), np.quantile(x, 1 - share, axis=0)
        more = np.maximum(0.0, floor - (top - bottom)) / 2
        stats |= {low: bottom - more, high: top + more}
    return {name: value.astype(np.float32).tolist() for name, value in stats.items()}
