"""Rollouts in this process."""

from collections.abc import Mapping

from vla_rlaif.interfaces import Policy, VectorEnv
from vla_rlaif.rollout import rollout
from vla_rlaif.step_metrics import TimedEnv, WatchedEnv, policy_metrics
from vla_rlaif.types import EnvSpec, Played, Starts


class LocalRollouts:
    """A policy and the envs that it acts in. Nothing is ever lost: what fails here fails the run."""

    def __init__(self, policy: Policy, env: VectorEnv, *, act_batch: int | None = None) -> None:
        self._policy, self._env, self._act_batch = policy, env, act_batch

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    @property
    def num_envs(self) -> int:
        return self._env.num_envs

    @property
    def window(self) -> int:
        return self._policy.window

    def play(self, starts: Starts, *, seed: int, noise_scale: float = 1.0) -> Played:
        episodes = rollout(
            self._policy, self._env, starts, seed=seed, noise_scale=noise_scale, act_batch=self._act_batch
        )
        return Played(episodes=episodes)

    @property
    def seconds(self) -> Mapping[str, float]:
        return self._env.seconds if isinstance(self._env, TimedEnv) else {}

    @property
    def faults(self) -> Mapping[str, int]:
        return self._env.faults if isinstance(self._env, WatchedEnv) else {}

    def diagnostics(self) -> Mapping[str, float]:
        return policy_metrics(self._policy)
