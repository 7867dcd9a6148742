"""The tabletop tasks as ordinary single gymnasium environments, for users of gymnasium and for the benchmark.

One action a step, reward 1 on success and 0 otherwise. ``register`` makes the ids known; importing does not.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rlaif.envs.randomization import UNCHANGED
from vla_rlaif.envs.tabletop.env import ACTION_DIM, Tabletop
from vla_rlaif.envs.tabletop.scene import CAMERAS
from vla_rlaif.types import Transition

IDS = {"VlaRlaif/Reach-v0": "reach", "VlaRlaif/Push-v0": "push", "VlaRlaif/PickPlace-v0": "pick_place"}
_STATE_BOUND = np.array([2, 2, 2, np.pi, np.pi, np.pi, 0.1, 0.1], np.float32)  # metres, radians, metres


def register() -> None:
    """Make ``gymnasium.make("VlaRlaif/Push-v0")`` and its siblings work. May be called twice."""
    for env_id, task in IDS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id,
                entry_point="vla_rlaif.envs.tabletop.gym_env:TabletopEnv",
                vector_entry_point="vla_rlaif.envs.tabletop.gym_vector:TabletopVectorEnv",
                kwargs={"task": task},
            )


def single_spaces(image_size: int) -> tuple[gymnasium.Space, gymnasium.Space]:
    """What one member observes, and its actions."""
    image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
    state = spaces.Box(-_STATE_BOUND, _STATE_BOUND, dtype=np.float32)
    return spaces.Dict({**dict.fromkeys(CAMERAS, image), "state": state}), spaces.Box(-1, 1, (ACTION_DIM,), np.float32)


class TabletopEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """A ``Tabletop`` with one member. Observations: a camera image a name, and "state"."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (gymnasium's own type)

    def __init__(
        self,
        task: str,
        *,
        image_size: int = 64,
        max_steps: int = 80,
        success_radius: float = 0.03,
        renderer: str = "egl",
        randomize: Mapping[str, float] = UNCHANGED,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self._env = Tabletop(
            task,
            num_envs=1,
            image_size=image_size,
            chunk=1,
            max_steps=max_steps,
            success_radius=success_radius,
            renderer=renderer,
            physics_threads=1,
            render_threads=1,
            randomize=randomize,
        )
        self.observation_space, self.action_space = single_spaces(image_size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """``seed`` is the seed of the start state, as in ``Tabletop.reset``."""
        super().reset(seed=seed)
        start = int(self.np_random.integers(2**31)) if seed is None else seed
        transition = self._env.reset(np.array([start]))
        return self._observation(transition), _info(transition)

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        transition = self._env.step(np.asarray(action, np.float32)[None, None])
        is_over = bool(transition.success[0]) or not transition.valid[0]
        reward = float(transition.success[0])
        return self._observation(transition), reward, is_over, bool(transition.truncated[0]), _info(transition)

    def render(self) -> np.ndarray | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if self.render_mode is None else self._frame.copy()

    def close(self) -> None:
        self._env.close()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds spent so far, as in ``Tabletop.seconds``."""
        return self._env.seconds

    def expert(self) -> np.ndarray:
        """The scripted expert's action, float32."""
        return self._env.expert()[0]

    def _observation(self, transition: Transition) -> dict[str, np.ndarray]:
        images = {camera: images[0] for camera, images in transition.obs.images.items()}
        self._frame = images[CAMERAS[0]]
        return {**images, "state": transition.obs.state[0]}


def _info(transition: Transition) -> dict[str, Any]:
    return {
        "instruction": transition.obs.instruction[0],
        "success": bool(transition.success[0]),
        "truth": float(transition.truth[0]),
        "valid": bool(transition.valid[0]),
    }
