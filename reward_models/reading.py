"""From episodes to features, and from features to what an ensemble says of them: a part at a time, in bounded memory.

Axes: E members, N episodes, F frames of an episode, K frames read, B rows of a part, D features.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vla_rlaif.interfaces import Encoder
from vla_rlaif.preferences.data import EpisodeFeatures
from vla_rlaif.reward_models.bradley_terry import to_numpy
from vla_rlaif.reward_models.networks import Network
from vla_rlaif.rollout import frames_at
from vla_rlaif.types import Episodes

ROWS_PER_CALL = 256  # frames that an encoder sees at once, episodes that the heads see at once
Read = Callable[[Network, Tensor, Tensor], Tensor]  # network, features E B K D, live E B K


def episode_features(encoder: Encoder, episodes: Episodes, *, only_last: bool, first_frame: bool) -> EpisodeFeatures:
    """Of every live frame, or ``only_last``; with ``first_frame`` each beside its change since the first frame.

    The change, and not the first frame itself: each feature is standardised on its own and gets its own noise in a fit,
    and the difference of two noisy places that are nearly equal would drown in it.
    """
    num, num_frames = episodes.state.shape[:2]
    frame = np.arange(num_frames)
    if only_last:  # frames after the end repeat the last live one
        live = np.zeros((num, num_frames), bool)
        live[:, -1] = True
    else:
        live = frame <= episodes.num_decisions[:, None]
    live &= episodes.valid[:, None]
    seen = live | (episodes.valid[:, None] & (frame == 0)) if first_frame else live
    row, column = np.nonzero(seen)
    e = episodes
    encoded = [
        encoder.encode(frames_at(e.images, e.state, e.instruction, row[start:stop], column[start:stop], 1))
        for start, stop in _parts(len(row))
    ]
    values = np.zeros((num, num_frames, encoder.dim), np.float32)
    values[row, column] = np.concatenate([np.empty((0, encoder.dim), np.float32), *encoded])
    if first_frame:
        values = np.concatenate([values, values - values[:, :1]], axis=2)
        values[~live] = 0
    first = num_frames - 1 if only_last else 0
    return EpisodeFeatures(values=values[:, first:], live=live[:, first:])


def last_frames(features: EpisodeFeatures) -> EpisodeFeatures:
    """The last live frame of each episode, which is not live either where the episode has none."""
    if features.live.shape[1] == 1:
        return features
    last = np.maximum(features.live.sum(axis=1) - 1, 0)
    row = np.arange(len(last))
    return EpisodeFeatures(values=features.values[row, last][:, None], live=features.live[row, last][:, None])


def read_in_parts(
    network: Network, x: Float[np.ndarray, "N K D"], live: Bool[np.ndarray, "N K"], read: Read
) -> Float[np.ndarray, "E N *K"]:
    """What ``read`` makes of all episodes."""
    num = network.num_members
    values, mask = torch.from_numpy(x), torch.from_numpy(live)
    return np.concatenate(
        [
            to_numpy(read(network, values[a:b].expand(num, -1, -1, -1), mask[a:b].expand(num, -1, -1)))
            for a, b in _parts(len(x)) or [(0, 0)]
        ],
        axis=1,
    )


def _parts(num: int) -> list[tuple[int, int]]:
    return [(start, min(start + ROWS_PER_CALL, num)) for start in range(0, num, ROWS_PER_CALL)]
