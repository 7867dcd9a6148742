"""The three tasks: what to say, when it is done, how far it is from done.

A task sees positions only, never the simulator. Positions are metres in the world frame; N is the number of episodes.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from vla_rlaif.envs.tabletop.scene import COLORS

_RESTING_HEIGHT = 0.03  # a cube whose centre is below this lies on the table (half an edge is 0.02)
_RELEASED_DISTANCE = 0.05  # a gripper farther than this from the cube's centre does not hold it
_DISC_HEIGHT = 0.001


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What success and progress are measured on."""

    gripper: Float[np.ndarray, "N 3"]
    cube: Float[np.ndarray, "N 3"]  # the one the instruction names
    goal: Float[np.ndarray, "N 3"]


@runtime_checkable
class Task(Protocol):
    @property
    def instructions(self) -> tuple[str, ...]:
        """A sentence per cube, or one sentence if the task has no cube."""
        ...

    def goal_height(self, rng: np.random.Generator) -> float: ...

    def distance(self, p: Positions) -> Float[np.ndarray, " N"]:
        """How far from done, metres."""
        ...

    def success(self, p: Positions, radius: float) -> Bool[np.ndarray, " N"]: ...


class Reach:
    instructions = ("move the gripper to the green disc",)

    def goal_height(self, rng: np.random.Generator) -> float:
        return rng.uniform(0.1, 0.3)

    def distance(self, p: Positions) -> Float[np.ndarray, " N"]:
        return np.linalg.norm(p.gripper - p.goal, axis=-1)

    def success(self, p: Positions, radius: float) -> Bool[np.ndarray, " N"]:
        return self.distance(p) < radius


class Push:
    instructions = tuple(f"push the {color} cube onto the green disc" for color in COLORS)

    def goal_height(self, rng: np.random.Generator) -> float:
        return _DISC_HEIGHT

    def distance(self, p: Positions) -> Float[np.ndarray, " N"]:
        return _cube_to_goal(p)

    def success(self, p: Positions, radius: float) -> Bool[np.ndarray, " N"]:
        return _is_on_goal(p, radius)


class PickPlace:
    """Success needs the cube on the disc and let go of; how it got there is not checked."""

    instructions = tuple(f"pick up the {color} cube and place it on the green disc" for color in COLORS)

    def goal_height(self, rng: np.random.Generator) -> float:
        return _DISC_HEIGHT

    def distance(self, p: Positions) -> Float[np.ndarray, " N"]:
        return _cube_to_goal(p)

    def success(self, p: Positions, radius: float) -> Bool[np.ndarray, " N"]:
        return _is_on_goal(p, radius) & (np.linalg.norm(p.gripper - p.cube, axis=-1) > _RELEASED_DISTANCE)


TASKS: dict[str, Task] = {"reach": Reach(), "push": Push(), "pick_place": PickPlace()}


def _cube_to_goal(p: Positions) -> Float[np.ndarray, " N"]:
    # The second term rewards approaching the cube, which every solution begins with.
    to_goal = np.linalg.norm((p.cube - p.goal)[:, :2], axis=-1)
    return to_goal + 0.3 * np.linalg.norm(p.gripper - p.cube, axis=-1)


def _is_on_goal(p: Positions, radius: float) -> Bool[np.ndarray, " N"]:
    return (np.linalg.norm((p.cube - p.goal)[:, :2], axis=-1) < radius) & (p.cube[:, 2] < _RESTING_HEIGHT)
