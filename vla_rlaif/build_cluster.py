"""A run on a cluster: its workers, and the parts of the loop that stand for them. The part of `build.py` for
``cluster: {type: ray}``; what the workers are made of is in `build_workers.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vla_rlaif.build import build_preferences
from vla_rlaif.build_algorithm import build_credit
from vla_rlaif.build_labeller import build_auditor, check_judge
from vla_rlaif.build_reward import compose
from vla_rlaif.build_workers import (
    Places,
    make_learner_worker,
    make_reference_worker,
    make_reward_worker,
    make_rollout_worker,
)
from vla_rlaif.cluster_config import FaultsConfig, RayClusterConfig
from vla_rlaif.config import RunConfig
from vla_rlaif.dist.answers import WorkerError, WorkerLate, WorkerLost, answers
from vla_rlaif.dist.cluster import Cluster, WorkerGroup
from vla_rlaif.dist.crew import CrewSettings
from vla_rlaif.dist.learner_worker import LearnerWorker, Meeting
from vla_rlaif.dist.reference_pool import ReferencePool
from vla_rlaif.dist.remote_learner import RemoteLearner, all_ranks, is_of_learner
from vla_rlaif.dist.reward_pool import RewardPool
from vla_rlaif.dist.rollouts import WorkerRollouts
from vla_rlaif.dist.start import make_cluster
from vla_rlaif.dist.weight_sync import GroupSync
from vla_rlaif.dist.workers import ReferenceWorker, RewardWorker, RolloutWorker
from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.metric_sinks import open_log
from vla_rlaif.parts import Parts
from vla_rlaif.reward_run_card import write_run_card
from vla_rlaif.stage import Trained
from vla_rlaif.token_config import TokenVLAConfig, VLLMConfig
from vla_rlaif.train import train
from vla_rlaif.types import EnvSpec, SyncResult, Weights

Say = Callable[[str], None]

PUBLISH_TRIES = 3  # of weights that no rollout worker could take
NEWS_S = 0.5  # between looks at what the learner says while it makes the start policy


class FollowedSync:
    """A WeightSync that gives work only to those who hold what it has published, from the first time on."""

    def __init__(self, sync: GroupSync, rollouts: WorkerRollouts) -> None:
        self._sync, self._rollouts = sync, rollouts

    def publish(self, *, averaged: bool = False) -> SyncResult:
        """Raises RuntimeError if no rollout worker takes them."""
        for left in reversed(range(PUBLISH_TRIES)):
            self._rollouts.wait_for_one()
            result = self._sync.publish(averaged=averaged)
            self._rollouts.follow(self._sync)
            if result.ok:
                return result
            if not left:
                raise RuntimeError(
                    f"no rollout worker has taken version {result.version}: {'; '.join(result.problems)}"
                )
        raise AssertionError


class RunWorkers:
    """The workers of a run, for one life of its learner."""

    def __init__(self, config: RunConfig, run_dir: Path, cluster: Cluster, say: Say, lent: Sequence[Places]) -> None:
        """Makes what the run starts from, and starts all workers. ``lent``: for the env workers of rollout workers.

        Raises:
            ValueError: they cannot be placed, or the config is mistaken.
            WorkerFailure: a worker could not be built.
        """
        assert isinstance(config.cluster, RayClusterConfig)
        self._config, self._run_dir, self._cluster = config, run_dir, config.cluster
        roles, faults = config.cluster.roles, config.cluster.faults
        start = lambda role, make, **more: cluster.start(  # noqa: E731
            role, partial(make, config=config, run_dir=run_dir, **more), roles.present()[role].workers
        )
        self.learners: WorkerGroup[LearnerWorker] = start("learner", make_learner_worker)
        with _of_the_config():
            spec = answers([self.learners.rank0(LearnerWorker.look)], faults.start_timeout_s, "building an env")[0]
        check_judge(config, spec, run_dir)
        _start(self.learners, faults, say)
        with ThreadPoolExecutor(4) as threads:
            built = threads.submit(_built, self.learners, spec, faults)
            players = threads.submit(start, "rollout", make_rollout_worker, lent=lent)
            judges = threads.submit(start, "reward", make_reward_worker, spec=spec)
            reference = (
                threads.submit(start, "reference", make_reference_worker, spec=spec) if roles.reference else None
            )
        self._metadata, self._has_export = built.result()
        self.players: WorkerGroup[RolloutWorker] = players.result()
        self.judges: WorkerGroup[RewardWorker] = judges.result()
        self.references: WorkerGroup[ReferenceWorker] | None = reference.result() if reference else None
        self.rollouts = WorkerRollouts(self.players, self._settings(faults.rollout_timeout_s))

    def parts(self) -> Parts:
        config, faults = self._config, self._cluster.faults
        learner = RemoteLearner(self.learners, timeout_s=float(config.learner.timeout_s))
        judges = RewardPool(self.judges, self._settings(faults.reward_timeout_s))
        reference = None
        if self.references is not None:
            rows = config.learner.minibatch // config.learner.micro_batches
            reference = ReferencePool(self.references, self._settings(faults.reference_timeout_s), rows=rows)
        senders: WorkerGroup[Any] = self.learners  # groups are invariant in what their workers are
        receivers: WorkerGroup[Any] = self.players
        sync = GroupSync(senders, receivers, self._cluster.sync, folder=self._run_dir / "weights")
        credit = build_credit(config, None, self.rollouts.spec)
        return Parts(
            rollouts=self.rollouts,
            learner=learner,
            sync=FollowedSync(sync, self.rollouts),
            reward=compose(config, judges),
            credit=credit,
            preferences=build_preferences(config, judges, credit, self.rollouts.spec, self._run_dir),
            metadata=self._metadata,
            export=learner.export if self._has_export else None,
            stored=None if config.loop.stored is None else EpisodeStore(config.loop.stored),
            reference=reference,
            auditor=build_auditor(config, self._run_dir),
        )

    def _settings(self, work_s: float) -> CrewSettings:
        return CrewSettings(work_s=work_s, start_s=self._cluster.faults.start_timeout_s)

    def close(self) -> None:
        """End its workers."""
        groups = (self.learners, self.players, self.judges, self.references)
        for group in groups:
            if group is not None:
                group.kill()


class ClusterStage:
    """A Stage. When the learner dies, the run goes on from its newest checkpoint with new workers, as often as a worker
    may be restarted (faults.max_restarts)."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        cluster: Cluster,
        say: Say,
        lent: Sequence[Places] = (),
    ) -> None:
        self._lent = lent
        self._config, self.run_dir, self._cluster, self._say = config, run_dir, cluster, say
        self.workers = RunWorkers(config, run_dir, cluster, say, lent)

    @property
    def rollouts(self) -> WorkerRollouts:
        return self.workers.rollouts

    def act_with(self, weights: Weights, version: int) -> None:
        self.workers.rollouts.act_with(weights, version)

    def train(self, *, resume: bool) -> Trained:
        """Raises RuntimeError, which says how to go on, if it cannot do so by itself."""
        assert isinstance(self._config.cluster, RayClusterConfig)
        lost = False
        for left in reversed(range(self._config.cluster.faults.max_restarts + 1)):
            try:
                if lost:
                    self.workers.close()
                    self.workers = RunWorkers(self._config, self.run_dir, self._cluster, self._say, self._lent)
                return self._train(resume=resume or lost)
            except (WorkerLost, WorkerLate) as failure:
                if not left or not is_of_learner(failure):
                    raise RuntimeError(
                        f"{failure}\nThe run goes on from its newest checkpoint with --resume."
                    ) from None
                self._say(f"{failure}\nGoing on from the newest checkpoint with new workers; {left} times at most.")
                lost = True
        raise AssertionError

    def _train(self, *, resume: bool) -> Trained:
        parts = self.workers.parts()
        with open_log(self._config, self.run_dir) as log:
            state = train(self._config, parts, log, self.run_dir, resume=resume, say=self._say)
        write_run_card(self._config, parts, self.run_dir, self._say)
        return Trained(state=state, num_labels=parts.preferences.num_labels if parts.preferences is not None else 0)


@contextmanager
def cluster_stage(config: RunConfig, run_dir: Path, create: Callable[[], None], say: Say) -> Iterator[ClusterStage]:
    """``create`` makes the run directory; it is called when all workers have a place."""
    check_cluster(config)
    cluster = make_cluster(config.cluster, logs=run_dir / "logs")
    try:
        create()
        yield ClusterStage(config, run_dir, cluster, say, _lent(config, cluster))
    finally:
        cluster.close()


def _lent(config: RunConfig, cluster: Cluster) -> list[Places]:
    """For the env workers of each rollout worker."""
    assert isinstance(config.cluster, RayClusterConfig)
    roles = config.cluster.roles
    if roles.env is None:
        return []
    from vla_rlaif.dist.ray_cluster import RayCluster

    assert isinstance(cluster, RayCluster)
    return [cluster.lend("env", index, roles.rollout.workers) for index in range(roles.rollout.workers)]


def check_cluster(config: RunConfig) -> None:
    """What only a cluster cannot do."""
    engine = config.policy.engine if isinstance(config.policy, TokenVLAConfig) else None
    if isinstance(engine, VLLMConfig) and engine.sleep:
        raise ValueError(
            "policy.engine.sleep frees a GPU for the learner of the same process, and on a cluster the learner has a "
            "process of its own: set it to false."
        )


def _start(learners: WorkerGroup[LearnerWorker], faults: FaultsConfig, say: Say) -> None:
    """However long a warm start takes, it is waited for as long as the worker says that it lives."""
    started = learners.rank0(LearnerWorker.start)
    while True:
        wait([started], NEWS_S)
        is_done = started.done()
        for line in answers([learners.rank0(LearnerWorker.news, urgent=True)], faults.silent_s, "telling the news")[0]:
            say(line)
        if is_done:
            with _of_the_config():
                return started.result()


@contextmanager
def _of_the_config() -> Iterator[None]:
    """Around work on what the config says: a ValueError in it is the user's."""
    try:
        yield
    except WorkerError as error:
        if error.kind == "ValueError":
            raise ValueError(error.reason) from None
        raise


def _built(learners: WorkerGroup[LearnerWorker], spec: EnvSpec, faults: FaultsConfig) -> tuple[Mapping[str, Any], bool]:
    meeting = None
    if len(learners.handles) > 1:
        port = answers([learners.rank0(LearnerWorker.meet)], faults.start_timeout_s, "opening its store")[0]
        meeting = Meeting(address=learners.handles[0].place.address, port=port)
    asked = learners.all(partial(LearnerWorker.build, spec=spec, meeting=meeting))
    with _of_the_config():
        return all_ranks(asked, faults.start_timeout_s, "building the learner")[0]
