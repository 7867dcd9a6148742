"""The seams. Each Protocol is all that one part of the system may know about another."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, UInt32

from vla_rlaif.preferences.data import Answers
from vla_rlaif.types import (
    Array,
    Baseline,
    Batch,
    Credited,
    Decision,
    EnvSpec,
    Episodes,
    Observation,
    Played,
    Starts,
    SyncResult,
    Targets,
    Transition,
    Weights,
)


@runtime_checkable
class VectorEnv(Protocol):
    """N copies of one task, stepped together. No auto-reset, no reward: those belong to the caller."""

    @property
    def num_envs(self) -> int: ...

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        """Start episodes. Equal seeds give bit-identical initial states, which is what makes a group a group."""
        ...

    def step(self, action: Float[np.ndarray, "N H A"]) -> Transition:
        """Execute one chunk open loop; a member that finishes inside it skips the rest. Renders once, at the end."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Policy(Protocol):
    """Acts. Knows nothing of rewards, groups, Ray or optimisers."""

    @property
    def version(self) -> int: ...

    @property
    def window(self) -> int:
        """How many frames ``act`` sees; with 1 observations have no window axis."""
        ...

    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        """Choose a chunk. Row i depends on ``seeds[i]`` only, never on its neighbours; ``noise_scale`` 0 is the
        deterministic mode used for evaluation."""
        ...

    def load(self, weights: Weights, version: int) -> None: ...


@runtime_checkable
class RewardModel(Protocol):
    """Judges whole episodes from pixels, proprioception and the instruction, as a person would."""

    @property
    def version(self) -> int: ...

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        """One number per episode; NaN means unscorable, never 0 as a stand-in."""
        ...


@runtime_checkable
class Labeller(Protocol):
    """Compares two episodes: an oracle, a VLM, a person."""

    @property
    def name(self) -> str:
        """Who labelled, with a version; it is stored with every record."""
        ...

    def label(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Float[np.ndarray, " M"]:
        """Probability that the first of each pair is better: 0.5 is a tie, NaN is a skip."""
        ...


@runtime_checkable
class DetailedLabeller(Protocol):
    """A labeller that can say more than a probability: what it said in both orders, and how often it said nonsense."""

    def answers(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Answers: ...


@runtime_checkable
class OutcomeLabeller(Protocol):
    """A labeller that can also say of single episodes whether they ended in success."""

    def outcomes(self, episodes: Episodes, rows: Int[np.ndarray, " R"], seed: int) -> Float[np.ndarray, " R"]:
        """Probability that each of these rows ended in success; NaN: cannot be said."""
        ...


@runtime_checkable
class FrameReward(Protocol):
    """A reward that can have something to say of single frames: ask only what is among its ``heads``."""

    @property
    def heads(self) -> tuple[str, ...]: ...

    def progress(self, episodes: Episodes) -> Float[np.ndarray, "N F"]:
        """How far the task is, in [0, 1]; NaN after the end and in invalid episodes."""
        ...


@runtime_checkable
class Encoder(Protocol):
    """Frozen features of single frames, on which reward heads are trained."""

    @property
    def dim(self) -> int: ...

    def encode(self, obs: Observation) -> Float[np.ndarray, "N D"]: ...


@runtime_checkable
class Algorithm(Protocol):
    """The half of an algorithm that a learner sees. ``loss`` is pure and array-API only, so it runs under torch
    autograd and jax.grad alike."""

    baseline: ClassVar[Baseline]  # whose log-probabilities Targets.logp_old are

    def loss(
        self, logp: Float[Array, "B S"], targets: Targets, kl: Float[Array, "B S"] | None = None
    ) -> tuple[Float[Array, ""], Mapping[str, Float[Array, ""]]]: ...


@runtime_checkable
class Credit(Protocol):
    """The half of an algorithm that sees episodes: which of them are learned from, and how much each decision is worth.
    It owns what it learns for that, such as a critic."""

    def assign(
        self, episodes: Episodes, reward: Float[np.ndarray, " N"], *, step: int, window: int, is_stale: bool
    ) -> Credited:
        """Asked after every round, with all episodes of the step so far; the last answer is trained on. NaN is an
        episode without a reward. ``window`` is the policy's, ``is_stale`` says that older weights acted."""
        ...

    def learned(self, metrics: Mapping[str, float], step: int) -> Mapping[str, float]:
        """The learner has taken the batch of ``step`` and measured ``metrics``: learn, and say what was measured."""
        ...

    def state(self) -> Weights:
        """Everything that a bit-equal continuation needs, by name; ``restore`` takes it back."""
        ...

    def restore(self, state: Weights) -> None: ...


@runtime_checkable
class Learner(Protocol):
    """Owns the trainable copy and the optimiser state; the only place that knows its backend."""

    @property
    def version(self) -> int: ...

    def update(self, batch: Batch, seed: int) -> Mapping[str, float]:
        """All epochs and minibatches of one step; ``seed`` shuffles them."""
        ...

    def weights(self, *, averaged: bool = False) -> Weights:
        """The newest weights, or their running average (the ones to evaluate)."""
        ...

    def trained(self, *, averaged: bool) -> Weights:
        """The part of ``weights`` that training changes; copies."""
        ...

    def state(self) -> Weights:
        """Everything that a bit-equal continuation needs, by name; ``restore`` takes it back."""
        ...

    def restore(self, state: Weights) -> None: ...


@runtime_checkable
class WeightSync(Protocol):
    """Moves weights from the learner to those who act. Never called while they play."""

    def publish(self, *, averaged: bool = False) -> SyncResult:
        """The newest weights, or their running average: what is played from now on has this version. Whoever did not
        get them plays nothing until it has. Raises RuntimeError if nobody got them."""
        ...


@runtime_checkable
class Rollouts(Protocol):
    """Plays episodes with the weights that were published last. Knows policies and envs, and nothing of rewards."""

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def num_envs(self) -> int:
        """Of all workers together."""
        ...

    @property
    def window(self) -> int:
        """The policy's."""
        ...

    def play(self, starts: Starts, *, seed: int, noise_scale: float = 1.0) -> Played:
        """One episode per start; ``noise_scale`` 0 acts deterministically."""
        ...


@runtime_checkable
class ReferenceModel(Protocol):
    """The frozen start policy, where its means are not computed by the learner."""

    def means(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, "B S D"]: ...
