"""What a vision-language model is asked: text and images in order, and a few one-token answers to choose from.

Axes: L labels (answers to choose from), K frames of a clip.
"""

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

MIN_MASS = 0.999  # of the probability that must lie on the labels; less says that the answer was not constrained
Image = UInt8[np.ndarray, "height width 3"]


class JudgeFault(RuntimeError):
    """A model cannot be asked any more: its server is gone or another one, or too many answers were invalid."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """One question. Fixed text comes first, so that servers can reuse what they computed for it."""

    parts: tuple[str | Image, ...]
    labels: tuple[str, ...]  # one token each

    def digest(self, identity: str) -> bytes:
        """32 bytes that tell this question to the model ``identity`` from every other: what an answer depends on."""
        found = hashlib.sha256()
        for part in (identity, *self.labels, *self.parts):
            content = part.encode() if isinstance(part, str) else part.tobytes()
            kind = "text" if isinstance(part, str) else f"image {part.shape}"
            found.update(f"{kind} {len(content)}\n".encode())
            found.update(content)
        return found.digest()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Probabilities of the labels, or what was wrong."""

    probabilities: Float[np.ndarray, " L"] | None
    problem: str = ""


@runtime_checkable
class VisionLanguageModel(Protocol):
    """Chooses between labels. Knows nothing of clips, pairs or rewards."""

    @property
    def identity(self) -> str:
        """The model, its revision and all settings that answers depend on."""
        ...

    def probe(self, example: Question) -> None:
        """Ask until it is proven that answers mean what we take them for. ``example`` has as many images as any.

        Raises:
            ValueError: they do not, with what to change.
        """
        ...

    def answer(self, questions: Sequence[Question]) -> Generator[tuple[int, Answer]]:
        """(row, answer), each as soon as it is there; closing it gives up the rest.

        Raises:
            JudgeFault: the model cannot be asked any more.
        """
        ...


def normalised(labels: Sequence[str], probabilities: Sequence[float]) -> Answer:
    """An answer from the probabilities that a model gives to the labels, among all its tokens."""
    values = np.array(probabilities, np.float64)
    mass = float(values.sum())
    if not (MIN_MASS <= mass <= 2 - MIN_MASS):
        said = ", ".join(f"{label}: {value:.4g}" for label, value in zip(labels, values, strict=True))
        return Answer(probabilities=None, problem=f"the labels have probability {mass:.4g} together ({said}), not 1")
    return Answer(probabilities=values / mass)
