"""Both halves of the config's algorithm: the part of `build.py` for the section ``algorithm``."""

from typing import Any

from vla_rlaif.algorithm_checks import kl_coef
from vla_rlaif.algorithm_config import DPOConfig, FilteredBCConfig, GRPOConfig, PPOConfig, TPOConfig
from vla_rlaif.config import RunConfig
from vla_rlaif.dpo import DPO
from vla_rlaif.filtered_bc import FilteredBC
from vla_rlaif.grpo import GRPO
from vla_rlaif.interfaces import Algorithm, Credit
from vla_rlaif.ppo import PPO
from vla_rlaif.types import EnvSpec


def build_algorithm(config: RunConfig, spec: EnvSpec) -> Algorithm:
    """The half that a learner sees."""
    a = config.algorithm
    if isinstance(a, PPOConfig):
        return build_ppo(config, a)
    if isinstance(a, FilteredBCConfig):
        return build_filtered_bc(config, a)
    if isinstance(a, GRPOConfig):
        return build_grpo(config, a)
    return DPO(beta=a.beta, num_decisions=spec.max_decisions)


def check_devices(algorithm: Algorithm, num_devices: int) -> None:
    """Raises ValueError if the rows of a pair might be split among devices."""
    if isinstance(algorithm, DPO) and num_devices > 1:
        raise ValueError(
            f"preference optimisation trains on one device, and {num_devices} are here: set learner.devices to 1."
        )


def build_credit(config: RunConfig, policy: Any, spec: EnvSpec) -> Credit:
    """The half that sees episodes. ``policy`` is the start policy, of which a critic keeps a frozen copy; nobody
    else reads it, and on a cluster, where the config refuses a critic, it is None."""
    a = config.algorithm
    if isinstance(a, PPOConfig):
        return _build_critic_credit(config, a, policy, spec)
    if isinstance(a, FilteredBCConfig):
        from vla_rlaif.credit import KeptCredit

        return KeptCredit(algorithm=build_filtered_bc(config, a))
    if isinstance(a, GRPOConfig):
        from vla_rlaif.credit import GroupCredit

        return GroupCredit(algorithm=build_grpo(config, a), normalizer=a.normalizer)
    from vla_rlaif.pair_credit import LabelledPairs, RankedPairs

    if isinstance(a, DPOConfig):
        return LabelledPairs(pairs_per_step=a.pairs_per_step, seed=config.seed)
    assert isinstance(a, TPOConfig)
    return RankedPairs(pairs_per_group=a.pairs_per_group, margin=a.margin)


def build_grpo(config: RunConfig, a: GRPOConfig) -> GRPO:
    return GRPO(
        group_size=a.group_size,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        kl_coef=kl_coef(config),
        scale_by_std=a.scale_by_std,
        std_floor=a.std_floor,
        min_valid_share=a.min_valid_share,
    )


def build_filtered_bc(config: RunConfig, a: FilteredBCConfig) -> FilteredBC:
    return FilteredBC(share=a.share, threshold=a.threshold, kl_coef=kl_coef(config))


def build_ppo(config: RunConfig, a: PPOConfig) -> PPO:
    return PPO(
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        kl_coef=kl_coef(config),
        kl_target=a.kl_target,
        gamma=a.gamma,
        lam=a.lam,
        value_clip=a.value_clip,
        value_coef=a.value_coef,
        entropy_coef=a.entropy_coef,
    )


def _build_critic_credit(config: RunConfig, a: PPOConfig, policy: Any, spec: EnvSpec) -> Credit:
    from vla_rlaif.critic import Critic
    from vla_rlaif.critic_credit import CriticCredit
    from vla_rlaif.reward_models.encoders import HasFeatures, PolicyEncoder

    if not isinstance(policy, HasFeatures):
        raise ValueError(
            f"algorithm.type ppo: its critic reads the features of the policy, and {type(policy).__name__} has no "
            "method features(obs). Add one, or use grpo."
        )
    algorithm = build_ppo(config, a)
    return CriticCredit(algorithm, Critic(PolicyEncoder(policy, spec), a.critic, algorithm, seed=config.seed))
