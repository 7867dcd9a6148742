"""Demonstrations as clips: what they show is known to succeed.

Axes: E demonstrations, L recorded env steps, N episodes, F frames.
"""

from collections.abc import Sequence

import numpy as np

from vla_rlaif.dataset import Demonstrations
from vla_rlaif.preferences.clips import Encode, make_clips
from vla_rlaif.preferences.data import ClipFrames
from vla_rlaif.types import Episodes, Starts

NUM_CLIPS = 256  # of the demonstrations, so that a large dataset takes neither minutes nor gigabytes


def demonstrated_clips(
    demos: Demonstrations,
    *,
    chunk: int,
    held_out: float,
    instructions: Sequence[str],
    encode: Encode,
    seed: int,
) -> ClipFrames:
    """Of those that succeeded, at most ``NUM_CLIPS``; the share ``held_out`` of them is held out.

    Where the frame after the last action is not recorded, the last one that was acted on counts as the end, one step
    early.
    """
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(demos.success & demos.mask.any(axis=1))
    rows = np.sort(rng.permutation(rows)[:NUM_CLIPS])
    if not len(rows):
        raise ValueError(
            "reward.outcomes names demonstrations, and none of them succeeded: record some that do, or use labeller."
        )
    episodes = as_episodes(demos, rows, chunk=chunk)
    is_held = np.zeros(len(rows), bool)
    is_held[rng.permutation(len(rows))[: round(held_out * len(rows))]] = True
    return make_clips(episodes, np.ones(len(rows)), is_held, instructions, encode, seed)


def as_episodes(demos: Demonstrations, rows: np.ndarray, *, chunk: int) -> Episodes:
    """Frames ``chunk`` env steps apart, as a policy's episodes have them, and the end. Nothing else is in them."""
    length = demos.mask[rows].sum(axis=1)  # recorded steps
    end = np.minimum(length, demos.mask.shape[1] - 1) if demos.is_end_seen else length - 1
    num_decisions = -(-end // chunk)
    num = max(int(num_decisions.max()), 1)
    frame = np.minimum(np.arange(num + 1) * chunk, end[:, None])  # N F
    at = rows[:, None], frame
    mask = np.arange(num) < num_decisions[:, None]
    dims = demos.action.shape[-1]
    index = np.arange(len(rows))
    return Episodes(
        images={name: images[at] for name, images in demos.images.items()},
        state=demos.state[at],
        instruction=tuple(demos.instruction[row] for row in rows),
        action=np.zeros((len(rows), num, chunk, dims), np.float32),
        logp=np.zeros((len(rows), num, 0), np.float32),
        trace={},
        mask=mask,
        executed=np.where(mask, chunk, 0),
        success=np.ones(len(rows), bool),
        truth=np.full(len(rows), np.nan),  # nobody measured it
        valid=np.ones(len(rows), bool),
        starts=Starts(seed=index, group=index, member=np.zeros(len(rows), np.int64)),
        version=0,
    )
