"""The tabletop tasks as gymnasium's vector environments: one process, batched physics, all members in one call.

What ``gymnasium.make_vec("VlaRlaif/Push-v0", num_envs=64)`` returns. N members, A action dims.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vla_rlaif.envs.randomization import UNCHANGED
from vla_rlaif.envs.tabletop.env import Tabletop
from vla_rlaif.envs.tabletop.gym_env import single_spaces
from vla_rlaif.envs.tabletop.scene import CAMERAS
from vla_rlaif.types import Transition


class TabletopVectorEnv(gymnasium.vector.VectorEnv):
    """Members that are done stay as they are until ``reset``, with ``options={"reset_mask": ...}`` for some of them."""

    def __init__(
        self,
        task: str,
        *,
        num_envs: int,
        image_size: int = 64,
        max_steps: int = 80,
        success_radius: float = 0.03,
        renderer: str = "egl",
        num_threads: int = 2,
        randomize: Mapping[str, float] = UNCHANGED,
        render_mode: str | None = None,
    ) -> None:
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": 20,
            "autoreset_mode": AutoresetMode.DISABLED,
        }
        self.num_envs, self.render_mode = num_envs, render_mode
        self._env = Tabletop(
            task,
            num_envs=num_envs,
            image_size=image_size,
            chunk=1,
            max_steps=max_steps,
            success_radius=success_radius,
            renderer=renderer,
            physics_threads=num_threads,
            render_threads=num_threads,
            randomize=randomize,
        )
        self.single_observation_space, self.single_action_space = single_spaces(image_size)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """An int seeds member i with ``seed + i``. Without seeds, they come from the env's own generator."""
        if seed is None:
            seeds = self.np_random.integers(2**31, size=self.num_envs)
        elif isinstance(seed, int):
            super().reset(seed=seed)
            seeds = seed + np.arange(self.num_envs)
        else:
            seeds = np.asarray(seed)
        mask = np.ones(self.num_envs, bool) if options is None else np.asarray(options["reset_mask"], bool)
        kept = {i: self._env.snapshot(i) for i in np.flatnonzero(~mask).tolist()}
        transition = self._env.reset(seeds)
        for i, snapshot in kept.items():
            transition = self._env.restore([i], snapshot)
        return self._observation(transition), _infos(transition)

    def step(
        self, actions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        transition = self._env.step(np.asarray(actions, np.float32)[:, None])
        is_over = transition.success | ~transition.valid
        reward = transition.success * (transition.executed > 0)  # once an episode
        return self._observation(transition), reward.astype(float), is_over, transition.truncated, _infos(transition)

    def render(self) -> tuple[np.ndarray, ...] | None:
        return None if self.render_mode is None else tuple(self._frames.copy())

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()

    def _observation(self, transition: Transition) -> dict[str, np.ndarray]:
        self._frames = transition.obs.images[CAMERAS[0]]
        return {**transition.obs.images, "state": transition.obs.state}


def _infos(transition: Transition) -> dict[str, Any]:
    """In gymnasium's form: a value for each member, and under "_name" which members have one."""
    values = {
        "instruction": np.array(transition.obs.instruction, object),
        "success": transition.success,
        "truth": transition.truth,
        "valid": transition.valid,
    }
    return values | {f"_{name}": np.ones(len(transition.success), bool) for name in values}
