"""Try a reward before anything is trained on it: the verb `score`, and what a run does before its first minute.

Axes: see types.py; K terms.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt32

from vla_rlaif.build import build_env, build_policy, load_folder
from vla_rlaif.build_reward import build_reward
from vla_rlaif.composite import CompositeReward
from vla_rlaif.config import RunConfig
from vla_rlaif.evaluate import play_all
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.preferences.data import kendall_tau
from vla_rlaif.preferences.labelled import gather_episodes
from vla_rlaif.reward_config import LeRobotRewardConfig, PythonRewardConfig, learned_part, parts_of
from vla_rlaif.rollout import Split, rollout, train_starts
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.types import Decision, EnvSpec, Episodes, Observation, Weights

Say = Callable[[str], None]


class Still:
    """A policy that does nothing, for any env."""

    window, version = 1, 0

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec

    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        num, spec = len(obs.state), self._spec
        action = np.zeros((num, spec.chunk, spec.action_dim), np.float32)
        return Decision(action=action, logp=np.zeros((num, 1), np.float32), trace={})

    def load(self, weights: Weights, version: int) -> None:
        """It has none."""


def try_reward(config: RunConfig, env: VectorEnv) -> None:
    """Call the user's functions and folders on episodes in which nothing is done, before minutes of warm start.

    Raises what they raise; ValueError if what comes back is no reward.
    """
    if any(isinstance(part, PythonRewardConfig | LeRobotRewardConfig) for part in parts_of(config.reward)):
        size = config.algorithm.group_size
        starts = train_starts(config.seed, 0, env.num_envs // size, size, Split.REWARD)
        episodes = rollout(Still(env.spec), env, starts, seed=config.seed)
        for part in parts_of(config.reward):
            if isinstance(part, PythonRewardConfig | LeRobotRewardConfig):
                alone = config.model_copy(update={"reward": part})
                build_reward(alone, None, env.spec).score(episodes)


def score(config: RunConfig, data: Path | None, policy: Path | None, num: int, say: Say) -> None:
    """Say how the config's reward judges episodes: those of a folder, or fresh ones of a policy.

    Raises:
        ValueError: the reward is learned, and so not known yet; or there are no such episodes.
    """
    if learned_part(config.reward) is not None:
        raise ValueError("reward.type preference is learned from labels: see `vla-rlaif reward fit` and `reward eval`.")
    env = build_env(config.env)
    try:
        episodes = _played(config, env, policy, num) if data is None else gather_episodes(data)[1]
        reward = build_reward(config, None, env.spec)
    finally:
        env.close()
    if isinstance(reward, CompositeReward):
        reward.freeze(episodes)
    scores = reward.score(episodes)
    if isinstance(reward, CompositeReward):
        for name, value in reward.diagnostics().items():
            say(f"{name} {value:.4g}")
    for line in described(scores, episodes):
        say(line)


def _played(config: RunConfig, env: VectorEnv, folder: Path | None, num: int) -> Episodes:
    size = config.algorithm.group_size
    if num < size or num % size:
        raise ValueError(f"--episodes {num} does not split into groups of {size} (algorithm.group_size).")
    if folder is None:
        policy = build_policy(config.policy, env.spec, config.seed)
    else:
        policy = load_folder(folder, config, env.spec)
    starts = train_starts(config.seed, 0, num // size, size, Split.REWARD)
    return play_all(LocalRollouts(policy, env, act_batch=config.loop.act_batch), starts, seed=config.seed)


def described(reward: Float[np.ndarray, " N"], episodes: Episodes) -> list[str]:
    """Figures that show a reward which cannot be learned from, and one that means something else than success."""
    known, success = np.isfinite(reward), episodes.success
    lines = [f"{len(reward)} episodes, {int((~known).sum())} unscorable (NaN), {int(success.sum())} successes"]
    if not known.any():
        return [*lines, "caution: nothing can be scored, so nothing can be learned"]
    r = reward[known].astype(np.float64)
    lines.append(f"reward: mean {r.mean():.4g}, std {r.std():.4g}, from {r.min():.4g} to {r.max():.4g}")
    groups = [reward[episodes.starts.group == g] for g in np.unique(episodes.starts.group)]
    spreads = np.array([np.nanstd(g) for g in groups if np.isfinite(g).sum() > 1] or [0.0])
    dead = int((spreads <= 1e-6).sum())
    lines.append(f"within a group (one start state): std {spreads.mean():.4g}; {dead} of {len(spreads)} without spread")
    if dead == len(spreads):
        lines.append("caution: GRPO compares within groups, and no group has spread: nothing can be learned from this")
    if 0 < success[known].sum() < known.sum():
        gap = reward[known & success].mean() - reward[known & ~success].mean()
        lines.append(f"successes against failures: {gap:+.4g} on average")
        if gap <= 0:
            lines.append("caution: failures are rewarded as much as successes, or more")
    lines.append(f"Kendall's tau with the simulator's return: {kendall_tau(r, episodes.truth[known]):.3f}")
    return lines
