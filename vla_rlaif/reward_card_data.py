"""What a reward card holds, and what it is made of.

Axes: N episodes, M held-out pairs, K clips' ends.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A share with its 95 % Wilson interval; NaN where there is nothing to count."""

    rate: float
    low: float
    high: float
    num: int


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Pairs of about one confidence, each turned to the side that the model favours."""

    low: float
    high: float
    confidence: float  # mean
    accuracy: float  # share of right ones; a tie is half right
    num: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """Of the pairs and episodes with one instruction."""

    instruction: str
    accuracy: Rate
    gap: float  # success minus failure, standard deviations
    episodes: int


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a reward should pass before a policy is trained on it. ``passed`` is None where it could not be measured."""

    name: str
    value: float
    wanted: str
    passed: bool | None
    note: str = ""  # what a measurement would need


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A held-out pair that the model is surest of, and wrong about."""

    first: str  # episode ids
    second: str
    label: float  # probability that the first is better, of the labeller
    p_first: float  # of the model


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a card is made of. Scores are those that the reward gives; NaN is unscorable."""

    ids: Sequence[str]  # N
    instruction: Sequence[str]  # N
    score: Float[np.ndarray, " N"]
    group: Int[np.ndarray, " N"]  # start state
    pairs: Int[np.ndarray, "M 2"]  # held out
    label: Float[np.ndarray, " M"]  # probability that the first is better; never NaN
    p_first: Float[np.ndarray, " M"]  # the model's, calibrated
    truth: Float[np.ndarray, " N"] | None = None  # the simulator's return, if it may be looked at
    success: Float[np.ndarray, " N"] | None = None  # 1 or 0 by the truth or by labels; NaN: not known
    clip_kinds: Sequence[str] = ()  # of the held-out clips' ends, K
    clip_success: Float[np.ndarray, " K"] = field(default_factory=lambda: np.empty(0))  # known
    clip_p: Float[np.ndarray, " K"] = field(default_factory=lambda: np.empty(0))  # the model's probability of success
    clip_source: Int[np.ndarray, " K"] = field(default_factory=lambda: np.empty(0, np.int64))  # start state
    threshold: float = math.nan
    false_positive_rate: float = math.nan  # that was wanted of the threshold


@dataclass(frozen=True, kw_only=True)
class Card:
    about: Mapping[str, str]  # settings of the model
    accuracy: Rate  # of decided held-out pairs
    tau: float  # order of all episodes against ``tau_against``
    tau_against: str
    ece: float  # of the held-out pairs, which the temperature was chosen on
    reliability: tuple[Bin, ...]
    success_failure_gap: float  # standard deviations
    threshold: float
    recall: Rate  # held-out successes above the threshold
    false_positives: Rate  # held-out failures and negatives above the threshold of the other half of start states
    false_positives_note: str  # how they were judged, or what that would need
    by_kind: Mapping[str, Rate]  # by kind of clip: successes above the threshold, negatives above the other half's
    within_group_std: float  # mean over start states of several episodes, standard deviations of all
    tasks: tuple[Task, ...]
    gates: tuple[Gate, ...]
    mistakes: tuple[Mistake, ...]
    num_episodes: int
    num_ties: int  # among the held-out pairs
