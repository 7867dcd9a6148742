"""The tabletop tasks for LeRobot's own commands, such as lerobot-eval. Importing this registers them with LeRobot:

    lerobot-eval --policy.path=FOLDER --env.discover_packages_path=vla_rlaif.envs.tabletop --env.type=vla_rlaif_tabletop
        --env.task=reach --eval.n_episodes=50 --eval.batch_size=10

The only module of ours with an effect on import: LeRobot finds its plugins by importing them.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs import EnvConfig
from lerobot.envs.utils import freeze_after_episode_end
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from vla_rlaif.envs.randomization import UNCHANGED
from vla_rlaif.envs.tabletop.env import ACTION_DIM, STATE_DIM
from vla_rlaif.envs.tabletop.gym_env import TabletopEnv
from vla_rlaif.envs.tabletop.physics import FPS
from vla_rlaif.envs.tabletop.scene import CAMERAS


@EnvConfig.register_subclass("vla_rlaif_tabletop")
@dataclass
class TabletopLeRobotConfig(EnvConfig):
    """Keys as in the env section of a run; ``max_steps`` is the number of env steps of an episode."""

    task: str | None = "reach"
    fps: int = FPS
    image_size: int = 64
    max_steps: int = 16
    success_radius: float = 0.03
    renderer: str = "egl"
    randomize: dict[str, float] = field(default_factory=dict)
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        image = PolicyFeature(type=FeatureType.VISUAL, shape=(self.image_size, self.image_size, 3))
        self.features = {
            ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(ACTION_DIM,)),
            "agent_pos": PolicyFeature(type=FeatureType.STATE, shape=(STATE_DIM,)),
            **{f"pixels/{camera}": image for camera in CAMERAS},
        }
        self.features_map = {
            ACTION: ACTION,
            "agent_pos": OBS_STATE,
            **{f"pixels/{camera}": f"{OBS_IMAGES}.{camera}" for camera in CAMERAS},
        }

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        names = ("task", "image_size", "max_steps", "success_radius", "renderer", "randomize")
        return {name: vars(self)[name] for name in names}

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, VectorEnv]]:
        """In place of LeRobot's, whose asynchronous envs look the id up in a process that has not registered it.

        An env that is done stands still until the others are (LeRobot's wrapper for that).
        """
        make = [freeze_after_episode_end(functools.partial(LeRobotTabletop, **self.gym_kwargs))] * n_envs
        if use_async_envs and n_envs > 1:
            envs = AsyncVectorEnv(make, context="forkserver", autoreset_mode=AutoresetMode.NEXT_STEP)
        else:
            envs = SyncVectorEnv(make, autoreset_mode=AutoresetMode.NEXT_STEP)
        return {self.type: {0: envs}}


class LeRobotTabletop(gymnasium.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """``TabletopEnv`` with the observations, infos and attributes that LeRobot looks for."""

    def __init__(
        self,
        task: str,
        *,
        image_size: int,
        max_steps: int,
        success_radius: float,
        renderer: str,
        randomize: Mapping[str, float] = UNCHANGED,
    ) -> None:
        env = TabletopEnv(
            task,
            image_size=image_size,
            max_steps=max_steps,
            success_radius=success_radius,
            renderer=renderer,
            randomize=randomize,
            render_mode="rgb_array",
        )
        super().__init__(env)
        inner = env.observation_space
        assert isinstance(inner, spaces.Dict)
        pixels = spaces.Dict({camera: inner[camera] for camera in CAMERAS})
        self.observation_space = spaces.Dict({"pixels": pixels, "agent_pos": inner["state"]})
        self.task, self.task_description = task, ""
        self._max_episode_steps = max_steps

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.task_description = info["instruction"]
        return _renamed(observation), {"is_success": info["success"]}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return _renamed(observation), reward, terminated, truncated, {"is_success": info["success"]}


def _renamed(observation: dict[str, np.ndarray]) -> dict[str, Any]:
    return {"pixels": {camera: observation[camera] for camera in CAMERAS}, "agent_pos": observation["state"]}
