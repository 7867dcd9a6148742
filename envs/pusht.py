"""PushT (gym-pusht) that draws where it is asked to, instead of at every step.

`type: gymnasium, factory: vla_rlaif.envs.pusht:make_env`. Its observation is the state; ``render`` draws what
`obs_type: pixels_agent_pos` observes, bit for bit, so that checkpoints trained on those images fit.
"""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np


class ObservedFrame(gymnasium.Wrapper):
    def render(self) -> np.ndarray:
        """The image of the observation: without the marker of the last action that the suite's own render draws."""
        return self.unwrapped._render(visualize=False)  # pyright: ignore[reportAttributeAccessIssue] (PushTEnv's)


def make_env(*, image_size: int = 96, render_mode: str = "rgb_array") -> gymnasium.Env:
    """``image_size`` in pixels. Observes "agent_pos" and "environment_state", the eight corners of the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pkg_resources is deprecated")  # of pygame, for its developers
        import gym_pusht  # noqa: F401 (registers the id)

    env = gymnasium.make(
        "gym_pusht/PushT-v0",
        obs_type="environment_state_agent_pos",
        observation_width=image_size,
        observation_height=image_size,
        render_mode=render_mode,
        max_episode_steps=-1,
        disable_env_checker=True,
    )
    return ObservedFrame(env)
