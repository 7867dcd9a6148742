"""What a run knows of outcomes: clips of its demonstrations, and episodes that the labeller was asked about one by one.

Axes: N episodes, R rows of them.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from vla_rlaif.interfaces import Labeller, OutcomeLabeller
from vla_rlaif.preferences.clips import Encode, join_clips, make_clips
from vla_rlaif.preferences.data import ClipFrames
from vla_rlaif.preferences.outcome_store import Outcome, OutcomeStore
from vla_rlaif.types import Episodes, Weights


class ClipBook:
    """Grows with every refresh. ``demonstrated`` is made when it is first needed, and again after a resume."""

    def __init__(
        self,
        *,
        instructions: Sequence[str],
        encode: Encode,
        demonstrated: Callable[[], ClipFrames] | None,
        labelled_share: float,
        store: OutcomeStore | None,
    ) -> None:
        self._instructions, self._encode = instructions, encode
        self._make_demonstrated, self._demonstrated = demonstrated, None
        self._share, self._store = labelled_share, store
        self._labelled: ClipFrames | None = None

    def num_asked(self, num_labels: int) -> int:
        """How many of so many labels are outcomes."""
        return round(self._share * num_labels) if self._store is not None else 0

    def ask(
        self,
        labeller: Labeller,
        episodes: Episodes,
        ids: Sequence[str],
        rows: Int[np.ndarray, " R"],
        held_out: Bool[np.ndarray, " R"],
        *,
        seed: int,
        step: int,
    ) -> int:
        """Ask about these rows, keep the answers and the clips; returns how many were asked."""
        if self._store is None or not len(rows):
            return 0
        p = answers_of(labeller, episodes, rows, seed)
        self._store.append(outcome_records(episodes, ids, rows, p, labeller=labeller.name, step=step))
        outcome, held = np.full(len(episodes.valid), np.nan), np.zeros(len(episodes.valid), bool)
        outcome[rows], held[rows] = p, held_out
        new = make_clips(episodes, outcome, held, self._instructions, self._encode, seed)
        self._labelled = new if self._labelled is None else join_clips([self._labelled, new])
        return len(rows)

    def clips(self) -> ClipFrames | None:
        if self._make_demonstrated is not None and self._demonstrated is None:
            self._demonstrated = self._make_demonstrated()
        known = [part for part in (self._demonstrated, self._labelled) if part is not None]
        return join_clips(known) if known else None

    def state(self) -> Weights:
        return {} if self._labelled is None else dict(vars(self._labelled))

    def restore(self, state: Weights) -> None:
        self._labelled = ClipFrames(**state) if state else None


def says_outcomes(labeller: Labeller) -> OutcomeLabeller:
    """The labeller itself.

    Raises:
        ValueError: it only compares.
    """
    if not isinstance(labeller, OutcomeLabeller):
        raise ValueError(
            f"The labeller {labeller.name!r} compares episodes and cannot say whether one has succeeded. Use "
            "reward.outcomes: [demonstrations], or a labeller of type oracle, or vlm in mode rubric."
        )
    return labeller


def answers_of(labeller: Labeller, episodes: Episodes, rows: Int[np.ndarray, " R"], seed: int) -> np.ndarray:
    """Probabilities of success, checked."""
    p = np.asarray(says_outcomes(labeller).outcomes(episodes, rows, seed), np.float64)
    if p.shape != rows.shape or not (np.isnan(p) | ((p >= 0) & (p <= 1))).all():
        raise ValueError(
            f"The labeller {labeller.name!r} must give {len(rows)} probabilities in [0, 1] or NaN, got shape {p.shape} "
            f"and values {np.unique(p)[:5]}."
        )
    return p


def outcome_records(
    episodes: Episodes, ids: Sequence[str], rows: Int[np.ndarray, " R"], p: np.ndarray, *, labeller: str, step: int
) -> list[Outcome]:
    now = time.time()
    return [
        Outcome(
            episode=ids[int(row)],
            instruction=episodes.instruction[int(row)],
            p_success=None if np.isnan(value) else float(value),
            labeller=labeller,
            step=step,
            time=now,
        )
        for row, value in zip(rows, p, strict=True)
    ]
