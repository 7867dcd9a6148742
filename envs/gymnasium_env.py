"""Any gymnasium environment as a ``SingleEnv``, by a mapping of keys from the config.

Numpy, gymnasium and the suite only (see single.py); pillow too, if images are resized. Observations are flattened:
nested keys are joined with "/", and an observation that is no dict has the key "observation".

Restarts and snapshots are as exact as the suite is deterministic: equal seeds give equal episodes, and ``restore``
plays the episode of the snapshot again from its seed, since gymnasium has no call to set a state. Fingerprints hold the
observation, the numbers of ``info`` and the random generator; what a suite shows in none of them is not compared.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from vla_rlaif.envs.single import Reading, SingleSpec, recorded, replayed

RENDER = "render"  # a camera that is the env's own render() instead of a part of the observation
TERMINATED, REWARD = "terminated", "reward"  # sources of success and progress that are not in info
_EXTRAS = {"gym_pusht": "suites", "metaworld": "suites"}  # import names in extras of this package


class GymnasiumTask:
    def __init__(
        self,
        *,
        id: str | None,
        factory: str | None,
        module: str | None,
        options: Mapping[str, Any],
        cameras: Mapping[str, str],
        state: Sequence[str],
        success: str,
        progress: str | None,
        instructions: Sequence[str],
        instruction_key: str | None,
        image_size: int,
        seed_bits: int,
        fps: int | None = None,
    ) -> None:
        """``id`` of the registry (``module`` is imported first, and registers it), or ``factory``, a callable
        `package.module:name`. ``cameras`` maps our names to keys of the observation or to "render"; ``state`` names
        keys that are joined. ``success`` is a key of info or "terminated", ``progress`` a key of info or "reward", with
        values in [-1, 1]. ``instruction_key`` is a key of info, None where there is one sentence only. Suites that use
        NumPy's old generators need ``seed_bits`` 32; others take seeds whole, which is 52. ``fps`` is env steps a
        second of the robot's time; None takes the env's render_fps for it, which most suites mean by that.

        Raises ValueError for all that does not fit; one step is played to find it out.
        """
        self._env = _make(id, factory, module, options, needs_frames=RENDER in cameras.values())
        self._name = id or factory
        self._cameras, self._state_keys, self._size = dict(cameras), tuple(state), image_size
        self._success, self._progress, self._key = success, progress, instruction_key
        self._instruction, self._seed_bits = instructions[0], seed_bits
        self._scale = _scaled(self._env.action_space, self._name)
        self._actions: list[list[float]] = []
        try:
            self._check()
        except BaseException:
            self._env.close()
            raise
        self.spec = SingleSpec(
            cameras=tuple(cameras),
            image_size=image_size,
            state_dim=sum(self._flat[k].size for k in state),
            action_dim=int(np.prod(self._env.action_space.shape or ())),
            instructions=tuple(instructions),
            fps=fps or self._env.metadata.get("render_fps"),
        )

    def reset(self, seed: int) -> Reading:
        obs, info = self._env.reset(seed=seed if self._seed_bits > 32 else _short(seed))
        self._seed, self._actions = seed, []
        self._flat, self._info = _flatten(obs), info
        if self._key is not None:
            self._instruction = str(info[self._key])
        return self._reading(success=False, ended=False, truth=0.0)

    def step(self, action: np.ndarray) -> Reading:
        self._actions.append(action.tolist())
        obs, reward, terminated, truncated, self._info = self._env.step(self._scale(action))
        self._flat = _flatten(obs)
        success = bool(terminated if self._success == TERMINATED else self._info[self._success])
        progress = 0.0
        if self._progress is not None:
            progress = float(reward if self._progress == REWARD else self._info[self._progress])
        ended = bool(terminated or truncated) and not success
        return self._reading(success=success, ended=ended, truth=min(max(progress, -1.0), 1.0) + success)

    def render(self, images: np.ndarray) -> None:
        for image, source in zip(images, self._cameras.values(), strict=True):
            frame = self._env.render() if source == RENDER else self._flat[source]
            image[:] = _resized(np.asarray(frame), self._size)

    def fingerprint(self) -> bytes:
        rng = json.dumps(self._env.unwrapped.np_random.bit_generator.state, default=_plain)
        numbers = {**self._flat, **{f"info/{k}": np.asarray(v) for k, v in self._info.items() if _is_number(v)}}
        rows = [f"{k}:{v.dtype}:{v.shape}:".encode() + v.tobytes() for k, v in sorted(numbers.items())]
        return b"\n".join([rng.encode(), self._instruction.encode(), *rows])

    def snapshot(self) -> bytes:
        return recorded(self._seed, self._actions)

    def restore(self, snapshot: bytes) -> Reading:
        return replayed(self, snapshot)

    def close(self) -> None:
        self._env.close()

    def _reading(self, *, success: bool, ended: bool, truth: float) -> Reading:
        state = np.concatenate([self._flat[k].reshape(-1) for k in self._state_keys]).astype(np.float32)
        return Reading(state=state, instruction=self._instruction, success=success, ended=ended, truth=truth)

    def _check(self) -> None:
        """Play one step and look for every key that the config names."""
        obs, info = self._env.reset(seed=0)
        self._flat = flat = _flatten(obs)
        has = "; ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in flat.items())
        for camera, source in self._cameras.items():
            if source != RENDER and source not in flat:
                raise ValueError(f"env.cameras maps {camera!r} to {source!r}, but {self._name} observes {has}.")
            frame = np.asarray(self._env.render() if source == RENDER else flat[source])
            if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
                raise ValueError(
                    f"env.cameras maps {camera!r} to {source!r}, which is {frame.dtype}{list(frame.shape)}; an image "
                    f"is uint8[height, width, 3]. {self._name} observes {has}."
                )
        for key in self._state_keys:
            if key not in flat or (flat[key].dtype == np.uint8 and flat[key].ndim == 3):
                raise ValueError(f"env.state names {key!r}, but the vectors that {self._name} observes are {has}.")
        if self._key is not None and self._key not in info:
            raise ValueError(f"env.instruction_key is {self._key!r}, but info after reset has {_names(info)}.")
        info = self._env.step(self._scale(np.zeros(self._env.action_space.shape or ())))[4]
        for name, key, other in (("success", self._success, TERMINATED), ("progress", self._progress, REWARD)):
            if key is not None and key != other and key not in info:
                raise ValueError(f"env.{name} is {key!r}, but {self._name} has in info {_names(info)}; or say {other}.")


def _make(
    id: str | None, factory: str | None, module: str | None, options: Mapping[str, Any], *, needs_frames: bool
) -> gymnasium.Env:
    if needs_frames:
        options = {"render_mode": "rgb_array", **options}
    try:
        if module is not None:
            importlib.import_module(module)
        if factory is not None:
            where, _, name = factory.partition(":")
            return vars(importlib.import_module(where))[name](**options)
        assert id is not None
        # No time limit (the config has one), and no checker: it warns about what we do not use, at every step.
        return gymnasium.make(id, max_episode_steps=-1, disable_env_checker=True, **options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        install = f"'vla_rlaif[{_EXTRAS[package]}]'" if package in _EXTRAS else package.replace("_", "-")
        raise ValueError(f"{id or factory} needs the package {package}: pip install {install}") from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise ValueError(f"{id}: {error}") from error
    except gymnasium.error.UnregisteredEnv as error:
        near = difflib.get_close_matches(str(id), list(gymnasium.registry), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else "env.module must name the package that registers it."
        raise ValueError(f"gymnasium knows no env {id!r}; {hint}") from error
    except TypeError as error:
        raise ValueError(f"{id or factory} does not take env.options {dict(options)}: {error}") from error


def _scaled(space: gymnasium.Space, name: str | None) -> Callable[[np.ndarray], np.ndarray]:
    """From [-1, 1] to the bounds of the action space."""
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"{name} has the action space {space}; only bounded, continuous ones are driven.")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"{name} has unbounded actions, {space}; wrap it with gymnasium's RescaleAction or ClipAction."
        )
    low, high, shape, dtype = space.low, space.high, space.shape, space.dtype
    if (low == -1).all() and (high == 1).all():
        return lambda action: action.reshape(shape).astype(dtype)
    middle, half = (high.astype(float) + low) / 2, (high.astype(float) - low) / 2
    # np.clip takes four times as long as these two on so few numbers.
    return lambda action: np.minimum(np.maximum(middle + half * action.reshape(shape), low), high).astype(dtype)


def _short(seed: int) -> int:
    """32 bits of a start seed: its 4 bits of split, which keep evaluation apart from training, and 28 others."""
    return (seed >> 48) << 28 | seed & (2**28 - 1)


def _flatten(obs: Any, prefix: str = "") -> dict[str, np.ndarray]:
    if not isinstance(obs, Mapping):
        return {prefix or "observation": np.asarray(obs)}
    return {k: v for key, part in obs.items() for k, v in _flatten(part, f"{prefix}/{key}" if prefix else key).items()}


def _resized(frame: np.ndarray, size: int) -> np.ndarray:
    """To ``size`` square, every pixel weighted; what is not square is stretched."""
    if frame.shape[:2] == (size, size):
        return frame
    from PIL import Image

    return np.asarray(Image.fromarray(frame).resize((size, size), Image.Resampling.BILINEAR))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.bool_)) or (
        isinstance(value, np.ndarray) and value.dtype != np.object_
    )


def _plain(value: Any) -> Any:
    """Of the state of NumPy's generators, which JSON does not know."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


def _names(info: Mapping[str, Any]) -> str:
    return ", ".join(sorted(info)) or "nothing"
