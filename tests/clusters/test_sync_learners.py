"""Real learners of both backends at the sending end, real policies at the receiving one."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from mlp_policy import MlpPolicy
from mlp_policy import make_batch as make_mlp_batch

from vla_rlaif.build import build_learner, build_policy
from vla_rlaif.cluster_config import SyncConfig
from vla_rlaif.config import LearnerConfig, parse_config
from vla_rlaif.dist.answers import answers
from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.manifest import layout_of
from vla_rlaif.dist.sender import Lends, Sender
from vla_rlaif.dist.staging import Receiver
from vla_rlaif.dist.thread_cluster import ThreadCluster
from vla_rlaif.dist.weight_sync import GroupSync
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.grpo import GRPO
from vla_rlaif.rollout import make_batch, rollout, train_starts
from vla_rlaif.torch_learner import TorchLearner
from vla_rlaif.torch_weights import as_arrays, named_tensors, to_arrays

SPEC = PointReach(1).spec


def config_for(backend: str) -> Any:
    return parse_config(
        {
            "env": {"type": "point_reach", "num_envs": 64},
            "policy": {"type": "gaussian", "backend": backend},
            "reward": {"type": "pixel_distance"},
            "algorithm": {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.05},
            "learner": {"lr": 0.05, "epochs": 1, "minibatch": 64},
        },
        source="test",
    )


class LearnerEnd:
    def __init__(self, context: WorkerContext, backend: str) -> None:
        config = config_for(backend)
        self.policy = build_policy(config.policy, SPEC, 0)
        self.learner = build_learner(config, self.policy, SPEC, None)
        self.sender = Sender(self.learner, store=context.store)
        episodes = rollout(self.policy, PointReach(64), train_starts(0, 0, 8, 8), seed=0)
        advantage = np.random.default_rng(0).normal(size=64)
        self.batch = make_batch(episodes, advantage, num_valid=64 * 6.0)


class ActorEnd:
    def __init__(self, context: WorkerContext, backend: str) -> None:
        del context
        self.policy: Any = build_policy(config_for(backend).policy, SPEC, 0)
        weights = {name: np.asarray(value) for name, value in self.policy.params.items()}
        self.receiver = Receiver(self.policy.load, expected=layout_of(weights))


def update(end: LearnerEnd, *, seed: int) -> dict[str, np.ndarray]:
    end.learner.update(end.batch, seed)
    return dict(end.learner.weights())


def acting(end: ActorEnd) -> tuple[int, dict[str, np.ndarray]]:
    end.receiver.adopt()
    return end.policy.version, {name: np.asarray(value).copy() for name, value in end.policy.params.items()}


@pytest.fixture
def cluster() -> Iterator[ThreadCluster]:
    cluster = ThreadCluster()
    yield cluster
    cluster.close()


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_policies_act_with_the_learners_numbers(cluster, backend, transport):
    learners = cluster.start("learner", partial(LearnerEnd, backend=backend), 1)
    actors = cluster.start("rollout", partial(ActorEnd, backend=backend), 2)
    sync = GroupSync(learners, actors, SyncConfig(transport=transport, timeout_s=20.0))
    for step in range(3):
        [weights] = answers([learners.rank0(partial(update, seed=step))], 100.0, "an update")
        assert sync.publish().ok
        for version, params in answers(actors.all(acting), 100.0, "looking"):
            assert version == step + 1 and params.keys() == weights.keys()
            for name, value in weights.items():
                np.testing.assert_array_equal(params[name], value)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_what_is_lent_is_not_copied(backend):
    config = config_for(backend)
    learner = build_learner(config, build_policy(config.policy, SPEC, 0), SPEC, None)
    assert isinstance(learner, Lends)
    first, second = (learner.lent(averaged=False) for _ in range(2))
    for name, value in learner.trained(averaged=False).items():
        np.testing.assert_array_equal(first[name], value)
        assert np.shares_memory(first[name], second[name])
        assert not np.shares_memory(first[name], value)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_learner_that_has_lent_learns_the_same(backend):
    """Its buffers are overwritten by the update: what was lent must be given back, and then nothing is disturbed."""
    config, found = config_for(backend), []
    for lends in (False, True):
        policy = build_policy(config.policy, SPEC, 0)
        learner: Any = build_learner(config, policy, SPEC, None)
        episodes = rollout(policy, PointReach(64), train_starts(0, 0, 8, 8), seed=0)
        batch = make_batch(episodes, np.random.default_rng(0).normal(size=64), num_valid=64 * 6.0)
        for step in range(2):
            if lends:
                copied = {name: value.copy() for name, value in learner.lent(averaged=False).items()}
                assert copied.keys() == learner.trained(averaged=False).keys()
            learner.update(batch, step)
        found.append(learner.trained(averaged=False))
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value)


class MlpLearnerEnd:
    def __init__(self, context: WorkerContext) -> None:
        config = LearnerConfig(minibatch=8, lr=0.05)
        self.learner = TorchLearner(MlpPolicy(), GRPO(group_size=8, kl_coef=0.05), config)
        self.sender = Sender(self.learner, store=context.store)


class MlpActorEnd:
    def __init__(self, context: WorkerContext) -> None:
        del context
        self.policy = MlpPolicy()
        self.receiver = Receiver(self.policy.load, expected=layout_of(as_arrays(named_tensors(self.policy.module))))


def learn(end: MlpLearnerEnd, *, seed: int) -> dict[str, np.ndarray]:
    end.learner.update(make_mlp_batch(16, seed), seed)
    return dict(end.learner.weights())


def adopted(end: MlpActorEnd) -> dict[str, np.ndarray]:
    end.receiver.adopt()
    return to_arrays(named_tensors(end.policy.module))


def test_what_is_trained_arrives_and_what_is_frozen_goes_once(cluster):
    """Adapters that are never sent look like mere staleness."""
    learners, actors = cluster.start("learner", MlpLearnerEnd, 1), cluster.start("rollout", MlpActorEnd, 1)
    sync, start = GroupSync(learners, actors, SyncConfig()), to_arrays(named_tensors(MlpPolicy().module))
    trained = MlpPolicy().trainable
    assert 0 < len(trained) < len(start)
    sizes = []
    for step in range(2):
        [weights] = answers([learners.rank0(partial(learn, seed=step))], 100.0, "an update")
        sizes.append(sync.publish().num_bytes)
        [params] = answers(actors.all(adopted), 100.0, "looking")
        for name, value in params.items():
            np.testing.assert_array_equal(value, weights[name])
        moved = {name for name, value in params.items() if not np.array_equal(value, start[name])}
        assert moved and moved <= trained
    slots = sum(-(-start[name].nbytes // 64) * 64 for name in trained)
    assert sizes[1] == slots < sizes[0]
