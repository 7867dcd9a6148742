"""An env without a simulator: observations that were recorded (here: made up), so that the learning side can be timed
where nothing can be rendered. Configs name it ``recorded:Recorded``, and the reward ``recorded:leftwards``.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.types import EnvSpec, Episodes, Observation, Transition

SCENES = 64  # pictures that were recorded
METRES = 0.05  # per unit of an action


class Recorded:
    """Random pictures by start state and decision. Only the first three numbers of the state follow the actions."""

    def __init__(self, *, num_envs: int, image_size: int, max_decisions: int, chunk: int) -> None:
        self._num_envs = num_envs
        self._spec = EnvSpec(
            cameras=("primary", "wrist"),
            image_size=image_size,
            state_dim=8,
            action_dim=7,
            chunk=chunk,
            max_decisions=max_decisions,
            instructions=("move the gripper to the green disc",),
        )
        rng, shape = np.random.default_rng(0), (SCENES, image_size, image_size, 3)
        self._frames = {camera: rng.integers(0, 256, shape, np.uint8) for camera in self._spec.cameras}
        self.reset(np.arange(num_envs))

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @property
    def seconds(self) -> Mapping[str, float]:
        return {"physics": 0.0, "render": 0.0}

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        self._seeds, self._decision = seeds, 0
        self._state = np.zeros((self._num_envs, self._spec.state_dim), np.float32)
        return self._transition(0)

    def step(self, action: Float[np.ndarray, "N H A"]) -> Transition:
        self._decision += 1
        self._state[:, :3] += METRES * action[:, :, :3].sum(axis=1)
        return self._transition(self._spec.chunk)

    def _transition(self, executed: int) -> Transition:
        num, rows = self._num_envs, (self._seeds + self._decision) % SCENES
        done = np.full(num, self._decision >= self._spec.max_decisions)
        return Transition(
            obs=Observation(
                images={camera: frames[rows] for camera, frames in self._frames.items()},
                state=self._state.copy(),
                instruction=self._spec.instructions * num,
            ),
            done=done,
            truncated=done,
            success=np.zeros(num, bool),
            truth=np.zeros(num),
            executed=np.full(num, executed),
            valid=np.ones(num, bool),
        )

    def close(self) -> None:
        pass


def leftwards(episodes: Episodes) -> Float[np.ndarray, " N"]:
    """Metres moved along y: every group has members that differ, whatever the policy can do."""
    return episodes.state[:, -1, 1] - episodes.state[:, 0, 1]
