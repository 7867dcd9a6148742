"""The algorithm section of a run. docs/algorithms.md explains the methods; a key is where it has an effect."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from vla_rlaif.config_base import Fraction, Model, Positive

NotNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]


class AlgorithmSettings(Model):
    """What all algorithms have."""

    group_size: Annotated[int, Field(ge=1)] = 8  # episodes of one start state; env.num_envs splits into groups
    anchor_coef: NotNegative = 0.0  # weight of the imitation loss on warm_start's demonstrations
    anchor_batch: Positive = 64  # demonstrated steps in each optimiser update, if anchor_coef > 0


class ClippedSettings(AlgorithmSettings):
    """The clipped surrogate of GRPO and PPO."""

    clip_low: Above0 = 0.02
    clip_high: Above0 = 0.02
    kl_coef: NotNegative | None = None  # None: 0.02 for a learned reward, 0 for the simulator's success or truth


class GRPOConfig(ClippedSettings):
    """Group-relative policy optimisation (https://arxiv.org/abs/2402.03300)."""

    type: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(ge=2)] = 8
    scale_by_std: bool = True  # False is Dr. GRPO
    std_floor: NotNegative = 0.01  # reward units; groups below it are dead
    normalizer: Literal["constant", "decisions"] = "constant"
    min_valid_share: Fraction = 0.5  # a group with fewer scorable members is dropped


class CriticConfig(Model):
    """PPO's value network: an MLP on frozen features of the start policy and the time. It needs the extra torch."""

    hidden: tuple[int, ...] = (128, 128)
    lr: Above0 = 1e-3
    epochs: Positive = 10  # over the decisions of a step
    minibatch: Positive = 128  # decisions
    max_grad_norm: Above0 = 1.0


class PPOConfig(ClippedSettings):
    """Proximal policy optimisation with a critic (https://arxiv.org/abs/1707.06347)."""

    type: Literal["ppo"] = "ppo"
    kl_target: Above0 | None = None  # nats per sub-step; the KL coefficient adapts to it. null: it stays
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0  # discount of one decision
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95  # of the generalised advantages
    value_clip: Above0 | None = 0.2  # reward units that a value moves at most; null: not clipped
    value_coef: Above0 = 0.5  # c1; before the critic's gradient is clipped, so it is lost in what Adam divides by
    entropy_coef: NotNegative = 0.0  # c2; only for policies whose entropy can change
    critic: CriticConfig = CriticConfig()


class DPOConfig(AlgorithmSettings):
    """Trajectory DPO (https://arxiv.org/abs/2305.18290) on the labelled pairs themselves, without a reward model."""

    type: Literal["dpo"] = "dpo"
    beta: Above0 = 1.0  # of the log-ratio to the start policy; larger stays nearer to it
    pairs_per_step: Positive = 64  # drawn from all labelled ones


class TPOConfig(AlgorithmSettings):
    """GRAPE's trajectory-wise preference optimisation (https://arxiv.org/abs/2411.19309): DPO's loss on fresh pairs of
    one start state, which the reward ranks."""

    type: Literal["tpo"] = "tpo"
    group_size: Annotated[int, Field(ge=2)] = 8
    beta: Above0 = 1.0  # of the log-ratio to the start policy; larger stays nearer to it
    pairs_per_group: Positive = 2  # the best with the worst, the second best with the second worst, ...
    margin: NotNegative = 0.01  # reward units; a pair that is nearer than this is left out


class FilteredBCConfig(AlgorithmSettings):
    """Imitation of the best of the policy's own episodes (https://arxiv.org/abs/2106.01345, %BC)."""

    type: Literal["filtered_bc"] = "filtered_bc"
    share: Annotated[float, Field(gt=0, le=1)] = 0.25  # of the episodes of a step, by their reward
    threshold: float | None = None  # reward below which nothing is imitated; null: the share decides alone
    kl_coef: NotNegative | None = None  # None: 0.02 for a learned reward, 0 for the simulator's success or truth


def _tag(section: Any) -> str:
    """A section without a type is GRPO's."""
    return section.get("type", "grpo") if isinstance(section, dict) else section.type


AlgorithmConfig = Annotated[
    Annotated[GRPOConfig, Tag("grpo")]
    | Annotated[PPOConfig, Tag("ppo")]
    | Annotated[DPOConfig, Tag("dpo")]
    | Annotated[TPOConfig, Tag("tpo")]
    | Annotated[FilteredBCConfig, Tag("filtered_bc")],
    Discriminator(
        _tag,
        custom_error_type="algorithm_type",
        custom_error_message=("no such algorithm; type is one of grpo, ppo, dpo, tpo, filtered_bc"),
    ),
]
PairConfig = DPOConfig | TPOConfig
