"""A scripted expert: a stateless function of the simulator state, so it can take over after any restore.

All N members at once; metres, radians. Actions are those of ``Physics.advance``.
"""

import numpy as np
from jaxtyping import Float

from vla_rlaif.envs.tabletop import rotations
from vla_rlaif.envs.tabletop.tasks import Positions

_OPEN, _CLOSED = -1.0, 1.0
Goals = tuple[Float[np.ndarray, "N 3"], Float[np.ndarray, " N"]]  # where the gripper should go, grip command


def expert_action(
    task: str,
    p: Positions,
    fingers: Float[np.ndarray, "N 2"],
    target: Float[np.ndarray, "N 3"],
    target_quat: Float[np.ndarray, "N 4"],
) -> Float[np.ndarray, "N 7"]:
    """One env step's action, float32. ``target`` and ``target_quat`` are where the controller steers already."""
    if task == "reach":
        waypoint, grip = p.goal, np.full(len(p.goal), _OPEN)
    elif task == "push":
        waypoint, grip = _push(p)
    else:
        waypoint, grip = _pick_place(p, fingers[:, 0])
    action = np.empty((len(grip), 7), np.float32)
    action[:, :3] = np.clip((waypoint - target) / 0.05, -1, 1)
    down = np.broadcast_to(rotations.GRIPPER_DOWN, target_quat.shape)
    action[:, 3:6] = np.clip(rotations.difference(down, target_quat) / 0.25, -1, 1) * 0.5
    action[:, 6] = grip
    return action


def _push(p: Positions) -> Goals:
    """Rise, go behind the cube as seen from the goal, come down, push along the line."""
    to_goal = (p.goal - p.cube)[:, :2]
    distance = np.linalg.norm(to_goal, axis=-1, keepdims=True)
    direction = to_goal / np.maximum(distance, 1e-6)
    offset = (p.gripper - p.cube)[:, :2]
    height = p.gripper[:, 2]
    along = (offset * direction).sum(axis=-1)
    lateral = np.abs(offset[:, 0] * direction[:, 1] - offset[:, 1] * direction[:, 0])

    behind = _at(p.cube[:, :2] - direction * 0.075, 0.03)
    is_ready = (along < -0.02) & (lateral < 0.018) & (height < 0.06)
    is_above = np.linalg.norm((p.gripper - behind)[:, :2], axis=-1) < 0.02
    is_low = ~is_ready & ~is_above & (height < 0.12)

    waypoint = _choose(is_above, behind, behind + np.array([0, 0, 0.12]))
    waypoint = _choose(is_ready, _at(p.gripper[:, :2] + direction * np.clip(distance, 0.006, 0.03), 0.03), waypoint)
    waypoint = _choose(is_low, _at(p.gripper[:, :2], 0.16), waypoint)
    return waypoint, np.full(len(height), _CLOSED)


def _pick_place(p: Positions, finger: Float[np.ndarray, " N"]) -> Goals:
    """Go above the cube, come down, grip, lift, carry over the goal, lower, let go, rise."""
    rise = np.array([0, 0, 0.1])
    is_near = np.linalg.norm((p.gripper - p.cube)[:, :2], axis=-1) < 0.015
    is_at = is_near & (np.abs(p.gripper[:, 2] - p.cube[:, 2]) < 0.012)
    is_held = is_at & (finger < 0.026)
    is_over_goal = np.linalg.norm((p.cube - p.goal)[:, :2], axis=-1) < 0.018
    is_placed = is_over_goal & (p.cube[:, 2] < 0.026)

    approach = _choose(is_near, p.cube, p.cube + rise)
    carry = _at(_choose(p.cube[:, 2] > 0.07, p.goal[:, :2], p.gripper[:, :2]), 0.11)
    carry = _choose(is_over_goal, _at(p.goal[:, :2], 0.021), carry)
    waypoint = _choose(is_placed, p.gripper + rise, _choose(is_held, carry, approach))
    return waypoint, np.where(is_at & ~is_placed, _CLOSED, _OPEN)


def _at(xy: Float[np.ndarray, "N 2"], z: float) -> Float[np.ndarray, "N 3"]:
    return np.concatenate([xy, np.full((len(xy), 1), z)], axis=-1)


def _choose(mask: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    """Rows of ``yes`` where the mask is set, of ``no`` elsewhere."""
    return np.where(mask[:, None], yes, no)
