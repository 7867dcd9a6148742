"""The learner of another process, or of several: a Learner to the loop.

Axes: see types.py.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from vla_rlaif.dist.answers import Answer, WorkerError, WorkerFailure, WorkerLost, answers, outcomes
from vla_rlaif.dist.cluster import WorkerGroup
from vla_rlaif.dist.learner_worker import LearnerWorker
from vla_rlaif.types import Batch, Weights

GRACE_S = 3.0  # until a death is known that made the other ranks fail


class RemoteLearner:
    """All ranks are asked the same, and the first one's answer counts. It knows no backend.

    A rank that dies or is late takes the others with it: what it held of the weights is gone. The run then goes on
    from a checkpoint, with new workers.
    """

    def __init__(self, group: WorkerGroup[LearnerWorker], *, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._version, self._num_updates = 0, 0

    @property
    def version(self) -> int:
        return self._version

    def update(self, batch: Batch, seed: int) -> Mapping[str, float]:
        self._num_updates += 1
        work = partial(LearnerWorker.update, batch=batch, seed=seed, key=f"update {self._num_updates}")
        metrics, self._version = self._ask(work, "an update")
        return metrics

    def weights(self, *, averaged: bool = False) -> Weights:
        return self._ask(partial(LearnerWorker.weights, averaged=averaged), "collecting the weights")

    def trained(self, *, averaged: bool) -> Weights:
        return self._ask(partial(LearnerWorker.trained, averaged=averaged), "collecting the trained weights")

    def state(self) -> Weights:
        return self._ask(LearnerWorker.state, "collecting its state")

    def restore(self, state: Weights) -> None:
        self._version = self._ask(partial(LearnerWorker.restore, state=state), "taking a checkpoint")

    def export(self, folder: Path, final: Path) -> None:
        self._ask(partial(LearnerWorker.export, folder=folder, final=final), "writing its policy for others")

    def _ask[T](self, work: Callable[[LearnerWorker], T], doing: str) -> T:
        return all_ranks(self._group.all(work), self._timeout_s, doing)[0]


def all_ranks[T](asked: list[Answer[T]], timeout_s: float, doing: str) -> list[T]:
    """The answers of all ranks.

    Raises:
        WorkerLost, WorkerLate: a rank died or was late. When the others fail because of it, it is still that.
        WorkerError: a rank raised.
    """
    try:
        return answers(asked, timeout_s, doing)
    except WorkerError as error:
        others = outcomes(asked, GRACE_S, doing) if len(asked) > 1 else []
        deaths = [one for one in others if isinstance(one, WorkerLost)]
        raise deaths[0] if deaths else error from None


def is_of_learner(failure: WorkerFailure) -> bool:
    """Whether the learner died or is late: then the run goes on from a checkpoint."""
    return not isinstance(failure, WorkerError) and failure.worker.partition("/")[0] == "learner"
