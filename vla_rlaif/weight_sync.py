"""Weights from the learner to the policy that acts, in one process."""

import time

from vla_rlaif.interfaces import Learner, Policy
from vla_rlaif.types import SyncResult


class LocalSync:
    """The in-process WeightSync."""

    def __init__(self, learner: Learner, policy: Policy) -> None:
        self._learner, self._policy = learner, policy

    def publish(self, *, averaged: bool = False) -> SyncResult:
        version, begun = self._learner.version, time.perf_counter()
        weights = self._learner.weights(averaged=averaged)
        gathered = time.perf_counter()
        self._policy.load(weights, version)
        return SyncResult(
            version=version,
            ok=True,
            num_bytes=sum(value.nbytes for value in weights.values()),
            gather_s=gathered - begun,
            commit_s=time.perf_counter() - gathered,
        )
