"""A worker that plays in env workers of its own, as a rollout worker of a run with roles.env does."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.remote_env import RemoteVectorEnv, start_remote_env
from vla_rlaif.env_config import EnvConfig
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.rollout import rollout
from vla_rlaif.types import Episodes, Starts

GAUSSIAN = GaussianConfig(backend="torch")


class EnvPlayer:
    def __init__(self, env: RemoteVectorEnv) -> None:
        self._env, self._policy = env, GaussianTorch(GAUSSIAN, env.spec)

    def play(self, starts: Starts) -> Episodes:
        return rollout(self._policy, self._env, starts, seed=0, act_batch=2)

    def reset(self, starts: Starts) -> None:
        self._env.reset(starts.seed)

    def kill_one_and_step(self) -> tuple[list[bool], str]:
        """Which members are valid after the second env worker's process was killed, and what is said of it."""
        handle: Any = self._env._group.handles[1]
        os.kill(handle.pid, signal.SIGKILL)
        now = self._env.step(self._env.expert()[:, None])
        return now.valid.tolist(), self._env.last_fault


def make_player(
    context: WorkerContext, cluster: RayClusterConfig, lent: Sequence[Any], env: EnvConfig, folder: Path
) -> EnvPlayer:
    from vla_rlaif.dist.ray_cluster import RayCluster

    mine = RayCluster(cluster, lent=tuple(lent), logs=folder)
    made = start_remote_env(mine, env, num_workers=len(lent), timeout_s=60.0)
    assert isinstance(made, RemoteVectorEnv)
    return EnvPlayer(made)
