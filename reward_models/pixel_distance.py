"""The smallest reward that reads pixels: minus the distance between the red and the green dot. For tests."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float, UInt8

from vla_rlaif.types import Episodes


@dataclass(frozen=True, kw_only=True)
class PixelDistance:
    """Minus the distance in pixels between the reddest and the greenest pixel of the last frame."""

    camera: str = "top"
    privileged: ClassVar[bool] = False

    @property
    def version(self) -> int:
        return 0

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        if self.camera not in episodes.images:
            raise ValueError(f"No camera {self.camera!r} among {sorted(episodes.images)}: name one of them.")
        frames = episodes.images[self.camera][:, -1]
        gap = np.linalg.norm(_brightest(frames, 0) - _brightest(frames, 1), axis=1).astype(np.float32)
        return np.where(episodes.valid, -gap, np.float32(np.nan))


def _brightest(frames: UInt8[np.ndarray, "N height width 3"], channel: int) -> Float[np.ndarray, "N 2"]:
    """Row and column in pixels of the brightest pixel of a channel."""
    index = frames[..., channel].reshape(len(frames), -1).argmax(axis=1)
    return np.stack(np.unravel_index(index, frames.shape[1:3]), axis=1).astype(np.float64)
