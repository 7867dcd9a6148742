"""Config to objects: the only place that chooses classes.

Imports happen inside the functions, so that a run loads only what it uses.
"""

from pathlib import Path
from typing import Any

from vla_rlaif.checkpoint import load_policy
from vla_rlaif.config import RunConfig, kl_coef
from vla_rlaif.env_config import CustomEnvConfig, EnvConfig, PointReachConfig, TabletopConfig
from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.grpo import GRPO
from vla_rlaif.interfaces import Labeller, Learner, Policy, RewardModel, VectorEnv
from vla_rlaif.policy_config import (
    CustomPolicyConfig,
    GaussianConfig,
    OctoCheckpointConfig,
    OctoConfig,
    OctoSettings,
    PolicyConfig,
)
from vla_rlaif.preferences.refresh import PreferenceLearner, RefreshConfig
from vla_rlaif.reward_config import OracleConfig, PreferenceRewardConfig
from vla_rlaif.symbols import load_symbol
from vla_rlaif.train import Parts
from vla_rlaif.types import EnvSpec
from vla_rlaif.weight_sync import LocalSync


def build_env(config: EnvConfig, *, max_steps: int | None = None) -> VectorEnv:
    """``max_steps`` lengthens the episodes, for demonstrations."""
    if isinstance(config, TabletopConfig):
        from vla_rlaif.envs.tabletop import Tabletop

        return Tabletop(
            config.task,
            num_envs=config.num_envs,
            image_size=config.image_size,
            chunk=config.chunk,
            max_steps=max_steps or config.max_steps,
            success_radius=config.success_radius,
            renderer=config.renderer,
            physics_threads=config.threads,
            render_threads=config.threads,
        )
    if isinstance(config, PointReachConfig):
        from vla_rlaif.envs.point_reach import PointReach

        return PointReach(config.num_envs, max_decisions=config.max_decisions, radius=config.radius)
    assert isinstance(config, CustomEnvConfig)
    env = load_symbol(config.factory)(num_envs=config.num_envs, **config.options)
    if not isinstance(env, VectorEnv):
        raise ValueError(f"{config.factory} returned a {type(env).__name__}, which has not all of VectorEnv's methods.")
    if env.num_envs != config.num_envs:
        raise ValueError(f"{config.factory} made {env.num_envs} envs, wanted env.num_envs = {config.num_envs}.")
    return env


def build_policy(config: PolicyConfig, spec: EnvSpec, seed: int, *, statistics: Any = None) -> Any:
    """A fresh policy: random, or from the folder that the config names. An Octo normalises by ``statistics``, if given:
    those of the demonstrations that it will imitate."""
    if isinstance(config, OctoConfig):
        from vla_rlaif.policies.octo.construct import from_scratch

        policy = from_scratch(config, spec, seed=seed)
        return policy if statistics is None else policy.with_statistics(statistics)
    if isinstance(config, OctoCheckpointConfig):
        from vla_rlaif.policies.octo.adopt import from_folder

        return from_folder(config, spec, seed=seed, statistics=statistics)
    if isinstance(config, CustomPolicyConfig):
        policy = load_symbol(config.factory)(spec, seed=seed, **config.options)
        if not isinstance(policy, Policy):
            raise ValueError(
                f"{config.factory} returned a {type(policy).__name__}, which has not all of Policy's methods."
            )
        return policy
    assert isinstance(config, GaussianConfig)
    if config.backend == "torch":
        from vla_rlaif.policies.gaussian_torch import GaussianTorch

        return GaussianTorch(config, spec)
    from vla_rlaif.policies.gaussian_jax import GaussianJax

    return GaussianJax(config, spec)


def load_folder(folder: Path, config: RunConfig, spec: EnvSpec) -> Any:
    """The policy of a checkpoint folder, for the config's env; the config may choose other RL settings for it.

    With policy.type octo_checkpoint the folder may also be an official one, in place of the config's.
    """
    if isinstance(config.policy, OctoCheckpointConfig) and (folder / "dataset_statistics.json").exists():
        return build_policy(config.policy.model_copy(update={"folder": folder, "step": None}), spec, config.seed)
    metadata, weights = load_policy(folder)
    kind, wanted = metadata.get("config", {}).get("type"), config.policy.type
    if kind != wanted and wanted != "custom":  # a custom policy writes what metadata it likes
        raise ValueError(f"{folder} holds a policy of type {kind!r}, the config wants {wanted!r}.")
    if not isinstance(config.policy, OctoConfig | OctoCheckpointConfig):
        policy = build_policy(config.policy, spec, config.seed)
        policy.load(weights, 0)
        return policy
    from vla_rlaif.policies.octo.construct import from_parts

    policy = from_parts(config.policy, metadata, weights)
    names = ("cameras", "image_size", "state_dim", "action_dim", "chunk")
    made, needed = vars(policy.spec), vars(spec)
    differ = [f"{name} {made[name]}, not {needed[name]}" for name in names if made[name] != needed[name]]
    if differ:
        raise ValueError(f"{folder} was made for another env than the config's: {'; '.join(differ)}.")
    return policy


def check_reward(config: RunConfig) -> None:
    """Find a misnamed reward function before minutes of warm start, not after."""
    if config.reward.type == "python":
        from vla_rlaif.reward_models.python import PythonReward

        PythonReward(config.reward.function)


def build_reward(config: RunConfig, policy: Any, spec: EnvSpec) -> RewardModel:
    reward = config.reward
    if isinstance(reward, PreferenceRewardConfig):
        return build_preference_reward(reward, policy, spec)
    if reward.type == "python":
        from vla_rlaif.reward_models.python import PythonReward

        return PythonReward(reward.function)
    if reward.type == "success":
        from vla_rlaif.reward_models.success import SuccessReward

        return SuccessReward()
    from vla_rlaif.reward_models.pixel_distance import PixelDistance

    return PixelDistance()


def build_preference_reward(config: PreferenceRewardConfig, policy: Any, spec: EnvSpec) -> Any:
    """``policy`` is only used by encoder `policy`, which keeps a frozen copy of it."""
    import torch

    from vla_rlaif.reward_models import encoders
    from vla_rlaif.reward_models.networks import CnnConfig
    from vla_rlaif.reward_models.preference import PreferenceConfig, PreferenceReward
    from vla_rlaif.reward_models.preference_fit import FitConfig

    # The heads are small: a second thread only contends with the simulation (36 ms became 624 ms in policies.md).
    torch.set_num_threads(1)
    cnn = None
    match config.encoder.type:
        case "policy":
            encoder = encoders.PolicyEncoder(policy, spec)
        case "pretrained":
            encoder = encoders.PretrainedEncoder(spec)
        case "cnn":
            encoder = encoders.PixelEncoder(spec)
            cnn = CnnConfig(num_cameras=len(spec.cameras), image_size=32)
    return PreferenceReward(
        encoder,
        PreferenceConfig(
            num_members=config.members,
            hidden=config.hidden,
            frames=config.frames,
            combination=config.combine,
            cnn=cnn,
        ),
        FitConfig(
            num_steps=config.fit_steps,
            lr=config.lr,
            weight_decay=config.weight_decay,
            noise=config.input_noise,
            recent_share=config.recent_share,
        ),
    )


def build_algorithm(config: RunConfig) -> GRPO:
    a = config.algorithm
    return GRPO(
        group_size=a.group_size,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        kl_coef=kl_coef(config),
        scale_by_std=a.scale_by_std,
        std_floor=a.std_floor,
        min_valid_share=a.min_valid_share,
    )


def build_learner(config: RunConfig, policy: Any) -> Learner:
    if not isinstance(config.policy, OctoSettings) and config.policy.backend == "torch":
        from vla_rlaif.torch_learner import TorchLearner

        return TorchLearner(policy, build_algorithm(config), config.learner)
    from vla_rlaif.jax_learner import JaxLearner

    return JaxLearner(policy, build_algorithm(config), config.learner)


def build_parts(config: RunConfig, env: VectorEnv, policy: Any, run_dir: Path) -> Parts:
    """``policy`` is the start policy; it becomes the one that acts. The learner starts from its parameters."""
    reward = build_reward(config, policy, env.spec)
    return Parts(
        env=env,
        policy=policy,
        learner=build_learner(config, policy),
        sync=LocalSync(),
        reward=reward,
        algorithm=build_algorithm(config),
        preferences=build_preferences(config, reward, run_dir),
        metadata=policy.metadata(),
        stored=None if config.loop.stored is None else EpisodeStore(config.loop.stored),
    )


def build_labeller(config: OracleConfig) -> Labeller:
    from vla_rlaif.preferences.oracle import OracleLabeller

    return OracleLabeller(
        beta=config.beta,
        mistake=config.mistake,
        equal_threshold=config.equal_threshold,
        skip_threshold=config.skip_threshold,
        success_ties=config.successes_tie,
    )


def build_preferences(config: RunConfig, reward: Any, run_dir: Path) -> PreferenceLearner | None:
    if not isinstance(config.reward, PreferenceRewardConfig):
        return None
    from vla_rlaif.preferences.store import PreferenceStore

    share = config.reward.within_group
    return PreferenceLearner(
        labeller=build_labeller(config.reward.labeller),
        store=PreferenceStore(run_dir / "preferences.sqlite"),
        reward=reward,
        config=RefreshConfig(
            budget=config.reward.budget,
            held_out_share=config.reward.held_out,
            mix={"within_group": share, "uniform": 1 - share},
            seed=config.seed,
        ),
    )
