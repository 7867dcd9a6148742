"""The env of faults.py: a point that is to reach a goal. A Gymnasium environment, so that it lives in env workers."""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rlaif.types import Episodes

SIZE, STRIDE, RADIUS = 16, 0.25, 0.3
BROKEN = "the reward divides by a distance of 0"


class Reach(gymnasium.Env):
    """Positions are in units of the square [-1, 1]^2; a unit action moves the point 0.25. ``pause_s`` a step makes it
    as slow as an env with physics."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "top": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
                "position": spaces.Box(-4.0, 4.0, (4,), np.float32),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._goal, self._at = self.np_random.uniform(-1, 1, 2), np.zeros(2)
        self._first = self._distance()
        return self._obs(), {"progress": 0.0, "success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._pause_s)
        self._at = self._at + STRIDE * action
        progress, success = 1 - self._distance() / self._first, self._distance() < RADIUS
        return self._obs(), 0.0, False, False, {"progress": max(progress, -1.0), "success": bool(success)}

    def _distance(self) -> float:
        return float(np.linalg.norm(self._at - self._goal))

    def _obs(self) -> dict[str, np.ndarray]:
        image = np.zeros((SIZE, SIZE, 3), np.uint8)
        for channel, point in enumerate((self._goal, self._at)):
            column, row = np.clip(((point + 1.5) / 3 * (SIZE - 1)).round().astype(int), 0, SIZE - 1)
            image[column, row, channel] = 255
        return {"top": image, "position": np.concatenate([self._at, self._goal]).astype(np.float32)}


def breaks_at_2(episodes: Episodes) -> np.ndarray:
    return _breaks(episodes, 2)


def breaks_at_5(episodes: Episodes) -> np.ndarray:
    return _breaks(episodes, 5)


def breaks_at_8(episodes: Episodes) -> np.ndarray:
    return _breaks(episodes, 8)


def _breaks(episodes: Episodes, version: int) -> np.ndarray:
    """A user's reward with a mistake in it, which shows when the weights have that version."""
    if episodes.version >= version:
        raise ZeroDivisionError(BROKEN)
    return episodes.truth
