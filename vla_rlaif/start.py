"""What a run starts from: demonstrations, and the policy that is made of them or of a checkpoint, once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vla_rlaif.build import (
    build_env,
    build_policy,
    demonstrated,
    lerobot_export,
    load_folder,
    measure_statistics,
)
from vla_rlaif.checkpoint import WholeFolder, save_policy
from vla_rlaif.collect import collect_demonstrations
from vla_rlaif.config import RunConfig
from vla_rlaif.dataset import Demonstrations, load_demonstrations, save_demonstrations
from vla_rlaif.env_config import ProcessEnvConfig, TabletopConfig
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.lerobot_config import LeRobotSettings
from vla_rlaif.policy_config import ImitatorSettings, OctoSettings
from vla_rlaif.reward_config import learned_part
from vla_rlaif.rollout import train_starts
from vla_rlaif.types import EnvSpec
from vla_rlaif.warm_start_config import WarmStartConfig
from vla_rlaif.warm_start_data import demonstrations_from

Say = Callable[[str], None]


@runtime_checkable
class HashedEnv(Protocol):
    """An env that can say whether members are in the identical state."""

    def state_hash(self) -> tuple[str, ...]: ...


def check_groups(env: VectorEnv, config: RunConfig) -> None:
    """Members of a group must start from the identical simulator state; compared once, before anything is learned."""
    if not isinstance(env, HashedEnv):
        return
    size = config.algorithm.group_size
    env.reset(train_starts(config.seed, 0, env.num_envs // size, size).seed)
    hashes = np.array(env.state_hash()).reshape(-1, size)
    assert (hashes == hashes[:, :1]).all(), "members of one group do not start from the identical state"


def start_policy(config: RunConfig, env: VectorEnv, run_dir: Path, say: Say) -> Any:
    """The policy a run starts from, made once and kept in ``run_dir/start``."""
    folder = run_dir / "start"
    if _keeps_demonstrations(config):
        run_demonstrations(config, env, run_dir, say)
    if isinstance(config.policy, ImitatorSettings) and not folder.exists():
        warm = config.warm_start
        if warm is None:
            policy = build_policy(config.policy, env.spec, config.seed)
            _say_adaptation(policy, say)
        elif warm.checkpoint is not None:
            policy = load_folder(warm.checkpoint, config, env.spec)
        else:
            policy = imitated_policy(config, run_demonstrations(config, env, run_dir, say), env, say)
        weights = {k: np.asarray(v) for k, v in policy.params.items()}
        save_policy(folder, policy.metadata(), weights, also=lerobot_export(config.policy, policy))
    return stored_start(config, env.spec, run_dir)


def stored_start(config: RunConfig, spec: EnvSpec, run_dir: Path) -> Any:
    """The policy that the run starts from, after ``start_policy`` has made it."""
    if not isinstance(config.policy, ImitatorSettings):
        return build_policy(config.policy, spec, config.seed)
    policy = load_folder(run_dir / "start", config, spec)
    if isinstance(config.policy, OctoSettings):
        policy.freeze_reference()
    return policy


def _say_adaptation(policy: Any, say: Say) -> None:
    """What an official folder gave, and what is new."""
    if "adaptation" in policy.metadata():
        say(policy.metadata()["adaptation"]["summary"])


def run_demonstrations(config: RunConfig, env: VectorEnv, run_dir: Path, say: Say) -> Demonstrations:
    """Those of the warm start. Where they are needed as long as the run lasts, they are kept in its directory."""
    warm, folder = config.warm_start, run_dir / "demonstrations"
    assert warm is not None
    if folder.exists():
        return load_demonstrations(folder)
    if warm.data is not None:
        demos = demonstrations_from(warm.data, env.spec, warm)
    else:
        demos = demonstrations(config, warm, say)
    if _keeps_demonstrations(config):
        with WholeFolder(folder) as part:
            save_demonstrations(part, demos, {"env": config.env.model_dump(mode="json"), "seed": config.seed})
    return demos


def _keeps_demonstrations(config: RunConfig) -> bool:
    """For the anchor, or for heads of the reward that learn from what is known to succeed."""
    learned = learned_part(config.reward)
    return bool(config.algorithm.anchor_coef) or (learned is not None and "demonstrations" in learned.outcomes)


def demonstrations(config: RunConfig, warm: WarmStartConfig, say: Say) -> Demonstrations:
    needed = config.env.model_copy(update={"num_envs": min(config.env.num_envs, warm.collect.episodes)})
    env = build_env(needed, max_steps=_demonstration_steps(config, warm))
    try:
        demos = collect_demonstrations(env, warm.collect, config.seed)
    finally:
        env.close()
    say(f"collected {len(demos.success)} demonstrations, {int(demos.mask.sum())} steps")
    return demos


def _demonstration_steps(config: RunConfig, warm: WarmStartConfig) -> int:
    chunk = config.env.chunk if isinstance(config.env, TabletopConfig | ProcessEnvConfig) else 1
    return -(-(warm.collect.scatter_steps + warm.collect.max_steps + 1) // chunk) * chunk


def imitated_policy(config: RunConfig, demos: Demonstrations, env: VectorEnv, say: Say) -> Any:
    """Fit a fresh policy to demonstrations; normalisation statistics come from them."""
    assert config.warm_start is not None
    if config.policy.backend == "jax":
        from vla_rlaif.jax_imitation import imitate
    else:
        from vla_rlaif.torch_imitation import imitate

    window = config.policy.window if isinstance(config.policy, OctoSettings) else 1
    obs, action = demos.samples(env.spec.chunk, window)
    state = obs.state.reshape(-1, obs.state.shape[-1])
    statistics = measure_statistics(config.policy, action.reshape(-1, action.shape[-1]), state)
    policy = build_policy(config.policy, env.spec, config.seed, statistics=statistics)
    if isinstance(config.policy, LeRobotSettings):  # it brings its own window, and may predict more than is executed
        obs, action = demonstrated(demos, config.policy, policy, env.spec)
    _say_adaptation(policy, say)
    on_start = lambda trained, frozen: say(f"imitate: {trained:,} parameters trained, {frozen:,} frozen")  # noqa: E731
    on_step = lambda step, loss: say(f"imitate step {step}: loss {loss:.4f}")  # noqa: E731
    settings = config.warm_start.imitate
    fitted = imitate(policy, obs, action, settings, seed=config.seed, on_start=on_start, on_step=on_step)
    policy.load(fitted, 0)
    return policy
