"""What a run carries from step to step, how it goes into a checkpoint and comes back.

    learner/*         parameters, average, reference, optimiser, version
    preferences/*     labels' features, counts and ids; the reward model
    credit/*          what the algorithm learns besides the policy: a critic, a KL coefficient; DPO's pairs
    frozen/*          of a composite reward: its reference batch
    monitor/*         the validations that the monitor compares with
    acting/*          with steps played ahead: the weights of those that the checkpoint leaves to be played again
    state.json        RunState

Randomness has no state: every draw comes from a seed and the numbers of the step, the group, the member.
"""

from dataclasses import dataclass, field

import numpy as np

from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.checkpoint_writer import CheckpointWriter
from vla_rlaif.composite import CompositeReward
from vla_rlaif.gather import Gathered
from vla_rlaif.parts import Acting, Parts
from vla_rlaif.types import Weights, under


@dataclass
class RunState:
    """What the loop carries from step to step, besides the learner and the reward model."""

    step: int = 0
    minutes: float = 0.0
    best_step: int = -1
    best_success: float = -1.0
    dead_steps: int = 0  # consecutive steps without a live group
    shards_read: dict[str, int] = field(default_factory=dict)  # of parts.stored, by worker


@dataclass(frozen=True, kw_only=True)
class Restored:
    state: RunState
    learner: Weights
    acting: Acting | None  # the weights with which the step after the checkpoint was played; None: the learner's
    monitor: Weights
    problems: list[str]


def save(
    writer: CheckpointWriter, parts: Parts, state: RunState, gathered: Gathered, acting: Acting, monitor: Weights
) -> None:
    """After the step of ``gathered``, which was trained on. What is gathered beyond it is played again on resume."""
    tensors = {f"learner/{k}": v for k, v in parts.learner.state().items()}
    tensors |= {f"preferences/{k}": v for k, v in gathered.preferences.items()}
    tensors |= {f"credit/{k}": v for k, v in parts.credit.state().items()}
    tensors |= {f"monitor/{k}": v for k, v in monitor.items()}
    if isinstance(parts.reward, CompositeReward):
        tensors |= {f"frozen/{k}": v for k, v in parts.reward.frozen().items()}
    if acting.trained is not None:
        tensors |= {f"acting/params/{k}": v for k, v in acting.trained.items()}
        tensors |= {"acting/step": np.array(acting.step), "acting/version": np.array(acting.version)}
    state.shards_read = dict(gathered.shards_read)
    writer.save(state.step, {k: v for k, v in vars(state).items() if k != "step"}, tensors)


def restore(checkpoints: RunCheckpoints, parts: Parts) -> Restored:
    """All but the learner, which takes ``learner``."""
    saved, tensors, problems = checkpoints.load_latest()
    if parts.preferences is not None:
        parts.preferences.restore(under("preferences/", tensors))
    parts.credit.restore(under("credit/", tensors))
    if isinstance(parts.reward, CompositeReward):
        parts.reward.thaw(under("frozen/", tensors))
    if parts.stored is not None:
        parts.stored.read = dict(saved["shards_read"])
    acting = None
    if "acting/step" in tensors:
        step, version = int(tensors["acting/step"]), int(tensors["acting/version"])
        acting = Acting(step=step, version=version, trained=under("acting/params/", tensors))
    state = RunState(**{k: saved[k] for k in vars(RunState())})
    return Restored(
        state=state,
        learner=under("learner/", tensors),
        acting=acting,
        monitor=under("monitor/", tensors),
        problems=problems,
    )


def as_before(learner: Weights, acting: Acting) -> Weights:
    """The learner's state with the parameters that act, for publishing them once more."""
    assert acting.trained is not None
    return {**learner, **{f"params/{k}": v for k, v in acting.trained.items()}, "version": np.array(acting.version)}
