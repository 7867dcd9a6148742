"""Where a run takes place, as run.py sees it: in this process, or on the workers of a cluster."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vla_rlaif.interfaces import Rollouts
from vla_rlaif.run_state import RunState
from vla_rlaif.types import Weights


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run's training came to; the policy is in ``run_dir/best``."""

    state: RunState
    num_labels: int


@runtime_checkable
class Stage(Protocol):
    """The start policy is made and acts; ``train`` lets the newest weights act, ``act_with`` the given ones."""

    @property
    def rollouts(self) -> Rollouts: ...

    def train(self, *, resume: bool) -> Trained: ...

    def act_with(self, weights: Weights, version: int) -> None: ...
