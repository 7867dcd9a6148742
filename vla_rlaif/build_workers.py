"""What the workers of a run on a cluster are made of. The part of `build.py` that runs in their processes.

Each is made where it runs: from the config, and from what the learner has put into the run directory, which all nodes
see.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vla_rlaif.build import build_anchor, build_env, build_learner, lerobot_export
from vla_rlaif.build_algorithm import build_algorithm
from vla_rlaif.build_reward import build_scorer
from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.config import RunConfig
from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.learner_worker import LearnerWorker, Meeting, Trainee
from vla_rlaif.dist.manifest import Layout
from vla_rlaif.dist.workers import ReferenceWorker, RewardWorker, RolloutWorker
from vla_rlaif.env_config import EnvConfig, ProcessEnvConfig, TabletopConfig
from vla_rlaif.interfaces import Learner, Policy, ReferenceModel, VectorEnv
from vla_rlaif.learning import Anchor
from vla_rlaif.score import try_reward
from vla_rlaif.start import check_groups, start_policy, stored_start
from vla_rlaif.token_config import TokenVLAConfig, VLLMConfig
from vla_rlaif.types import EnvSpec

Say = Callable[[str], None]
Places = tuple[Any, ...]  # of ray_places.Lent: Ray is imported only where it is used


def make_learner_worker(context: WorkerContext, config: RunConfig, run_dir: Path) -> LearnerWorker:
    return LearnerWorker(RunWorkshop(context, config, run_dir), context.store, is_first=context.index == 0)


def make_rollout_worker(
    context: WorkerContext, config: RunConfig, run_dir: Path, lent: Sequence[Places] = ()
) -> RolloutWorker:
    """``lent``: places for the env workers of each rollout worker; without them its envs are in its own process."""
    share = config.env.model_copy(update={"num_envs": config.env.num_envs // context.num})
    env = _env_on(lent[context.index], context, config, share, run_dir) if lent else build_env(share)
    policy = stored_start(config, env.spec, run_dir)
    acting = _with_engine(config, policy, run_dir / "vllm" / str(context.index))
    layout = _layout(config, policy)
    return RolloutWorker(context.name, acting, env, act_batch=config.loop.act_batch, layout=layout)


def make_reward_worker(context: WorkerContext, config: RunConfig, run_dir: Path, spec: EnvSpec) -> RewardWorker:
    return RewardWorker(build_scorer(config, stored_start(config, spec, run_dir), spec))


def make_reference_worker(context: WorkerContext, config: RunConfig, run_dir: Path, spec: EnvSpec) -> ReferenceWorker:
    return ReferenceWorker(reference_of(config, stored_start(config, spec, run_dir)))


def reference_of(config: RunConfig, policy: Any) -> ReferenceModel:
    """Of the start policy."""
    if config.policy.backend == "jax":
        from vla_rlaif.jax_reference import JaxReference

        return JaxReference(policy, config.learner)
    from vla_rlaif.torch_reference import TorchReference

    return TorchReference(policy, config.learner)


class RunWorkshop:
    """What a learner worker is made of. ``look`` and ``start`` are asked of the first rank only."""

    def __init__(self, context: WorkerContext, config: RunConfig, run_dir: Path) -> None:
        self._context, self._config, self._run_dir = context, config, run_dir
        self._env: VectorEnv | None = None
        self._store: Any = None

    def look(self) -> EnvSpec:
        self._env = build_env(_one_group(self._config))
        check_groups(self._env, self._config)
        try_reward(self._config, self._env)
        return self._env.spec

    def start(self, say: Say) -> None:
        assert self._env is not None, "look comes first"
        try:
            start_policy(self._config, self._env, self._run_dir, say)
        finally:
            self._env.close()

    def meet(self) -> int:
        from vla_rlaif.torch_parallel import serve_store

        self._store = serve_store(self._context.place.address)
        return self._store.port

    def build(self, spec: EnvSpec, meeting: Meeting | None) -> Trainee:
        config = self._config
        policy = stored_start(config, spec, self._run_dir)
        anchor = build_anchor(config, policy, spec, self._run_dir)
        if meeting is None:
            learner = build_learner(config, policy, spec, anchor)
        else:
            learner = self._rank_of(policy, spec, anchor, meeting)
        return Trainee(
            learner=learner, policy=policy, metadata=policy.metadata(), export=lerobot_export(config.policy, policy)
        )

    def _rank_of(self, policy: Any, spec: EnvSpec, anchor: Anchor | None, meeting: Meeting) -> Learner:
        from vla_rlaif.torch_learner import TorchLearner
        from vla_rlaif.torch_parallel import Rank

        settings, cluster = self._config.learner, self._config.cluster
        assert isinstance(cluster, RayClusterConfig)
        rank = Rank.join(
            self._context.index,
            self._context.num,
            sharding=settings.sharding,
            host=meeting.address,
            port=meeting.port,
            gpu=0,  # the only one that this worker sees
            timeout_s=settings.timeout_s,
            meet_s=cluster.faults.start_timeout_s,
        )
        return TorchLearner(policy, build_algorithm(self._config, spec), settings, anchor, rank=rank)


def _env_on(places: Places, context: WorkerContext, config: RunConfig, share: EnvConfig, run_dir: Path) -> VectorEnv:
    from vla_rlaif.dist.ray_cluster import RayCluster
    from vla_rlaif.dist.remote_env import start_remote_env

    assert isinstance(config.cluster, RayClusterConfig)
    logs = run_dir / "logs" / f"{context.role}-{context.index}"
    cluster = RayCluster(config.cluster, lent=places, folder=Path.cwd(), logs=logs)
    timeout_s = config.cluster.faults.env_timeout_s
    return start_remote_env(cluster, share, num_workers=len(places), timeout_s=timeout_s)


def _with_engine(config: RunConfig, policy: Any, folder: Path) -> Policy:
    if not (isinstance(config.policy, TokenVLAConfig) and isinstance(config.policy.engine, VLLMConfig)):
        return policy
    from vla_rlaif.policies.tokens.vllm_policy import VLLMPolicy

    return VLLMPolicy(policy, config.policy.engine, folder)


def _layout(config: RunConfig, policy: Any) -> Layout:
    """Of the weights that a learner of this policy gives away."""
    if config.policy.backend == "jax":
        return {name: (value.dtype.name, tuple(value.shape)) for name, value in policy.params.items()}
    from vla_rlaif.torch_weights import named_tensors

    def dtype(value: Any) -> str:
        return "float32" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")

    return {name: (dtype(value), tuple(value.shape)) for name, value in named_tensors(policy.module).items()}


def _one_group(config: RunConfig) -> EnvConfig:
    """As few members as show whether those of a group start alike."""
    change: dict[str, Any] = {"num_envs": config.algorithm.group_size}
    if isinstance(config.env, TabletopConfig | ProcessEnvConfig):
        change["double_buffer"] = False
    if isinstance(config.env, ProcessEnvConfig):
        change["workers"] = min(config.env.workers, config.algorithm.group_size)
    return config.env.model_copy(update=change)
