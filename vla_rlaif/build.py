"""Config to objects: the only place that chooses classes.

Imports happen inside the functions, so that a run loads only what it uses.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from vla_rlaif.build_algorithm import build_algorithm, build_credit, check_devices
from vla_rlaif.build_clips import build_clip_book
from vla_rlaif.build_labeller import build_auditor, build_labeller, pair_mix
from vla_rlaif.build_process_env import build_process_env, strengths
from vla_rlaif.build_reward import build_reward, fittable
from vla_rlaif.checkpoint import load_policy
from vla_rlaif.config import RunConfig
from vla_rlaif.dataset import Demonstrations, load_demonstrations
from vla_rlaif.env_config import (
    CustomEnvConfig,
    EnvConfig,
    PointReachConfig,
    ProcessEnvConfig,
    TabletopConfig,
)
from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.interfaces import Credit, Learner, Policy, VectorEnv
from vla_rlaif.learning import Anchor
from vla_rlaif.lerobot_config import LeRobotConfig, LeRobotSettings, SmolVLAConfig
from vla_rlaif.pair_credit import LabelledPairs
from vla_rlaif.parts import Parts
from vla_rlaif.policy_config import (
    CustomPolicyConfig,
    GaussianConfig,
    MlpConfig,
    OctoCheckpointConfig,
    OctoConfig,
    OctoSettings,
    PolicyConfig,
)
from vla_rlaif.preferences.refresh import PreferenceLearner, RefreshConfig
from vla_rlaif.reward_config import (
    learned_part,
)
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.symbols import load_symbol
from vla_rlaif.token_config import TokenVLAConfig, VLLMConfig
from vla_rlaif.types import EnvSpec, Observation
from vla_rlaif.weight_sync import LocalSync


def build_env(config: EnvConfig, *, max_steps: int | None = None) -> VectorEnv:
    """``max_steps`` lengthens the episodes, for demonstrations; those need no double buffer."""
    if isinstance(config, TabletopConfig | ProcessEnvConfig) and config.double_buffer and max_steps is None:
        return _halves(config)
    if isinstance(config, TabletopConfig):
        from vla_rlaif.envs.gl_missing import explained

        with explained():
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
            randomize=strengths(config.randomize),
        )
    if isinstance(config, PointReachConfig):
        from vla_rlaif.envs.point_reach import PointReach

        return PointReach(config.num_envs, max_decisions=config.max_decisions, radius=config.radius)
    if isinstance(config, ProcessEnvConfig):
        return build_process_env(config, max_steps=max_steps)
    assert isinstance(config, CustomEnvConfig)
    env = load_symbol(config.factory)(num_envs=config.num_envs, **config.options)
    if not isinstance(env, VectorEnv):
        raise ValueError(f"{config.factory} returned a {type(env).__name__}, which has not all of VectorEnv's methods.")
    if env.num_envs != config.num_envs:
        raise ValueError(f"{config.factory} made {env.num_envs} envs, wanted env.num_envs = {config.num_envs}.")
    return env


def _halves(config: EnvConfig) -> VectorEnv:
    """The members, and the worker processes where there are any, in two envs."""
    from vla_rlaif.envs.halves import Halves

    change: dict[str, Any] = {"num_envs": config.num_envs // 2, "double_buffer": False}
    if isinstance(config, ProcessEnvConfig):
        change["workers"] = -(-config.workers // 2)
    half = config.model_copy(update=change)
    first: Any = build_env(half)
    try:
        second: Any = build_env(half)
    except BaseException:
        first.close()
        raise
    return Halves(first, second)


def build_policy(config: PolicyConfig, spec: EnvSpec, seed: int, *, statistics: Any = None) -> Any:
    """A fresh policy: random, or from the folder that the config names. It normalises by ``statistics``, if given:
    those of the demonstrations that it will imitate, as ``measure_statistics`` makes them for it."""
    if isinstance(config, OctoConfig):
        from vla_rlaif.policies.octo.construct import from_scratch

        policy = from_scratch(config, spec, seed=seed)
        return policy if statistics is None else policy.with_statistics(statistics)
    if isinstance(config, OctoCheckpointConfig):
        from vla_rlaif.policies.octo.adopt import from_folder

        return from_folder(config, spec, seed=seed, statistics=statistics)
    if isinstance(config, SmolVLAConfig | LeRobotConfig):
        from vla_rlaif.policies.lerobot import construct

        if isinstance(config, SmolVLAConfig):
            return construct.from_scratch(config, spec, seed=seed, statistics=statistics)
        return construct.from_folder(config, spec, seed=seed, statistics=statistics)
    if isinstance(config, TokenVLAConfig):
        from vla_rlaif.policies.tokens.construct import build

        return build(config, spec, seed=seed, bins=statistics)
    if isinstance(config, CustomPolicyConfig):
        policy = load_symbol(config.factory)(spec, seed=seed, **config.options)
        if not isinstance(policy, Policy):
            raise ValueError(
                f"{config.factory} returned a {type(policy).__name__}, which has not all of Policy's methods."
            )
        return policy
    if isinstance(config, MlpConfig):
        from vla_rlaif.policies.mlp import MlpPolicy

        return MlpPolicy(config, spec, seed=seed, statistics=statistics)
    assert isinstance(config, GaussianConfig)
    if config.backend == "torch":
        from vla_rlaif.policies.gaussian_torch import GaussianTorch

        return GaussianTorch(config, spec)
    from vla_rlaif.policies.gaussian_jax import GaussianJax

    return GaussianJax(config, spec)


def measure_statistics(config: PolicyConfig, action: Float[np.ndarray, "n A"], state: Float[np.ndarray, "m P"]) -> Any:
    """Normalisation by demonstrations, in the form that ``build_policy`` wants it for this policy."""
    if isinstance(config, OctoSettings):
        from vla_rlaif.policies.octo.statistics import Statistics

        return Statistics.measured(action, state)
    if isinstance(config, TokenVLAConfig):
        from vla_rlaif.policies.tokens.construct import measured_bins

        return measured_bins(config, action, state)
    if isinstance(config, MlpConfig):
        from vla_rlaif.policies.mlp import measured_state

        return measured_state(state)
    assert isinstance(config, LeRobotSettings)
    from vla_rlaif.policies.lerobot.processors import measured

    return measured(action, state)


def load_folder(folder: Path, config: RunConfig, spec: EnvSpec) -> Any:
    """The policy of a checkpoint folder, for the config's env; the config may choose other RL settings for it.

    With policy.type octo_checkpoint the folder may also be an official one, and with lerobot a `pretrained_model`, in
    place of the config's.
    """
    if isinstance(config.policy, OctoCheckpointConfig) and (folder / "dataset_statistics.json").exists():
        return build_policy(config.policy.model_copy(update={"folder": folder, "step": None}), spec, config.seed)
    if isinstance(config.policy, LeRobotConfig) and (folder / "policy_preprocessor.json").exists():
        return build_policy(config.policy.model_copy(update={"path": str(folder)}), spec, config.seed)
    metadata, weights = load_policy(folder)
    kind, wanted = metadata.get("config", {}).get("type"), config.policy.type
    if kind != wanted and wanted != "custom":  # a custom policy writes what metadata it likes
        raise ValueError(f"{folder} holds a policy of type {kind!r}, the config wants {wanted!r}.")
    if isinstance(config.policy, OctoConfig | OctoCheckpointConfig):
        from vla_rlaif.policies.octo.construct import from_parts

        policy = from_parts(config.policy, metadata, weights)
    elif isinstance(config.policy, SmolVLAConfig | LeRobotConfig):
        from vla_rlaif.policies.lerobot.construct import from_parts

        policy = from_parts(config.policy, metadata, weights)
    elif isinstance(config.policy, TokenVLAConfig):
        from vla_rlaif.policies.tokens.construct import from_parts

        policy = from_parts(config.policy, metadata, weights)
    else:
        policy = build_policy(config.policy, spec, config.seed)
        policy.load(weights, 0)
        return policy
    names = ("cameras", "image_size", "state_dim", "action_dim", "chunk")
    made, needed = vars(policy.spec), vars(spec)
    differ = [f"{name} {made[name]}, not {needed[name]}" for name in names if made[name] != needed[name]]
    if differ:
        raise ValueError(f"{folder} was made for another env than the config's: {'; '.join(differ)}.")
    return policy


def lerobot_export(config: PolicyConfig, policy: Any) -> Callable[[Path, Path], None] | None:
    """What puts a policy of LeRobot into a policy folder a second time, as a `pretrained_model` that LeRobot loads."""
    if not isinstance(config, LeRobotSettings):
        return None
    name = "pretrained_model"
    return lambda folder, final: policy.export(folder / name, final=final.resolve() / name)


def build_learner(config: RunConfig, policy: Any, spec: EnvSpec, anchor: Anchor | None = None) -> Learner:
    algorithm, learner = build_algorithm(config, spec), config.learner
    if config.policy.backend == "jax":
        from vla_rlaif.devices import Placement
        from vla_rlaif.jax_learner import JaxLearner

        check_devices(algorithm, Placement.of(learner.devices).num_devices)
        return JaxLearner(policy, algorithm, learner, anchor)
    from vla_rlaif.torch_parallel import num_ranks

    ranks = num_ranks(learner.devices)
    check_devices(algorithm, ranks)
    if ranks > 1:
        from vla_rlaif.torch_ranks import TorchRanks

        reload = partial(load_folder, config=config, spec=spec)
        return TorchRanks(policy, algorithm, learner, anchor, reload=reload, num_ranks=ranks)
    if learner.sharding == "fsdp":
        raise ValueError("learner.sharding fsdp needs several devices, and there is one here; set learner.devices.")
    from vla_rlaif.torch_learner import TorchLearner

    return TorchLearner(policy, algorithm, learner, anchor)


def demonstrated(
    demos: Demonstrations, config: PolicyConfig, policy: Any, spec: EnvSpec
) -> tuple[Observation, Float[np.ndarray, "D H A"]]:
    """Every recorded step and the actions that follow, as many as the policy predicts."""
    obs, action = demos.samples(spec.chunk, policy.window)
    if isinstance(config, LeRobotSettings) and policy.num_actions > spec.chunk:
        action = demos.samples(policy.num_actions)[1]  # the same rows; the frames of a window stay a decision apart
    return obs, action


def build_anchor(config: RunConfig, policy: Any, spec: EnvSpec, run_dir: Path) -> Anchor | None:
    """The demonstrations that run.py has put into the run directory, if the config wants them."""
    if not config.algorithm.anchor_coef:
        return None
    assert config.warm_start is not None
    obs, action = demonstrated(load_demonstrations(run_dir / "demonstrations"), config.policy, policy, spec)
    return Anchor(
        obs=obs,
        action=action,
        coef=config.algorithm.anchor_coef,
        batch=config.algorithm.anchor_batch,
        samples=config.warm_start.imitate.samples,
    )


def build_parts(config: RunConfig, env: VectorEnv, policy: Any, run_dir: Path) -> Parts:
    """``policy`` is the start policy; it becomes the one that acts. The learner starts from its parameters."""
    reward = build_reward(config, policy, env.spec)
    learner = build_learner(config, policy, env.spec, build_anchor(config, policy, env.spec, run_dir))
    credit = build_credit(config, policy, env.spec)
    acting, learner = with_engine(config, policy, learner, run_dir)
    return Parts(
        rollouts=LocalRollouts(acting, env, act_batch=config.loop.act_batch),
        learner=learner,
        sync=LocalSync(learner, acting),
        reward=reward,
        credit=credit,
        preferences=build_preferences(config, reward, credit, env.spec, run_dir),
        metadata=policy.metadata(),
        export=lerobot_export(config.policy, policy),
        stored=None if config.loop.stored is None else EpisodeStore(config.loop.stored),
        auditor=build_auditor(config, run_dir),
    )


def with_engine(config: RunConfig, policy: Any, learner: Learner, run_dir: Path) -> tuple[Policy, Learner]:
    """The policy that acts in training, and the learner, which may share a GPU with it."""
    if not (isinstance(config.policy, TokenVLAConfig) and isinstance(config.policy.engine, VLLMConfig)):
        return policy, learner
    from vla_rlaif.policies.tokens.vllm_policy import AsleepWhileLearning, VLLMPolicy

    acting = VLLMPolicy(policy, config.policy.engine, run_dir / "vllm")
    return acting, AsleepWhileLearning(learner, acting) if config.policy.engine.sleep else learner


def build_preferences(
    config: RunConfig, reward: Any, credit: Credit, spec: EnvSpec, run_dir: Path
) -> PreferenceLearner | None:
    settings = learned_part(config.reward)
    if settings is None:
        return None
    from vla_rlaif.preferences.store import PreferenceStore

    return PreferenceLearner(
        labeller=build_labeller(settings.labeller, run_dir),
        store=PreferenceStore(run_dir / "preferences.sqlite"),
        reward=fittable(reward),
        config=RefreshConfig(
            budget=settings.budget,
            held_out_share=settings.held_out,
            mix=pair_mix(settings.pairs),
            seed=config.seed,
        ),
        on_labels=credit.add if isinstance(credit, LabelledPairs) else None,
        clips=build_clip_book(config, fittable(reward).features, spec, run_dir),
    )
