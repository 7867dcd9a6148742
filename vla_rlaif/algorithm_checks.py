"""What fits together with an algorithm, and what is allowed and probably not meant."""

from typing import TYPE_CHECKING

from vla_rlaif.algorithm_config import (
    ClippedSettings,
    DPOConfig,
    FilteredBCConfig,
    GRPOConfig,
    PairConfig,
    PPOConfig,
    TPOConfig,
)
from vla_rlaif.policy_config import CustomPolicyConfig
from vla_rlaif.reward_config import learned_part
from vla_rlaif.token_config import TokenVLAConfig

if TYPE_CHECKING:
    from vla_rlaif.config import RunConfig

SIMULATED = ("success", "oracle")  # rewards that a policy cannot deceive


def check_algorithm(config: "RunConfig") -> None:
    """Raises ValueError, with what to change."""
    algorithm, loop = config.algorithm, config.loop
    if isinstance(algorithm, ClippedSettings):
        _check_clip(algorithm, config.policy.logp_reduction)
    if isinstance(algorithm, GRPOConfig | FilteredBCConfig):
        return
    what = f"algorithm.type {algorithm.type}"
    if loop.overlap or loop.stored is not None:
        raise ValueError(
            f"{what} learns from episodes of the newest weights: remove loop.overlap and loop.stored, or use grpo."
        )
    if config.cluster.type != "local":
        raise ValueError(f"{what} runs in one process: set cluster to local, or use grpo or filtered_bc.")
    if isinstance(algorithm, PPOConfig):
        _check_ppo(algorithm, config)
    else:
        _check_pairs(algorithm, config)


def _check_clip(algorithm: ClippedSettings, reduction: str) -> None:
    # A mean over dims moves ratios by hundredths, a sum by tenths: with the other's clip range, either nothing or
    # everything is clipped (grpo.md, "The reduction and the clip are one validated pair").
    low, high = sorted((algorithm.clip_low, algorithm.clip_high))
    if reduction == "mean" and high > 0.1:
        raise ValueError(f"clip {high} never binds on averaged log-probs; use at most 0.1 or logp_reduction: sum.")
    if reduction == "sum" and low < 0.05:
        raise ValueError(f"clip {high} clips nearly every summed log-prob; use 0.05 or more, or logp_reduction: mean.")


def _check_ppo(algorithm: PPOConfig, config: "RunConfig") -> None:
    if algorithm.entropy_coef and not isinstance(config.policy, TokenVLAConfig | CustomPolicyConfig):
        raise ValueError(
            f"algorithm.entropy_coef: policy {config.policy.type} has a fixed std, so its entropy is constant and the "
            "bonus would only add noise. Set it to 0."
        )
    if algorithm.kl_target is not None and not kl_coef(config):
        raise ValueError("algorithm.kl_target adapts kl_coef, which is 0 and stays so: set kl_coef above 0.")


def _check_pairs(algorithm: PairConfig, config: "RunConfig") -> None:
    what = f"algorithm.type {algorithm.type}"
    if config.learner.target_kl is not None:
        raise ValueError(
            f"learner.target_kl brakes by the KL to the weights that acted, and {what} compares with the start policy: "
            "set it to null; algorithm.beta holds the policy."
        )
    if config.learner.devices not in (None, 1):
        raise ValueError(f"{what} trains on one device; set learner.devices to 1.")
    if isinstance(algorithm, DPOConfig) and learned_part(config.reward) is None:
        raise ValueError(f"{what} learns from labelled pairs: use reward.type preference, whose labeller makes them.")


def kl_coef(config: "RunConfig") -> float:
    """The KL weight in force, at the start of the run: on by default with a learned reward, off with the simulator's.
    Preference optimisation has none: its beta does that."""
    algorithm = config.algorithm
    if isinstance(algorithm, DPOConfig | TPOConfig):
        return 0.0
    if algorithm.kl_coef is not None:
        return algorithm.kl_coef
    return 0.0 if config.reward.type in SIMULATED else 0.02


def cautions(config: "RunConfig") -> list[str]:
    """What is allowed and probably not meant."""
    found, algorithm = [], config.algorithm
    if isinstance(algorithm, GRPOConfig) and algorithm.group_size < 4:
        found.append(f"groups of {algorithm.group_size}: the advantage is mostly noise; use 4 or more.")
    is_held = kl_coef(config) > 0 or algorithm.anchor_coef > 0 or isinstance(algorithm, DPOConfig | TPOConfig)
    if config.reward.type not in (*SIMULATED, "pixel_distance") and not is_held:
        found.append("no KL to the start policy with a reward that is not success: watch for reward hacking.")
    return found
