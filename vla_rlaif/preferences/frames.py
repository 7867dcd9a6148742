"""The frames of an episode that a judge is shown: chosen here, so that no server chooses others.

Axes: see types.py; K frames shown.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8

from vla_rlaif.types import Episodes


def frame_indices(num_live: int, num: int) -> Int[np.ndarray, " K"]:
    """``num`` of ``num_live`` frames, evenly spaced, the first and the last included; all if there are no more than
    that. With ``num`` 1 it is the last."""
    if num == 1:
        return np.array([num_live - 1])
    return np.unique(np.linspace(0, num_live - 1, min(num, num_live)).round().astype(np.int64))


def clip(
    episodes: Episodes, row: int, num: int, cameras: Sequence[str] = ()
) -> tuple[UInt8[np.ndarray, "height width 3"], ...]:
    """What the cameras saw while the episode was live, side by side in each frame; by default the env's first camera.

    Raises:
        ValueError: there is no such camera.
    """
    names = cameras or list(episodes.images)[:1]
    unknown = [name for name in names if name not in episodes.images]
    if unknown:
        raise ValueError(f"No camera {unknown[0]!r} among {sorted(episodes.images)}: name one of them.")
    indices = frame_indices(int(episodes.num_decisions[row]) + 1, num)
    return tuple(np.concatenate([episodes.images[name][row, i] for name in names], axis=1) for i in indices)
