"""A small environment's spec, tiny token policies for it, and observations."""

import numpy as np
import torch

from vla_rlaif.policies.tokens.construct import build
from vla_rlaif.policies.tokens.policy import TokenPolicy
from vla_rlaif.token_config import TinyVLMConfig, TokenVLAConfig
from vla_rlaif.types import EnvSpec, Observation

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "paligemma")
SEEDS = np.array([3, 1, 4, 1, 5], np.uint32)
SHARP = 30.0  # a fresh model is nearly indifferent between the bins; this makes it choosy


def make_spec() -> EnvSpec:
    return EnvSpec(
        cameras=("front", "wrist"),
        image_size=16,
        state_dim=3,
        action_dim=2,
        chunk=3,
        max_decisions=4,
        instructions=("reach the goal", "push the small red cube away"),
    )


def make_config(family: str = "qwen2_vl", **changes: object) -> TokenVLAConfig:
    sizes = {"hidden_dim": 32, "mlp_dim": 32, "vision_dim": 16, "patch_size": 4}
    vlm = TinyVLMConfig(family=family, **sizes)  # pyright: ignore[reportArgumentType]
    prompt = "{images}{instruction}?{state}:"
    return TokenVLAConfig(**({"vlm": vlm, "prompt": prompt} | changes))  # pyright: ignore[reportArgumentType]


def make_policy(family: str = "qwen2_vl", seed: int = 0, **changes: object) -> TokenPolicy:
    return sharpened(build(make_config(family, **changes), make_spec(), seed=seed))


@torch.no_grad()
def sharpened(policy: TokenPolicy) -> TokenPolicy:
    policy.module.lm_head.weight.mul_(SHARP)
    return policy


def make_obs(num: int = 5, seed: int = 0) -> Observation:
    """Instructions of different lengths."""
    rng, spec = np.random.default_rng(seed), make_spec()
    shape = (num, spec.image_size, spec.image_size, 3)
    return Observation(
        images={camera: rng.integers(0, 256, shape, np.uint8) for camera in spec.cameras},
        state=rng.uniform(-1, 1, (num, spec.state_dim)).astype(np.float32),
        instruction=tuple(spec.instructions[i % 2] for i in range(num)),
    )


def take(obs: Observation, rows: list[int]) -> Observation:
    return Observation(
        images={camera: frames[rows] for camera, frames in obs.images.items()},
        state=obs.state[rows],
        instruction=tuple(obs.instruction[i] for i in rows),
    )


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in arrays.items()}
