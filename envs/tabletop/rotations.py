"""Rotations as arrays. Quaternions are (w, x, y, z) on the last axis, rotation vectors are in radians.

Row i depends on row i only, so members of a batch cannot influence each other.
"""

import numpy as np
from jaxtyping import Float

GRIPPER_DOWN = np.array([0.0, 1.0, 0.0, 0.0])  # half a turn about x: the gripper points at the table


def multiply(a: Float[np.ndarray, "*B 4"], b: Float[np.ndarray, "*B 4"]) -> Float[np.ndarray, "*B 4"]:
    """The rotation b followed by a."""
    aw, ax, ay, az = np.moveaxis(a, -1, 0)
    bw, bx, by, bz = np.moveaxis(b, -1, 0)
    return np.stack(
        [
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ],
        axis=-1,
    )


def conjugate(q: Float[np.ndarray, "*B 4"]) -> Float[np.ndarray, "*B 4"]:
    return q * np.array([1.0, -1.0, -1.0, -1.0])


def difference(a: Float[np.ndarray, "*B 4"], b: Float[np.ndarray, "*B 4"]) -> Float[np.ndarray, "*B 3"]:
    """Rotation vector that turns b into a, radians."""
    return to_rotvec(multiply(a, conjugate(b)))


def from_rotvec(v: Float[np.ndarray, "*B 3"]) -> Float[np.ndarray, "*B 4"]:
    angle = np.linalg.norm(v, axis=-1, keepdims=True)
    scale = np.where(angle > 1e-8, np.sin(angle / 2) / np.maximum(angle, 1e-8), 0.5)
    return np.concatenate([np.cos(angle / 2), v * scale], axis=-1)


def to_rotvec(q: Float[np.ndarray, "*B 4"]) -> Float[np.ndarray, "*B 3"]:
    """The shorter way round, radians."""
    q = np.where(q[..., :1] < 0, -q, q)
    w, xyz = q[..., :1], q[..., 1:]
    norm = np.linalg.norm(xyz, axis=-1, keepdims=True)
    return np.where(norm > 1e-9, xyz / np.maximum(norm, 1e-9) * 2 * np.arctan2(norm, w), 2 * xyz)


def from_matrix(m: Float[np.ndarray, "N 3 3"]) -> Float[np.ndarray, "N 4"]:
    """Bar-Itzhack's symmetric form: row k of ``outer`` is 4 q_k q, and the row with the largest diagonal is the best
    conditioned one (https://doi.org/10.2514/2.4654)."""
    m00, m01, m02 = m[:, 0, 0], m[:, 0, 1], m[:, 0, 2]
    m10, m11, m12 = m[:, 1, 0], m[:, 1, 1], m[:, 1, 2]
    m20, m21, m22 = m[:, 2, 0], m[:, 2, 1], m[:, 2, 2]
    wx, wy, wz = m21 - m12, m02 - m20, m10 - m01
    xy, xz, yz = m01 + m10, m02 + m20, m12 + m21
    outer = np.stack(
        [
            *(1 + m00 + m11 + m22, wx, wy, wz),
            *(wx, 1 + m00 - m11 - m22, xy, xz),
            *(wy, xy, 1 - m00 + m11 - m22, yz),
            *(wz, xz, yz, 1 - m00 - m11 + m22),
        ],
        axis=-1,
    ).reshape(-1, 4, 4)
    best = np.argmax(np.diagonal(outer, axis1=1, axis2=2), axis=1)
    q = outer[np.arange(len(m)), best]
    return q / np.linalg.norm(q, axis=-1, keepdims=True)
