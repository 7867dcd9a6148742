"""One environment of a suite, as an env worker sees it.

Needs numpy and the standard library only, for any Python from 3.10 on: a worker may run under another interpreter than
the rest of the system. P proprioception dims, A action dims, C cameras; images are square and uint8, rows from the top.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class SingleSpec:
    """What the shared arrays are shaped by; the same for every member."""

    cameras: tuple[str, ...]
    image_size: int  # pixels
    state_dim: int  # P
    action_dim: int  # A, every dim bounded to [-1, 1]
    instructions: tuple[str, ...]  # every sentence the env can say
    fps: int | None = None  # env steps a second of the robot's time; None: not known
    num_tasks: int = 1  # a start seed modulo this number chooses the task
    num_starts: int = 1  # seed // num_tasks modulo this number chooses the start state, where there are only so many


@dataclass(frozen=True)
class Reading:
    """The env after a reset, a step or a restore."""

    state: np.ndarray  # "P" float32, in the suite's units
    instruction: str
    success: bool
    ended: bool  # over without success, by a rule of the suite; its time limit is not one
    truth: float  # ground-truth return so far, in [-1, 2]: progress since the start + 1 on success


@runtime_checkable
class SingleEnv(Protocol):
    """Never resets on its own; its actions are finite and clipped to [-1, 1]. It may raise anything."""

    @property
    def spec(self) -> SingleSpec: ...

    def reset(self, seed: int) -> Reading:
        """Start an episode. Equal seeds give bit-identical states and images, whatever was played before."""
        ...

    def step(self, action: np.ndarray) -> Reading:
        """One env step with an action "A", float64. Renders nothing."""
        ...

    def render(self, images: np.ndarray) -> None:
        """Draw the present state into "C height width 3"."""
        ...

    def fingerprint(self) -> bytes:
        """All that the future depends on, as far as the suite lets it be read: what members of a group agree in."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class RestorableEnv(Protocol):
    """An env that can go back; how exactly, its own docstring says."""

    def snapshot(self) -> bytes: ...

    def restore(self, snapshot: bytes) -> Reading: ...


@runtime_checkable
class TeachingEnv(Protocol):
    """An env that may know how to solve its tasks."""

    @property
    def teaches(self) -> bool:
        """Whether it does, for all that it was made with."""
        ...

    def expert(self) -> np.ndarray:
        """The expert's action "A" in the present state, float32 in [-1, 1]."""
        ...


def recorded(seed: int | None, actions: Sequence[Sequence[float]]) -> bytes:
    """The snapshot of an env that can only go back by playing its episode again."""
    return json.dumps({"seed": seed, "actions": actions}).encode()


def replayed(env: SingleEnv, snapshot: bytes) -> Reading:
    """Play the episode of a ``recorded`` snapshot again; costs the steps that it holds."""
    saved = json.loads(snapshot)
    reading = env.reset(saved["seed"])
    for action in saved["actions"]:
        reading = env.step(np.array(action))
    return reading
