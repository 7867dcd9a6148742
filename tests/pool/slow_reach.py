"""Point reaching of which every decision takes a while, so that a drain finds a group half played."""

import time

import numpy as np

from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.types import EnvSpec, Transition


class SlowReach:
    def __init__(self, num_envs: int, pause_s: float) -> None:
        self._env, self._pause_s = PointReach(num_envs), pause_s

    @property
    def num_envs(self) -> int:
        return self._env.num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    def reset(self, seeds: np.ndarray) -> Transition:
        return self._env.reset(seeds)

    def step(self, action: np.ndarray) -> Transition:
        time.sleep(self._pause_s)
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()
