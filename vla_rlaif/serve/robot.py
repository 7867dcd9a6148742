"""What the server remembers of one connected robot, and how what several robots see becomes one observation.

Axes: see types.py; W frames of history that the policy sees.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_rlaif.serve.requests import Frame
from vla_rlaif.types import Observation


@dataclass(frozen=True, kw_only=True)
class View:
    """What a robot's next decision depends on."""

    frames: tuple[Frame, ...]  # W, oldest first; where there are fewer, the first of them repeats
    num_repeats: int  # of them, at the front
    seed: int  # of the noise


class Robot:
    """Counts decisions and keeps the newest W - 1 frames. Only what was answered counts: a robot may send again."""

    def __init__(self, *, name: str, seed: int, window: int) -> None:
        digest = hashlib.sha256(name.encode()).digest()
        self._entropy = (seed, int.from_bytes(digest[:8]) if name else 0)
        self._window = window
        self.reset()

    def reset(self) -> None:
        self._decision = 0
        self._frames: deque[Frame] = deque(maxlen=self._window - 1)

    @property
    def decision(self) -> int:
        """How many were answered since the last reset."""
        return self._decision

    def view(self, frame: Frame, seed: int | None = None) -> View:
        """One stream of noise per (server seed, robot's name, decision), unless the robot brings a ``seed``."""
        frames = (*self._frames, frame)
        num_repeats = self._window - len(frames)
        if seed is None:
            seed = int(np.random.SeedSequence((*self._entropy, self._decision)).generate_state(1)[0])
        return View(frames=frames[:1] * num_repeats + frames, num_repeats=num_repeats, seed=seed)

    def answered(self, frame: Frame) -> None:
        self._decision += 1
        self._frames.append(frame)


def observation_of(views: Sequence[View], size: int) -> Observation:
    """The ``views`` as ``size`` rows; the last one fills up, so that only a few batch sizes are ever compiled."""
    rows = [*views, *[views[-1]] * (size - len(views))]
    window, newest = len(rows[0].frames), [row.frames[-1] for row in rows]
    cameras, sentences = newest[0].images, tuple(frame.instruction for frame in newest)
    if window == 1:
        images = {camera: np.stack([frame.images[camera] for frame in newest]) for camera in cameras}
        return Observation(images=images, state=np.stack([f.state for f in newest]), instruction=sentences)
    return Observation(
        images={c: np.stack([np.stack([frame.images[c] for frame in row.frames]) for row in rows]) for c in cameras},
        state=np.stack([np.stack([frame.state for frame in row.frames]) for row in rows]),
        instruction=sentences,
        frame_ok=np.arange(window) >= np.array([row.num_repeats for row in rows])[:, None],
    )
