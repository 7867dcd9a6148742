"""Success of a policy on held-out start states, each played exactly once, deterministically."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, UInt8

from vla_rlaif.interfaces import Rollouts
from vla_rlaif.metrics import wilson
from vla_rlaif.rollout import Split, concatenate, held_out_starts, take, take_starts
from vla_rlaif.types import EnvSpec, Episodes, Starts

ATTEMPTS = 3  # at playing what was lost
EVALUATION_SEED = 0  # the same latent noise for every policy and run


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One canonical number with its 95 % Wilson interval, and clips to look at."""

    success: float
    low: float
    high: float
    outcomes: Bool[np.ndarray, " N"]  # in the order of the start states, for paired comparisons
    frames: UInt8[np.ndarray, "K F height width 3"]
    instruction: tuple[str, ...]  # K

    @property
    def episodes(self) -> int:
        return len(self.outcomes)


def evaluate(rollouts: Rollouts, *, split: Split, episodes: int, clips: int = 0) -> Evaluation:
    return measured(play_held_out(rollouts, split=split, episodes=episodes), rollouts.spec, clips=clips)


def play_held_out(rollouts: Rollouts, *, split: Split, episodes: int) -> Episodes:
    """The first ``episodes`` starts of a held-out split, in order, with the same latent noise every time."""
    starts = held_out_starts(split, episodes, rollouts.spec.num_tasks, rollouts.spec.num_starts)
    return play_all(rollouts, starts, seed=EVALUATION_SEED, noise_scale=0.0)


def measured(played: Episodes, spec: EnvSpec, *, clips: int = 0) -> Evaluation:
    """A member whose simulation broke counts as a failure here: the policy was given its one try."""
    outcomes = played.success & played.valid
    low, high = wilson(int(outcomes.sum()), len(outcomes))
    if spec.cameras:
        frames = played.images[spec.cameras[0]][:clips]
    else:  # an env without cameras has nothing to show
        frames = np.empty((0, spec.max_decisions + 1, spec.image_size, spec.image_size, 3), np.uint8)
    return Evaluation(
        success=float(outcomes.mean()),
        low=low,
        high=high,
        outcomes=outcomes,
        frames=frames,
        instruction=played.instruction[: len(frames)],
    )


def play_all(rollouts: Rollouts, starts: Starts, *, seed: int, noise_scale: float = 1.0) -> Episodes:
    """Every start's episode, in order; those whose worker was lost are played again.

    Raises RuntimeError if that does not bring them.
    """
    missing, parts = np.arange(len(starts.seed)), []
    for _ in range(ATTEMPTS):
        played = rollouts.play(take_starts(starts, missing), seed=seed, noise_scale=noise_scale)
        if played.episodes is not None:
            parts.append((missing[np.isin(starts.group[missing], played.episodes.starts.group)], played.episodes))
            missing = np.setdiff1d(missing, parts[-1][0])
        if not len(missing):
            rows, episodes = np.concatenate([rows for rows, _ in parts]), concatenate([e for _, e in parts])
            return episodes if len(parts) == 1 else take(episodes, np.argsort(rows))
    raise RuntimeError(f"{len(missing)} of {len(starts.seed)} episodes were lost with their workers {ATTEMPTS} times.")
