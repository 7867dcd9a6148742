"""Windows of frames and chunks of actions from one trajectory, as Octo is trained on them.

Axes: T steps of the trajectory, W frames of the window (the last is the present), H actions of a chunk, A action dims.
"""

import numpy as np
from jaxtyping import Bool, Int, Shaped


def history_windows(num_steps: int, window: int) -> tuple[Int[np.ndarray, "T W"], Bool[np.ndarray, "T W"]]:
    """Which step each frame of each window shows, and whether it is real.

    Before the start the first frame is repeated and the mask, upstream's ``timestep_pad_mask``, is False.
    """
    if min(num_steps, window) < 1:
        raise ValueError(f"{num_steps} steps in windows of {window}: both must be positive.")
    steps = np.arange(num_steps)[:, None] + np.arange(1 - window, 1)
    return np.maximum(steps, 0), steps >= 0


def action_chunks(actions: Shaped[np.ndarray, "T A"], window: int, horizon: int) -> Shaped[np.ndarray, "T W H A"]:
    """The ``horizon`` actions from each frame of each window on; the last action is repeated after the end."""
    return actions[np.minimum(_action_steps(len(actions), window, horizon), len(actions) - 1)]


def action_pad_mask(
    num_steps: int,
    window: int,
    horizon: int,
    *,
    goal_step: Int[np.ndarray, " T"] | None = None,
    upstream_offset: bool = False,
) -> Bool[np.ndarray, "T W H"]:
    """True for actions to learn from: they exist, and they come before ``goal_step`` (of each window) is reached.

    Without ``goal_step`` every action that exists counts. With ``upstream_offset`` the numbers are upstream's, which
    subtracts W + 1 where W - 1 is meant and so learns two repeated actions more, and whose default goal is the last
    step. Use it to reproduce an upstream loss; the default is what its comment says it does.
    """
    if upstream_offset:
        goal_step = np.full(num_steps, num_steps - 1) if goal_step is None else goal_step
        t, w, h = np.ogrid[:num_steps, :window, :horizon]
        return t - (window + 1) + w + h < goal_step[:, None, None]
    steps = _action_steps(num_steps, window, horizon)
    return steps < (num_steps if goal_step is None else np.minimum(goal_step, num_steps)[:, None, None])


def _action_steps(num_steps: int, window: int, horizon: int) -> Int[np.ndarray, "T W H"]:
    if horizon < 1:
        raise ValueError(f"chunks of {horizon} actions: wanted at least 1.")
    return history_windows(num_steps, window)[0][:, :, None] + np.arange(horizon)
