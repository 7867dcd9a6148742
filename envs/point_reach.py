"""Point reaching in the plane: the smallest ``VectorEnv``, NumPy only, for tests and notebooks.

A red dot (the goal) and a green dot (the point) on a 16 by 16 image. Positions are in units of the square [-1, 1]^2.
A unit action moves the point 0.25; components outside [-1, 1] are clipped.
"""

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.envs.arguments import check_chunk
from vla_rlaif.types import EnvSpec, Observation, Transition

_INSTRUCTION = "reach the goal"
_IMAGE_SIZE = 16
_STRIDE = 0.25  # what a unit action moves


class PointReach:
    def __init__(self, num_envs: int, *, chunk: int = 1, max_decisions: int = 6, radius: float = 0.3) -> None:
        if min(num_envs, chunk, max_decisions) < 1:
            raise ValueError(
                f"num_envs {num_envs}, chunk {chunk}, max_decisions {max_decisions}: all must be positive."
            )
        self._num_envs, self._max_steps, self._radius = num_envs, max_decisions * chunk, radius
        self._spec = EnvSpec(
            cameras=("top",),
            image_size=_IMAGE_SIZE,
            state_dim=4,
            action_dim=2,
            chunk=chunk,
            max_decisions=max_decisions,
            instructions=(_INSTRUCTION,),
        )
        self._is_started = False

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        if len(seeds) != self._num_envs or np.any(seeds < 0):
            raise ValueError(f"Got seeds {seeds.tolist()}; wanted {self._num_envs}, none of them negative.")
        self._goal = np.stack([np.random.default_rng(s).uniform(-1, 1, 2) for s in seeds.tolist()])
        self._position = np.zeros((self._num_envs, 2))
        self._initial_distance = self._distance()
        self._num_steps = np.zeros(self._num_envs, int)
        self._success, self._done = np.zeros(self._num_envs, bool), np.zeros(self._num_envs, bool)
        self._is_started = True
        return self._transition(np.zeros(self._num_envs, int))

    def step(self, action: Float[np.ndarray, "N H 2"]) -> Transition:
        if not self._is_started:
            raise ValueError("Call reset before step.")
        check_chunk(action, self._done, 2)
        executed = np.zeros(self._num_envs, int)
        for h in range(action.shape[1]):
            live = ~self._done
            self._position[live] += _STRIDE * np.clip(action[live, h], -1, 1)
            self._num_steps += live
            executed += live
            self._success |= live & (self._distance() < self._radius)
            self._done = self._success | (self._num_steps >= self._max_steps)
        return self._transition(executed)

    def close(self) -> None:
        """Nothing to free."""

    def _distance(self) -> Float[np.ndarray, " N"]:
        return np.linalg.norm(self._position - self._goal, axis=1)

    def _transition(self, executed: Int[np.ndarray, " N"]) -> Transition:
        state = np.concatenate([self._position, self._goal], axis=1).astype(np.float32)
        return Transition(
            obs=Observation(images={"top": self._draw()}, state=state, instruction=(_INSTRUCTION,) * self._num_envs),
            done=self._done.copy(),
            truncated=self._done & ~self._success,
            success=self._success.copy(),
            truth=np.clip(1 - self._distance() / self._initial_distance, -1, 1) + self._success,
            executed=executed,
            valid=np.ones(self._num_envs, bool),
        )

    def _draw(self) -> np.ndarray:
        images = np.zeros((self._num_envs, _IMAGE_SIZE, _IMAGE_SIZE, 3), np.uint8)
        for channel, point in enumerate((self._goal, self._position)):
            # The image shows [-1.5, 1.5]^2: the point may leave the square in which goals lie.
            pixel = np.clip(((point + 1.5) / 3 * (_IMAGE_SIZE - 1)).round().astype(int), 0, _IMAGE_SIZE - 1)
            images[np.arange(self._num_envs), pixel[:, 0], pixel[:, 1], channel] = 255
        return images
