"""A scripted expert for LIBERO tasks that put the black bowl onto the plate: a stateless function of the simulator
state, so it can take over after any restore.

Numpy only (see single.py). Metres and radians, world frame. The bowl is wider than the gripper opens, so it is held by
its rim: one finger inside, one outside.
"""

from __future__ import annotations

import numpy as np

TAUGHT = {"libero_spatial": (0,)}  # tasks that it solves, by suite
BOWL, PLATE = "akita_black_bowl_1", "plate_1"
_OPEN, _CLOSED = -1.0, 1.0
_MOVE, _TURN = 0.05, 0.5  # metres and radians of a unit action
_DOWN = np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, -1]])  # at home: it points at the table, its fingers part along y
_RIM_RADIUS, _RIM_HEIGHT = 0.048, 0.03  # of the point between the fingers, from the bowl's origin
_RISE = 0.07  # above the rim, on the way to it
_CARRY = 0.05  # of the bowl above the plate, at least
_HELD = 0.012  # between the fingers, when they hold the rim or nothing
_CLOSING = 0.04  # between the fingers, when they have begun to close


def bowl_to_plate(
    gripper: np.ndarray, turn: np.ndarray, fingers: np.ndarray, bowl: np.ndarray, plate: np.ndarray
) -> np.ndarray:
    """One env step's action, float32. ``gripper`` "3" is the point between the fingers, ``turn`` "3 3" its rotation,
    ``fingers`` "2" their joints, ``bowl`` and ``plate`` "3" their origins."""
    axis = turn[:, 0]  # along which the fingers part
    side = 1.0 if (gripper - bowl) @ axis > 0 else -1.0
    rim = bowl + side * _RIM_RADIUS * axis + np.array([0, 0, _RIM_HEIGHT])
    offset, opening = gripper - rim, fingers[0] - fingers[1]
    slack = 2.5 if opening < _CLOSING else 1.0  # a bowl in the gripper tilts and slides
    is_near = np.linalg.norm(offset[:2]) < 0.012 * slack
    is_at = is_near and abs(offset[2]) < 0.01 * slack
    is_held = is_at and opening < _HELD
    to_plate = plate - bowl
    is_over = np.linalg.norm(to_plate[:2]) < 0.02
    is_high = -to_plate[2] > _CARRY
    grip = _CLOSED if is_at else _OPEN
    if not is_near:
        target = rim + np.array([0, 0, _RISE])
    elif not is_at:
        target = rim
    elif not is_held:
        target = gripper
    elif is_over:
        target = gripper + np.array([to_plate[0], to_plate[1], -0.03])
    elif is_high:
        target = gripper + np.array([to_plate[0], to_plate[1], 0])
    else:
        target = gripper + np.array([0, 0, 0.05])
    action = np.zeros(7, np.float32)
    action[:3] = np.clip((target - gripper) / _MOVE, -1, 1)
    action[3:6] = np.clip(_rotation_vector(_DOWN @ turn.T) / _TURN, -1, 1)
    action[6] = grip
    return action


def _rotation_vector(m: np.ndarray) -> np.ndarray:
    """Of a rotation by less than half a turn."""
    axis = np.array([m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]]) / 2
    sine, cosine = np.linalg.norm(axis), (np.trace(m) - 1) / 2
    return axis if sine < 1e-9 else axis / sine * np.arctan2(sine, cosine)
