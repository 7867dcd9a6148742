"""A small environment's spec, a tiny Octo for it, and observations."""

import numpy as np

from vla_rlaif.policy_config import OctoConfig, SmallStemConfig
from vla_rlaif.types import EnvSpec, Observation


def make_spec() -> EnvSpec:
    return EnvSpec(
        cameras=("primary", "wrist"),
        image_size=8,
        state_dim=3,
        action_dim=2,
        chunk=3,
        max_decisions=4,
        instructions=("push the red cube to the left.", "Push the blue cube"),
    )


def make_config(**changes: object) -> OctoConfig:
    sizes = {
        "token_dim": 16,
        "num_layers": 1,
        "mlp_dim": 16,
        "stem": SmallStemConfig(features=(4, 8), groups=2, embedding=8, goal_images=False),
        "language_tokens": 8,
        "language_dim": 8,
        "head_dim": 16,
        "head_blocks": 1,
        "time_dim": 8,
        "diffusion_steps": 6,
        "tuned_steps": 3,
    }
    return OctoConfig(**(sizes | changes))  # pyright: ignore[reportArgumentType]


def make_obs(num: int, seed: int = 0) -> Observation:
    rng, spec = np.random.default_rng(seed), make_spec()
    size = spec.image_size
    return Observation(
        images={camera: rng.integers(0, 256, (num, size, size, 3), np.uint8) for camera in spec.cameras},
        state=rng.normal(size=(num, spec.state_dim)).astype(np.float32),
        instruction=tuple(spec.instructions[i % 2] for i in range(num)),
    )
