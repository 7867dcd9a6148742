"""What the planner is told about the pool: nodes, replicas, waiting jobs. Observed anew for every plan, never kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from vla_rlaif.pool.clock import Micros


class Gpu(NamedTuple):
    node: str
    slot: int  # 0 ... on the node


class Phase(StrEnum):
    """Where a replica is in its life, in this order."""

    ACQUIRING = "acquiring"  # its processes are being placed
    ACQUIRED = "acquired"
    WARMING = "warming"  # loads, compiles, restores
    WARM = "warm"
    SYNCING = "syncing"  # receives the committed weights
    SYNCED = "synced"  # could work, waits for admission
    ACTIVE = "active"  # serves, trains or collects
    DRAINING = "draining"  # takes nothing new, finishes what it must
    DRAINED = "drained"
    CHECKPOINTING = "checkpointing"  # writes and verifies
    SAVED = "saved"  # the checkpoint was read back and is good
    UNSAVED = "unsaved"  # the checkpoint failed, or reads back corrupt
    RELEASING = "releasing"  # its processes end
    LOST = "lost"  # a node, GPU or process of it died


COMING = (Phase.ACQUIRING, Phase.ACQUIRED, Phase.WARMING, Phase.WARM, Phase.SYNCING, Phase.SYNCED)
LEAVING = (Phase.DRAINING, Phase.DRAINED, Phase.CHECKPOINTING, Phase.SAVED, Phase.UNSAVED, Phase.RELEASING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    name: str
    healthy: tuple[bool, ...]  # by slot; a dead node has none

    @property
    def is_alive(self) -> bool:
        return any(self.healthy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A whole data-parallel replica of a role, or the GPUs of one job. Moments: the observer's monotonic clock."""

    name: str  # unique for ever: it holds the generation of its first GPU
    role: str
    gpus: tuple[Gpu, ...]
    phase: Phase
    since: Micros  # start of the phase
    acquired: Micros
    saved: Micros | None = None  # last good checkpoint; None: it has nothing to lose
    leaving: Micros | None = None  # when its drain began
    version: int | None = None  # of the weights it holds
    job: str | None = None
    attempts: int = 0  # failed or aborted tries of the present step; a kill counts as one
    syncing_since: Micros | None = None  # a weight sync it takes part in while active or draining


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Work of a fixed size that waits for GPUs of its role."""

    name: str
    role: str
    num_gpus: int
    min_runtime: Micros
    submitted: Micros  # instant: the first to ask is the first to start
    one_node: bool = False  # all its GPUs must be on one node
    eta: Micros | None = None  # the answer of the last Reject
    is_answered: bool = False  # whether there was one
    answers: int = 0  # how many there were


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The pool at one moment. All that the planner knows besides the calendar; nothing of it is ever assumed."""

    monotonic: (
        Micros  # the observer's monotonic clock: durations are measured on it, so clock steps do not age anything
    )
    nodes: tuple[Node, ...]
    replicas: tuple[Replica, ...] = ()
    jobs: tuple[Job, ...] = ()  # those that wait
    version: int = 0  # of the committed weights
    p99_ms: Mapping[str, float] = field(default_factory=dict)  # by role, where measured
    generation: Mapping[Gpu, int] = field(default_factory=dict)  # how many replicas a GPU has had; default 0
    decided: Micros | None = None  # the latest instant that a plan was made for; None after a restart
