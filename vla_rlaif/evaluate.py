"""Success of a policy on held-out start states, each played exactly once, deterministically."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, UInt8

from vla_rlaif.interfaces import Policy, VectorEnv
from vla_rlaif.metrics import wilson
from vla_rlaif.rollout import Split, held_out_starts, rollout

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


def evaluate(policy: Policy, env: VectorEnv, *, split: Split, episodes: int, clips: int = 0) -> Evaluation:
    """A member whose simulation broke counts as a failure here: the policy was given its one try."""
    starts = held_out_starts(split, episodes, env.spec.num_tasks)
    played = rollout(policy, env, starts, seed=EVALUATION_SEED, noise_scale=0.0)
    outcomes = played.success & played.valid
    low, high = wilson(int(outcomes.sum()), episodes)
    camera = env.spec.cameras[0]
    return Evaluation(
        success=float(outcomes.mean()),
        low=low,
        high=high,
        outcomes=outcomes,
        frames=played.images[camera][:clips],
        instruction=played.instruction[:clips],
    )
