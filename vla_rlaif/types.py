"""Data that crosses module boundaries. Everything here is NumPy on the host; backends convert at their own edge.

Axes, the same letters in every file:
N episodes (= parallel environments), T decisions, F = T + 1 frames, H actions in a chunk, A action dims,
P proprioception dims, S stochastic sub-steps per decision (1 for a Gaussian head, the trained denoising steps for
diffusion), B decisions flattened for learning (N * T), M pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

Array = Any  # torch.Tensor, jax.Array or np.ndarray. Only learners and policies know which.
Baseline = Literal["acting", "reference"]  # whose log-probabilities a loss compares with
Weights = Mapping[str, np.ndarray]  # parameters by '/'-joined name: what checkpoints and weight sync carry


def under(prefix: str, weights: Weights) -> dict[str, np.ndarray]:
    """Those whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What a policy must know of an environment before it can be built."""

    cameras: tuple[str, ...]
    image_size: int  # pixels; images are square
    state_dim: int  # P
    action_dim: int  # A, every dim bounded to [-1, 1]
    chunk: int  # H
    max_decisions: int  # T
    instructions: tuple[str, ...]  # every sentence the task can say
    fps: int | None = None  # env steps a second of the robot's time, which datasets are compared by; None: not known
    num_tasks: int = 1  # a start seed modulo this number chooses the task, where an env has several
    num_starts: int = 1  # seed // num_tasks modulo this number chooses the start state, where an env has only so many


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the policy sees before one decision.

    For a policy with ``window`` W > 1 there is a second axis: the frames of the last W decisions, oldest first.
    """

    images: Mapping[str, UInt8[np.ndarray, "N *W height width 3"]]
    state: Float[np.ndarray, "N *W P"]  # env units: metres, radians
    instruction: tuple[str, ...]  # N
    frame_ok: Bool[np.ndarray, "N W"] | None = None  # with a window: False where a frame repeats the episode's first


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the policy did, with enough to score it again later."""

    action: Float[np.ndarray, "N H A"]  # env units, executed open loop
    logp: Float[np.ndarray, "N S"]  # nats, under the weights that acted
    trace: Mapping[str, np.ndarray]  # policy-private leaves "N ...": all that re-scoring needs besides the observation


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What the env answered. ``success`` and ``truth`` are the simulator's: no policy or learned reward reads them."""

    obs: Observation
    done: Bool[np.ndarray, " N"]  # sticky: a finished member ignores actions until reset
    truncated: Bool[np.ndarray, " N"]  # done by the step limit, not by success
    success: Bool[np.ndarray, " N"]  # sticky within an episode
    truth: Float[np.ndarray, " N"]  # ground-truth return so far, in [-1, 2]: progress towards the goal + 1 on success
    executed: Int[np.ndarray, " N"]  # env steps of the last chunk that ran; 0 after reset or when finished
    valid: Bool[np.ndarray, " N"]  # False: the simulation of this member broke (e.g. NaN state)


@dataclass(frozen=True, kw_only=True)
class Starts:
    """Which episodes to play. Equal seeds are the identical start state; (group, member) fixes the action noise."""

    seed: Int[np.ndarray, " N"]  # of the start state
    group: Int[np.ndarray, " N"]
    member: Int[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """N finished episodes, by column. Frame f is seen before decision f; frames after the end repeat the last."""

    images: Mapping[str, UInt8[np.ndarray, "N F height width 3"]]
    state: Float[np.ndarray, "N F P"]
    instruction: tuple[str, ...]  # N
    action: Float[np.ndarray, "N T H A"]
    logp: Float[np.ndarray, "N T S"]  # nats
    trace: Mapping[str, np.ndarray]  # leaves "N T ..."
    mask: Bool[np.ndarray, "N T"]  # the decision was taken while the episode was live
    executed: Int[np.ndarray, "N T"]  # env steps of each chunk that ran
    success: Bool[np.ndarray, " N"]  # measured, never trained on (unless the reward is the success baseline)
    truth: Float[np.ndarray, " N"]  # ground-truth return, for oracle labellers and monitoring only
    valid: Bool[np.ndarray, " N"]
    starts: Starts
    version: int  # of the weights that acted

    @property
    def num_decisions(self) -> Int[np.ndarray, " N"]:
        return self.mask.sum(axis=1)


@dataclass(frozen=True, kw_only=True)
class Played:
    """What became of the starts that were ordered: whole groups in their order, by one weights version."""

    episodes: Episodes | None  # None: every group was lost
    lost_groups: int = 0  # whoever played them died or hung; they are counted and never trained on


@dataclass(frozen=True, kw_only=True)
class SyncResult:
    """What became of one publication of weights."""

    version: int
    ok: bool  # some receiver acts with this version
    stale: tuple[str, ...] = ()  # receivers that do not have it, and get no work until they do
    problems: tuple[str, ...] = ()  # what kept them from it
    num_bytes: int = 0  # sent to each receiver
    gather_s: float = 0.0  # on the learner's side
    transfer_s: float = 0.0  # until every receiver holds all of it, checked
    commit_s: float = 0.0  # in which acting had to wait
    transport: str = "in_process"


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the loss compares log-probabilities with. Leaves live on the learner's device."""

    logp_old: Float[Array, "B S"]  # under the weights of the algorithm's baseline, computed in the learner
    advantage: Float[Array, " B"]
    mask: Bool[Array, " B"]
    num_valid: float | Float[Array, ""]  # what sums are divided by: fixed for the whole step, shared by micro-batches
    importance: Float[Array, "B S"] | None = None  # of stale decisions: logp_old against the weights that acted
    kl_coef: float | Float[Array, ""] | None = None  # in force in this step; None: the algorithm's own


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Decisions for one optimiser phase."""

    obs: Observation  # leaves "B ..."
    trace: Mapping[str, np.ndarray]  # leaves "B ..."
    executed: Int[np.ndarray, " B"]  # env steps of the chunk that ran; the rest of the chunk has no gradient
    advantage: Float[np.ndarray, " B"]
    mask: Bool[np.ndarray, " B"]
    num_valid: float
    logp_acted: Float[np.ndarray, "B S"] | None = None  # of stale decisions, nats, as they were acted
    reference: Float[np.ndarray, "B S D"] | None = None  # means of the reference; None: the learner computes them
    unit: int = 1  # rows that belong together: a minibatch has all of them, in order, or none
    kl_coef: float | None = None  # in force in this step; None: the algorithm's own


@dataclass(frozen=True, kw_only=True)
class Credited:
    """What an algorithm makes of a step's episodes."""

    batch: Batch
    advantage: Float[np.ndarray, " N"]  # of each episode, the mean over its decisions; 0: it is not learned from
    metrics: Mapping[str, float]  # what became of the groups
