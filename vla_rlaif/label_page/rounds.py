"""One call of a labeller as something that the page can show: the pairs, their clips, and the labels from answers.

Axes: M pairs, N episodes, T decisions, F frames.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.label_page.catalogue import Frames, Shown
from vla_rlaif.label_page.queue import Pair
from vla_rlaif.types import Episodes


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What people said of a pair."""

    first: str  # id of the episode that p_first is about
    p_first: float  # NaN: skipped


class Round:
    """The pairs of one call, with episodes by what they show. A catalogue of their clips.

    ``pairs`` are those that people must be asked: of two valid episodes that look different, each once.
    """

    def __init__(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], cameras: Sequence[str]) -> None:
        unknown = sorted(set(cameras) - set(episodes.images))
        if unknown:
            raise ValueError(f"reward.labeller.cameras names {unknown[0]!r}; the env has {', '.join(episodes.images)}.")
        self._images = {name: episodes.images[name] for name in cameras or episodes.images}
        self._num_frames = episodes.num_decisions + 1
        self._instruction, self.segment = episodes.instruction, (0, episodes.mask.shape[1])
        usable = np.asarray(episodes.valid[pairs].all(axis=1))
        names = {row: self._name(row) for row in np.unique(pairs[usable]).tolist()}
        self._row = {name: row for row, name in names.items()}
        self._sides = [
            (names[a], names[b]) if ok else None for (a, b), ok in zip(pairs.tolist(), usable.tolist(), strict=True)
        ]
        asked = [Pair(first=sides[0], second=sides[1]) for sides in self._sides if sides and sides[0] != sides[1]]
        self.pairs = list({pair.key: pair for pair in asked[::-1]}.values())[::-1]

    def shown(self, name: str) -> Shown | None:
        if name not in self._row:
            return None
        row = self._row[name]
        sizes = {camera: (images.shape[2], images.shape[3]) for camera, images in self._images.items()}
        return Shown(instruction=self._instruction[row], num_frames=int(self._num_frames[row]), sizes=sizes)

    def frames(self, names: Sequence[str]) -> dict[str, Frames]:
        return {name: self._frames(self._row[name]) for name in names}

    def instruction(self, name: str) -> str:
        return self._instruction[self._row[name]]

    def labels(self, answers: Mapping[frozenset[str], Verdict]) -> Float[np.ndarray, " M"]:
        """In the order of the pairs; a pair without an answer is a skip."""
        return np.array([self._label(sides, answers) for sides in self._sides], np.float64)

    def _label(self, sides: tuple[str, str] | None, answers: Mapping[frozenset[str], Verdict]) -> float:
        if sides is None:
            return float("nan")
        if sides[0] == sides[1]:
            return 0.5
        verdict = answers.get(frozenset(sides))
        if verdict is None:
            return float("nan")
        return verdict.p_first if verdict.first == sides[0] else 1 - verdict.p_first

    def _frames(self, row: int) -> dict[str, np.ndarray]:
        return {camera: images[row, : self._num_frames[row]] for camera, images in self._images.items()}

    def _name(self, row: int) -> str:
        digest = hashlib.sha256(self._instruction[row].encode())
        for camera, frames in self._frames(row).items():
            digest.update(f"\n{camera} {frames.shape}\n".encode())
            digest.update(np.ascontiguousarray(frames).tobytes())
        return digest.hexdigest()[:32]
