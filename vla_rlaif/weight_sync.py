"""Weights from the learner to policies, in one process."""

from vla_rlaif.interfaces import Policy
from vla_rlaif.types import Weights


class LocalSync:
    """The in-process WeightSync: what is sent last is what a policy receives."""

    def __init__(self) -> None:
        self._latest: tuple[Weights, int] | None = None

    def send(self, weights: Weights, version: int) -> None:
        self._latest = weights, version

    def receive(self, policy: Policy) -> None:
        assert self._latest is not None, "receive() before the first send(): the learner has not published any weights"
        policy.load(*self._latest)
