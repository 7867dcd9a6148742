"""The two ends of a weight sync without policies: a learner that is a table of arrays, an actor that stores them. And
what tests do with groups of them."""

import functools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from vla_rlaif.cluster_config import SyncConfig
from vla_rlaif.dist.answers import answers
from vla_rlaif.dist.cluster import WorkerContext, WorkerGroup
from vla_rlaif.dist.manifest import Layout
from vla_rlaif.dist.sender import Sender
from vla_rlaif.dist.staging import Receiver
from vla_rlaif.dist.weight_sync import GroupSync
from vla_rlaif.types import Weights

# Every array begins a slot of 64 bytes.
FROZEN_BYTES = 84_032 + 64  # 300 x 70 floats, one number
TRAINED_BYTES = 1_400_000 + 2048 + 64  # 700 x 500 floats, 500 floats, one float
TRANSPORTS = ["shared_memory", "relay", "process_group", "object_store", "disk"]

FROZEN = {"stem/kernel": (300, 70), "stem/steps": ()}
TRAINED = {"head/kernel": (700, 500), "head/bias": (500,), "head/empty": (0, 3), "scale": ()}  # 1.4 MB: six blocks


def values(shapes: Mapping[str, tuple[int, ...]], version: int, *, averaged: bool = False) -> dict[str, np.ndarray]:
    """What a learner has at a version: different numbers everywhere, integers among them."""
    factor = np.float32(version + (1.5 if averaged else 2))
    made = {name: np.asarray(_drawn(shape) * factor) for name, shape in shapes.items()}
    return made | ({"stem/steps": np.asarray(np.int64(8))} if "stem/steps" in shapes else {})


@functools.cache
def _drawn(shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


@dataclass
class Table:
    """A learner: ``version`` says what its weights are."""

    version: int = 0
    rank: int = 0
    barrier: threading.Barrier | None = None  # of the ranks: collecting weights is collective
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: FROZEN)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: TRAINED)

    def trained(self, *, averaged: bool) -> Weights:
        if self.barrier is not None:
            self.barrier.wait(10)
        return {} if self.rank else values(self.shapes, self.version, averaged=averaged)

    def weights(self, *, averaged: bool = False) -> Weights:
        return {**values(self.frozen, -1), **self.trained(averaged=averaged)}


class LearnerEnd:
    def __init__(self, context: WorkerContext, table: Table, *, threads: int | None = None) -> None:
        self.table = table
        self.sender = Sender(table, is_root=context.index == 0, store=context.store, threads=threads)


class Actor:
    """Loads by copying, as most policies do, and notes what it was given."""

    def __init__(self, context: WorkerContext, *, expected: Layout | None = None, threads: int | None = None) -> None:
        self.name, self.weights, self.loaded = context.name, dict[str, np.ndarray](), list[int]()
        self.receiver = Receiver(self.load, expected=expected, threads=threads)

    def load(self, weights: Weights, version: int) -> None:
        self.weights = {name: value.copy() for name, value in weights.items()}
        self.loaded.append(version)


def make_learner(context: WorkerContext, *, frozen: Mapping[str, tuple[int, ...]] = FROZEN) -> LearnerEnd:
    return LearnerEnd(context, Table(rank=context.index, frozen=frozen))


def make_actor(context: WorkerContext) -> Actor:
    return Actor(context)


def step(learner: LearnerEnd) -> int:
    learner.table.version += 1
    return learner.table.version


def play(actor: Actor) -> tuple[int, Weights]:
    """The version that acts, and its weights."""
    actor.receiver.adopt()
    return actor.receiver.version, actor.weights


def make_rank(context: WorkerContext, *, barrier: threading.Barrier) -> LearnerEnd:
    return LearnerEnd(context, Table(rank=context.index, barrier=barrier), threads=1)


def a_sync(cluster, transport, tmp_path: Path, *, ranks=1, receivers=1, make=make_actor, **config):
    """(sync, learners, actors)"""
    barrier = threading.Barrier(ranks)
    learners = cluster.start("learner", partial(make_rank, barrier=barrier), ranks)
    actors = cluster.start("rollout", make, receivers)
    config = SyncConfig(transport=transport, bucket_mb=1, timeout_s=20.0, **config)
    return GroupSync(learners, actors, config, folder=tmp_path), learners, actors


def played(actors: WorkerGroup[Actor]):
    return answers(actors.all(play), 10.0, "playing")


def stepped(learners: WorkerGroup[LearnerEnd]) -> None:
    answers(learners.all(step), 10.0, "a step")


def itself(actor: Actor) -> tuple[int, Actor]:
    return actor.receiver.version, actor


def looked_at(actors):
    return answers(actors.all(itself), 10.0, "looking")


def pid(worker: object) -> int:
    del worker
    return os.getpid()


def resident(worker: object) -> int:
    """Bytes of private memory of its process."""
    del worker
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("Private_Clean", "Private_Dirty")))


def assert_equal(weights: Weights, version: int, *, averaged: bool = False, frozen: bool = True) -> None:
    wanted = {**(values(FROZEN, -1) if frozen else {}), **values(TRAINED, version, averaged=averaged)}
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        assert weights[name].dtype == value.dtype and weights[name].shape == value.shape
        np.testing.assert_array_equal(weights[name], value)
