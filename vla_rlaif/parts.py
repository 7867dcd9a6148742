"""What a run is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rlaif.audit_labels import Auditor
from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.interfaces import Credit, Learner, ReferenceModel, RewardModel, Rollouts, WeightSync
from vla_rlaif.preferences.refresh import PreferenceLearner
from vla_rlaif.types import Weights


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All that a run is made of; build.py chooses the classes."""

    rollouts: Rollouts
    learner: Learner
    sync: WeightSync
    reward: RewardModel
    credit: Credit
    preferences: PreferenceLearner | None  # None: the reward is not learned from labels
    metadata: Mapping[str, Any]  # of the policy, for its checkpoints
    export: Callable[[Path, Path], None] | None = None  # writes the policy once more into its checkpoints, for LeRobot
    stored: EpisodeStore | None = None  # groups that others have played, taken before any is played here
    reference: ReferenceModel | None = None  # None: the learner computes the reference's means
    auditor: Auditor | None = None  # says what is wanted, where the simulator does not (monitor.gold: labels)


@dataclass(frozen=True, kw_only=True)
class Acting:
    """The weights that are played with."""

    step: int  # the one before whose update they were published: as many updates have made them
    version: int
    trained: Weights | None  # the part that training changes, if a checkpoint will need it
