"""The far end of ``RemoteVectorEnv``: one vector env in a worker of a cluster. Axes as in remote_env.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.collect import ExpertEnv
from vla_rlaif.dist.cluster import WorkerContext, split_rows
from vla_rlaif.env_config import EnvConfig, ProcessEnvConfig, TabletopConfig
from vla_rlaif.envs.halves import RestorableVectorEnv
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.step_metrics import TimedEnv, WatchedEnv
from vla_rlaif.types import EnvSpec, Transition


@dataclass(frozen=True, kw_only=True)
class EnvHello:
    """What a worker says of its env."""

    spec: EnvSpec
    num_envs: int
    name: str
    has_expert: bool
    is_restorable: bool  # and tells hashes


@dataclass(frozen=True, kw_only=True)
class EnvAnswer:
    """What became of a request, and what it cost: since the answer before."""

    now: Transition
    seconds: Mapping[str, float]  # wall time, by "physics" and "render"
    faults: Mapping[str, int]


class EnvWorker:
    """Owns one vector env. Knows nothing of the others, nor of policies."""

    def __init__(self, env: VectorEnv) -> None:
        self._env = env
        self._seconds: dict[str, float] = {}
        self._faults: dict[str, int] = {}

    def hello(self) -> EnvHello:
        return EnvHello(
            spec=self._env.spec,
            num_envs=self._env.num_envs,
            name=type(self._env).__name__,
            has_expert=isinstance(self._env, ExpertEnv),
            is_restorable=isinstance(self._env, RestorableVectorEnv),
        )

    def reset(self, seeds: Int[np.ndarray, " N"]) -> EnvAnswer:
        return self._answer(self._env.reset(seeds))

    def step(self, action: Float[np.ndarray, "N H A"]) -> EnvAnswer:
        return self._answer(self._env.step(action))

    def expert(self) -> Float[np.ndarray, "N A"]:
        assert isinstance(self._env, ExpertEnv)
        return self._env.expert()

    def state_hash(self) -> tuple[str, ...]:
        return self._restorable.state_hash()

    def snapshot(self, i: int) -> Any:
        return self._restorable.snapshot(i)

    def restore(self, ids: Sequence[int], snapshot: Any) -> EnvAnswer:
        return self._answer(self._restorable.restore(ids, snapshot))

    def close(self) -> None:
        self._env.close()

    @property
    def _restorable(self) -> RestorableVectorEnv:
        assert isinstance(self._env, RestorableVectorEnv)
        return self._env

    def _answer(self, now: Transition) -> EnvAnswer:
        env = self._env
        seconds = dict(env.seconds) if isinstance(env, TimedEnv) else {}
        faults = dict(env.faults) if isinstance(env, WatchedEnv) else {}
        answer = EnvAnswer(
            now=now,
            seconds={k: v - self._seconds.get(k, 0.0) for k, v in seconds.items()},
            faults={k: v - self._faults.get(k, 0) for k, v in faults.items()},
        )
        self._seconds, self._faults = seconds, faults
        return answer


def make_env_worker(context: WorkerContext, config: EnvConfig, *, max_steps: int | None = None) -> EnvWorker:
    """The worker's share of the members of ``config``: nearly as many as any other's."""
    from vla_rlaif.build import build_env

    rows = split_rows(config.num_envs, context.num)[context.index]
    change: dict[str, Any] = {"num_envs": rows.stop - rows.start}
    if isinstance(config, TabletopConfig | ProcessEnvConfig):
        change["double_buffer"] = False  # its halves are other workers
    return EnvWorker(build_env(config.model_copy(update=change), max_steps=max_steps))
