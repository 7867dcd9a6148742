"""What a learner worker does: makes what the run starts from, trains, and gives away weights. Knows no Ray.

Several of them are the ranks of one torch learner: all are asked the same, and each does its part of the rows.
Axes: see types.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vla_rlaif.dist.cluster import ObjectStore
from vla_rlaif.dist.once import Once
from vla_rlaif.dist.sender import Sender
from vla_rlaif.interfaces import Learner, Policy
from vla_rlaif.step_metrics import CompileMeter
from vla_rlaif.types import Batch, EnvSpec, Weights

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of one learner meet."""

    address: str  # of the first rank's node
    port: int


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A learner and the policy that it trains a copy of."""

    learner: Learner
    policy: Policy
    metadata: Mapping[str, Any]  # of the policy, for its checkpoints
    export: Callable[[Path, Path], None] | None  # writes ``policy`` once more into those, for LeRobot


@runtime_checkable
class Workshop(Protocol):
    """What build_cluster.py knows of a run, for a learner worker."""

    def look(self) -> EnvSpec:
        """What the env is, after a look at whether groups start alike in it."""
        ...

    def start(self, say: Say) -> None:
        """Make what the run starts from, unless that has been done."""
        ...

    def meet(self) -> int:
        """Let the ranks meet here, as long as this object lives; the port."""
        ...

    def build(self, spec: EnvSpec, meeting: Meeting | None) -> Trainee: ...


class LearnerWorker:
    """``look``, ``start``, ``build``, then updates. ``is_first``: the first rank, which speaks for all."""

    sender: Sender

    def __init__(self, workshop: Workshop, store: ObjectStore, *, is_first: bool) -> None:
        self._workshop, self._store, self._is_first, self._once = workshop, store, is_first, Once()
        self._said: list[str] = []
        self._trainee: Trainee | None = None

    def look(self) -> EnvSpec:
        return self._workshop.look()

    def start(self) -> None:
        self._workshop.start(self._said.append)

    def news(self) -> list[str]:
        """What there was to say since the last call."""
        news = []
        while self._said:
            news.append(self._said.pop(0))
        return news

    def meet(self) -> int:
        return self._workshop.meet()

    def build(self, spec: EnvSpec, meeting: Meeting | None) -> tuple[Mapping[str, Any], bool]:
        """(metadata of the policy, whether there is something to export)."""
        self._trainee = self._workshop.build(spec, meeting)
        self.sender = Sender(self._trainee.learner, is_root=self._is_first, store=self._store)
        return self._trainee.metadata, self._trainee.export is not None

    @property
    def learner(self) -> Learner:
        assert self._trainee is not None, "build comes first"
        return self._trainee.learner

    def update(self, batch: Batch, seed: int, *, key: str) -> tuple[Mapping[str, float], int]:
        """The metrics, and the version after it."""
        return self._once(key, lambda: self._update(batch, seed))

    def _update(self, batch: Batch, seed: int) -> tuple[Mapping[str, float], int]:
        compiled = CompileMeter(self.learner)
        metrics = self.learner.update(batch, seed)
        return {**metrics, **compiled.metrics()}, self.learner.version

    def weights(self, *, averaged: bool) -> Weights:
        return self.learner.weights(averaged=averaged)

    def trained(self, *, averaged: bool) -> Weights:
        return self.learner.trained(averaged=averaged)

    def state(self) -> Weights:
        return self.learner.state()

    def restore(self, state: Weights) -> int:
        """The version that it has now. To do it again changes nothing."""
        self.learner.restore(state)
        return self.learner.version

    def export(self, folder: Path, final: Path) -> None:
        """See ``save_policy``: of the averaged weights. The folder is on a file system that all nodes see."""
        trainee = self._trainee
        assert trainee is not None and trainee.export is not None
        weights = self.learner.weights(averaged=True)
        if self._is_first:
            trainee.policy.load(weights, self.learner.version)
            trainee.export(folder, final)
