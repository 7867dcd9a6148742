"""The reward of a config, as ``build`` makes everything else: imports happen inside the functions."""

from typing import Any

from vla_rlaif.build_labeller import build_rater
from vla_rlaif.composite import CompositeReward, LearnedTerm, Terms, TermScorer, Weighted
from vla_rlaif.config import RunConfig
from vla_rlaif.interfaces import RewardModel
from vla_rlaif.preferences.refresh import FittableReward
from vla_rlaif.reward_config import (
    CnnEncoderConfig,
    ColorPointsEncoderConfig,
    CompositeRewardConfig,
    LeRobotRewardConfig,
    PolicyEncoderConfig,
    PreferenceRewardConfig,
    PretrainedEncoderConfig,
    PythonRewardConfig,
    RobometerRewardConfig,
    TermRewardConfig,
    VLMJudgeRewardConfig,
    parts_of,
)
from vla_rlaif.types import EnvSpec


def check_reward(config: RunConfig) -> None:
    """Find a misnamed reward function before minutes of warm start, not after."""
    for part in parts_of(config.reward):
        if isinstance(part, PythonRewardConfig):
            from vla_rlaif.reward_models.python import PythonReward

            PythonReward(part.function, blind=part.blind)


def build_reward(config: RunConfig, policy: Any, spec: EnvSpec) -> RewardModel:
    return compose(config, build_scorer(config, policy, spec))


def build_scorer(config: RunConfig, policy: Any, spec: EnvSpec) -> RewardModel | Terms:
    """What reward workers have: of a composite its terms, else the reward itself."""
    if not isinstance(config.reward, CompositeRewardConfig):
        return _build_term(config.reward, config, policy, spec)
    rewards = [_build_term(term.reward, config, policy, spec) for term in config.reward.terms]
    learned = [reward for reward in rewards if isinstance(reward, FittableReward)]
    return Terms(rewards, learned=learned[0] if learned else None)


def compose(config: RunConfig, scorer: Any) -> RewardModel:
    """The reward of the run. ``scorer`` is what ``build_scorer`` makes, or a pool of workers that have it."""
    if not isinstance(config.reward, CompositeRewardConfig):
        return scorer
    assert isinstance(scorer, TermScorer)
    terms = config.reward.terms
    rows = [row for row, term in enumerate(terms) if isinstance(term.reward, PreferenceRewardConfig)]
    learned = LearnedTerm(row=rows[0], reward=fittable(scorer)) if rows else None
    weighted = [Weighted(name=term.label, weight=term.weight, scale=term.scale) for term in terms]
    return CompositeReward(scorer, weighted, learned=learned)


def fittable(reward: object) -> FittableReward:
    """What is fitted of a reward that is learned, or has a learned term."""
    found = reward.scorer if isinstance(reward, CompositeReward) else reward
    found = found.learned if isinstance(found, Terms) else found
    assert isinstance(found, FittableReward), f"{type(found).__name__} is not learned from labels"
    return found


def _build_term(reward: TermRewardConfig, config: RunConfig, policy: Any, spec: EnvSpec) -> RewardModel:
    if isinstance(reward, PreferenceRewardConfig):
        return build_preference_reward(reward, policy, spec)
    if isinstance(reward, VLMJudgeRewardConfig):
        from vla_rlaif.reward_models.vlm_judge import VLMJudgeReward

        return VLMJudgeReward(build_rater(reward, config.run_dir))
    if isinstance(reward, PythonRewardConfig):
        from vla_rlaif.reward_models.python import PythonReward

        return PythonReward(reward.function, blind=reward.blind)
    if isinstance(reward, RobometerRewardConfig):
        from vla_rlaif.reward_models.robometer import RobometerReward

        return RobometerReward(reward)
    if isinstance(reward, LeRobotRewardConfig):
        from vla_rlaif.reward_models.lerobot import LeRobotReward

        return LeRobotReward.load(reward, spec)
    if reward.type == "success":
        from vla_rlaif.reward_models.success import SuccessReward

        return SuccessReward()
    if reward.type == "oracle":
        from vla_rlaif.reward_models.oracle import OracleReward

        return OracleReward()
    from vla_rlaif.reward_models.pixel_distance import PixelDistance

    return PixelDistance()


def build_preference_reward(config: PreferenceRewardConfig, policy: Any, spec: EnvSpec) -> Any:
    """``policy`` is only used by encoder `policy`, which keeps a frozen copy of it."""
    from vla_rlaif.reward_models import encoders
    from vla_rlaif.reward_models.color_points import ColorPointEncoder
    from vla_rlaif.reward_models.networks import CnnConfig
    from vla_rlaif.reward_models.preference import PreferenceReward
    from vla_rlaif.reward_models.preference_config import PreferenceConfig
    from vla_rlaif.reward_models.preference_fit import FitConfig

    cnn = None
    match config.encoder:
        case ColorPointsEncoderConfig():
            encoder = ColorPointEncoder(spec, config.encoder.things)
        case PretrainedEncoderConfig():
            encoder = encoders.PretrainedEncoder(spec)
        case CnnEncoderConfig():
            encoder = encoders.PixelEncoder(spec)
            cnn = CnnConfig(num_cameras=len(spec.cameras), image_size=32)
        case PolicyEncoderConfig():
            encoder = encoders.PolicyEncoder(policy, spec)
    return PreferenceReward(
        encoder,
        PreferenceConfig(
            num_members=config.members,
            hidden=config.hidden,
            frames=config.frames,
            combination=config.combine,
            cnn=cnn,
            heads=config.heads,
            score=config.score,
            first_frame=config.first_frame,
            false_positive_rate=config.false_positive_rate,
        ),
        FitConfig(
            num_steps=config.fit_steps,
            lr=config.lr,
            weight_decay=config.weight_decay,
            noise=config.input_noise,
            recent_share=config.recent_share,
            bootstrap=config.bootstrap,
            mistakes=config.assumed_mistakes,
        ),
    )
