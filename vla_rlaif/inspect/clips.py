"""The test clips of a run as a source: the same start states before and after training, as its report shows them.

Axes as in source.py; K start states.
"""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from vla_rlaif.inspect.source import Frames, Numbers, Sizes, say_ids
from vla_rlaif.inspect.table import EpisodeTable, bare_table, empty_table, joined
from vla_rlaif.local_page.sheets import encode_sheet
from vla_rlaif.report_data import Clips, read_clips

SIDES = ("before", "after")
CAMERA = "clip"


class ClipsSource:
    """A Source over ``clips.npz``, which a run writes at its end. A start state is a group of two: before, after."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self._mark: tuple[int, int] | None = None
        self._clips: Clips | None = None
        self._table = empty_table()

    @property
    def table(self) -> EpisodeTable:
        with self._lock:
            mark = (self.path.stat().st_mtime_ns, self.path.stat().st_size) if self.path.exists() else None
            if mark != self._mark:
                self._mark, self._clips = mark, read_clips(self.path)
                self._table = _table(self._clips)
            return self._table

    def sizes(self, name: str) -> Sizes:
        frames = self._frames(name)
        return {CAMERA: (frames.shape[1], frames.shape[2])}

    def numbers(self, name: str) -> Numbers:
        num = len(self._frames(name))
        return Numbers(
            state=np.zeros((num, 0)),
            action=np.zeros((num - 1, 0, 0)),
            logp=np.zeros((num - 1, 0)),
            executed=np.zeros(num - 1, np.int64),
            progress=None,
        )

    def sheet(self, name: str, camera: str) -> bytes:
        if camera != CAMERA:
            raise ValueError(f"{self.path} has no camera {camera!r}; it has {CAMERA}.")
        return encode_sheet(self._frames(name))

    def frames(self, name: str) -> Frames:
        return {CAMERA: self._frames(name)}

    def _frames(self, name: str) -> np.ndarray:
        table = self.table
        if name not in table.id or self._clips is None:
            raise ValueError(f"{self.path} has no episode {name!r}; it has {say_ids(table)}.")
        side, _, number = name.partition(":")
        return (self._clips.before if side == "before" else self._clips.after)[int(number)]


def _table(clips: Clips | None) -> EpisodeTable:
    if clips is None:
        return empty_table()
    num, sides = len(clips.before), []
    for member, (side, success) in enumerate(zip(SIDES, (clips.before_success, clips.after_success), strict=True)):
        sides.append(
            replace(
                bare_table(num, origin=side),
                id=tuple(f"{side}:{k}" for k in range(num)),
                instruction=clips.instruction,
                step=np.full(num, -1),
                member=np.full(num, member),
                success=success.astype(np.float64),
                decisions=np.full(num, clips.before.shape[1] - 1),
            )
        )
    return joined(sides)
