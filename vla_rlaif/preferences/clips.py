"""Clips whose outcome is known, and the negatives that are made of those that succeeded.

A clip that succeeded says how far its task was in every frame, by the time to its end. From it are made a clip that is
rewound, one that is cut at random, one that is cut just before success (a near miss), and the same clip under another
of the env's instructions. Each ends without success, and a reward that scores them high can be fooled.

Axes: N episodes, F frames, K frames of a clip, D features, R frames of all clips.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.preferences.data import ClipFrames, EpisodeFeatures
from vla_rlaif.rollout import take
from vla_rlaif.types import Episodes

KINDS = ("succeeded", "failed", "rewound", "cut", "near miss", "other instruction")
Encode = Callable[[Episodes], EpisodeFeatures]


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Frames of one clip, in order."""

    kind: str
    values: Float[np.ndarray, "K D"]
    progress: Float[np.ndarray, " K"]  # NaN: not known
    success: Float[np.ndarray, " K"]  # probability


def make_clips(
    episodes: Episodes,
    outcome: Float[np.ndarray, " N"],
    held_out: Bool[np.ndarray, " N"],
    instructions: Sequence[str],
    encode: Encode,
    seed: int,
) -> ClipFrames:
    """``outcome`` is the probability that an episode ended in success, NaN if nobody said; ``encode`` gives features of
    all live frames. A negative is on the side, trained on or held out, of the clip that it is made of."""
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(~np.isnan(outcome) & episodes.valid)
    known, outcome, held_out = take(episodes, rows), outcome[rows], held_out[rows]
    features = encode(known)
    clips: list[tuple[Clip, int]] = []  # with the row of the episode
    for row in range(len(rows)):
        clip = _as_played(features.values[row][features.live[row]], float(outcome[row]))
        clips += [(one, row) for one in (clip, *_negatives(clip, rng))]
    won = np.flatnonzero(outcome > 0.5)
    for row, clip in zip(won.tolist(), _under_others(take(known, won), instructions, encode, rng), strict=True):
        if clip is not None:
            clips.append((clip, row))
    start = np.unique(known.starts.group, return_inverse=True)[1]
    return _flat(clips, held_out, start, features.values.shape[2])


def join_clips(parts: Sequence[ClipFrames]) -> ClipFrames:
    """Clips and start states are numbered on."""
    clips = np.cumsum([0, *(part.clip.max(initial=-1) + 1 for part in parts)])
    starts = np.cumsum([0, *(part.source.max(initial=-1) + 1 for part in parts)])
    moved = [
        replace(part, clip=part.clip + clip, source=part.source + start)
        for part, clip, start in zip(parts, clips, starts, strict=False)
    ]
    return ClipFrames(**{name: np.concatenate([vars(part)[name] for part in moved]) for name in vars(parts[0])})


def ends(clips: ClipFrames, kind: str | None = None) -> Int[np.ndarray, " C"]:
    """Rows of the last frames of held-out clips, all or those of one kind."""
    chosen = clips.is_end & clips.held_out
    return np.flatnonzero(chosen if kind is None else chosen & (clips.kind == KINDS.index(kind)))


def _as_played(values: Float[np.ndarray, "K D"], outcome: float) -> Clip:
    """An episode ends with its success, so no frame before the last one shows it."""
    num = len(values)
    won = outcome > 0.5
    progress = np.linspace(0, 1, num) if won and num > 1 else np.full(num, 1.0 if won else np.nan)
    success = np.where(np.arange(num) == num - 1, outcome, 0.0)
    return Clip(kind="succeeded" if won else "failed", values=values, progress=progress, success=success)


def _negatives(clip: Clip, rng: np.random.Generator) -> list[Clip]:
    num = len(clip.values)
    if clip.kind != "succeeded" or num < 3:
        return []
    turn = int(rng.integers(1, num - 1))  # the last frame that is played before it runs backwards
    back = np.concatenate([np.arange(turn + 1), np.arange(turn - 1, -1, -1)])
    return [
        _part(clip, back, "rewound"),
        _part(clip, np.arange(int(rng.integers(1, num - 1)) + 1), "cut"),
        _part(clip, np.arange(num - 1), "near miss"),
    ]


def _part(clip: Clip, frames: Int[np.ndarray, " K"], kind: str) -> Clip:
    return Clip(kind=kind, values=clip.values[frames], progress=clip.progress[frames], success=np.zeros(len(frames)))


def _under_others(
    episodes: Episodes, instructions: Sequence[str], encode: Encode, rng: np.random.Generator
) -> list[Clip | None]:
    """Each episode as if another of the instructions had been given; None where there is no other."""
    others = [[text for text in instructions if text != said] for said in episodes.instruction]
    if not others or not all(others):
        return [None] * len(others)
    changed = replace(episodes, instruction=tuple(choice[int(rng.integers(len(choice)))] for choice in others))
    features = encode(changed)
    clips: list[Clip | None] = []
    for row in range(len(others)):
        values = features.values[row][features.live[row]]
        nothing = np.zeros(len(values))
        clips.append(Clip(kind="other instruction", values=values, progress=nothing, success=nothing))
    return clips


def _flat(
    clips: Sequence[tuple[Clip, int]], held_out: Bool[np.ndarray, " N"], start: Int[np.ndarray, " N"], dim: int
) -> ClipFrames:
    lengths = [len(clip.values) for clip, _ in clips]
    number = np.repeat(np.arange(len(clips)), lengths)
    row = np.repeat(np.array([row for _, row in clips], np.int64), lengths)
    last = np.cumsum(lengths) - 1
    is_end = np.zeros(len(number), bool)
    is_end[last.astype(int)] = True
    empty = np.empty(0)
    return ClipFrames(
        values=np.concatenate([np.empty((0, dim), np.float32), *(clip.values for clip, _ in clips)]),
        progress=np.concatenate([empty, *(clip.progress for clip, _ in clips)]),
        success=np.concatenate([empty, *(clip.success for clip, _ in clips)]),
        clip=number,
        source=start[row],
        kind=np.repeat(np.array([KINDS.index(clip.kind) for clip, _ in clips], np.int64), lengths),
        is_end=is_end,
        held_out=held_out[row],
    )
