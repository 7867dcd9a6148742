"""Asking a policy for a fixed number of rows at a time, so that its answers do not depend on how many there are.

Axes as in types.py: N rows.
"""

import numpy as np
from jaxtyping import UInt32

from vla_rlaif.interfaces import Policy
from vla_rlaif.types import Decision, Observation


def decide(
    policy: Policy,
    obs: Observation,
    seeds: UInt32[np.ndarray, " N"],
    *,
    noise_scale: float,
    act_batch: int | None,
) -> Decision:
    """The policy's decision, asked ``act_batch`` rows at a time."""
    if act_batch is None:
        return policy.act(obs, seeds, noise_scale=noise_scale)
    parts = []
    for first in range(0, len(seeds), act_batch):
        rows = slice(first, first + act_batch)
        parts.append(policy.act(_rows_of(obs, rows), seeds[rows], noise_scale=noise_scale))
    if len(parts) == 1:
        return parts[0]
    return Decision(
        action=np.concatenate([p.action for p in parts]),
        logp=np.concatenate([p.logp for p in parts]),
        trace={k: np.concatenate([p.trace[k] for p in parts]) for k in parts[0].trace},
    )


def _rows_of(obs: Observation, rows: slice) -> Observation:
    return Observation(
        images={camera: image[rows] for camera, image in obs.images.items()},
        state=obs.state[rows],
        instruction=obs.instruction[rows],
        frame_ok=None if obs.frame_ok is None else obs.frame_ok[rows],
    )
