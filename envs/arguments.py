"""What every vector env of ours asks of its callers. N members, H actions a chunk."""

import numpy as np
from jaxtyping import Bool, Float, Int


def check_seeds(seeds: Int[np.ndarray, " *n"], num_envs: int) -> None:
    """Raises ValueError unless there is one for each member, and none is negative."""
    if len(seeds) != num_envs:
        raise ValueError(f"{len(seeds)} seeds for {num_envs} members; give one each.")
    if np.any(seeds < 0):
        raise ValueError(f"Seeds must not be negative; the smallest is {np.min(seeds)}.")


def check_chunk(action: Float[np.ndarray, "*any"], done: Bool[np.ndarray, " N"], action_dim: int) -> None:
    """Raises ValueError unless it is a chunk for all members, finite for those that are not ``done``."""
    shape, num_envs = np.shape(action), len(done)
    if not (len(shape) == 3 and (shape[0], shape[2]) == (num_envs, action_dim) and shape[1] >= 1):
        raise ValueError(f"The action has shape {shape}; wanted ({num_envs}, H >= 1, {action_dim}).")
    bad = np.flatnonzero(~np.isfinite(action).all(axis=(1, 2)) & ~done)
    if len(bad):
        raise ValueError(f"The actions of live members {bad.tolist()} are not finite.")
