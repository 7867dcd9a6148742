"""An evaluation of one policy, or of two on the same start states: plays them, and says how they did.

Axes: N start states, each played once by every repetition; R repetitions of a side (its policies x noise seeds).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int, UInt8

from vla_rlaif.evaluate import EVALUATION_SEED, play_all
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.metrics import wilson
from vla_rlaif.paired import Comparison, compare, interval
from vla_rlaif.policy_source import Source, rollouts_of
from vla_rlaif.rollout import Split, held_out_starts, take_starts
from vla_rlaif.serve.settings import ServedSettings
from vla_rlaif.types import EnvSpec, Episodes, Starts

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A success rate and its 95 % interval: Wilson's of one repetition, a bootstrap over start states of several."""

    success: float
    low: float
    high: float
    method: str


@dataclass(frozen=True, kw_only=True)
class Side:
    """What the policies of one side did. Repetitions are ordered by policy, then by noise seed."""

    sources: tuple[Source, ...]
    outcomes: Bool[np.ndarray, "R N"]
    env_steps: Int[np.ndarray, "R N"]  # until success, or all that an episode has
    broken: int  # episodes whose simulation broke; they count as failures

    @property
    def rate(self) -> Rate:
        return rate_of(self.outcomes)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The start states of one task."""

    instruction: str
    rows: Int[np.ndarray, " K"]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    starts: Starts
    instruction: tuple[str, ...]  # N
    noise_seeds: tuple[int, ...]
    a: Side
    b: Side | None
    num_repeats: int  # of start states: how often the env's few are gone through again

    @property
    def comparison(self) -> Comparison | None:
        return None if self.b is None else compare(self.a.outcomes, self.b.outcomes)

    @property
    def tasks(self) -> list[Task]:
        """By instruction, in the order in which they are first played."""
        names = list(dict.fromkeys(self.instruction))
        said = np.array(self.instruction)
        return [Task(instruction=name, rows=np.flatnonzero(said == name)) for name in names]


def rate_of(outcomes: Bool[np.ndarray, "R N"]) -> Rate:
    num = outcomes.size
    if len(outcomes) == 1:
        low, high = wilson(int(outcomes.sum()), num)
        return Rate(success=float(outcomes.mean()), low=low, high=high, method="Wilson")
    low, high = interval(outcomes)
    return Rate(success=float(outcomes.mean()), low=low, high=high, method="bootstrap over start states")


class Footage:
    """First-camera frames of the first repetition of each side, on disk until they are chosen from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._where: dict[tuple[str, int], tuple[Path, int]] = {}  # (side, start state) -> file and row

    def keep(self, side: str, rows: Int[np.ndarray, " K"], frames: UInt8[np.ndarray, "K F height width 3"]) -> None:
        path = self._folder / f"{side}-{rows[0]}.npy"
        np.save(path, frames)
        self._where |= {(side, row): (path, index) for index, row in enumerate(rows.tolist())}

    def frames(self, side: str, row: int) -> UInt8[np.ndarray, "F height width 3"] | None:
        """None: the env has no camera."""
        if (side, row) not in self._where:
            return None
        path, index = self._where[side, row]
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False)[index])


def chosen_starts(spec: EnvSpec, num: int, first_seed: int | None) -> tuple[Starts, int]:
    """``num`` test start states, or those of the seeds from ``first_seed`` on; and how often an env that has only so
    many goes through them again."""
    if first_seed is None:
        starts = held_out_starts(Split.TEST, num, spec.num_tasks, spec.num_starts)
    else:
        starts = Starts(seed=first_seed + np.arange(num), group=np.arange(num), member=np.zeros(num, np.int64))
    kinds = spec.num_tasks * spec.num_starts
    return starts, (num - 1) // kinds if spec.num_starts > 1 else 0


def evaluate_sides(
    env: VectorEnv,
    a: Sequence[Source],
    b: Sequence[Source],
    *,
    episodes: int,
    noise_seeds: Sequence[int] = (EVALUATION_SEED,),
    first_seed: int | None = None,
    served: ServedSettings,
    footage: Footage | None,
    say: Say,
) -> Evaluated:
    """Play all policies of both sides; ``b`` may be empty. One policy is in memory at a time."""
    starts, num_repeats = chosen_starts(env.spec, episodes, first_seed)
    sides, instruction = [], ()
    for name, sources in (("a", a), ("b", b)):
        played = []
        for number, source in enumerate(sources):
            kept = footage if number == 0 else None
            played.append(_play(env, source, starts, noise_seeds, served, kept, name))
            say(f"played {source.name} ({source.kind})")
            instruction = played[-1].instruction
        if played:
            sides.append(
                Side(
                    sources=tuple(sources),
                    outcomes=np.concatenate([p.outcomes for p in played]),
                    env_steps=np.concatenate([p.env_steps for p in played]),
                    broken=sum(p.broken for p in played),
                )
            )
    return Evaluated(
        starts=starts,
        instruction=instruction,
        noise_seeds=tuple(noise_seeds),
        a=sides[0],
        b=sides[1] if len(sides) > 1 else None,
        num_repeats=num_repeats,
    )


@dataclass(frozen=True, kw_only=True)
class _Played:
    outcomes: Bool[np.ndarray, "R N"]
    env_steps: Int[np.ndarray, "R N"]
    broken: int
    instruction: tuple[str, ...]


def _play(
    env: VectorEnv,
    source: Source,
    starts: Starts,
    noise_seeds: Sequence[int],
    served: ServedSettings,
    footage: Footage | None,
    side: str,
) -> _Played:
    """One policy on all start states, with every noise seed; a round of the env is in memory at a time."""
    num, camera = len(starts.seed), next(iter(env.spec.cameras), None)
    outcomes, steps = np.zeros((len(noise_seeds), num), bool), np.zeros((len(noise_seeds), num), np.int64)
    broken, instruction = 0, []
    with rollouts_of(source, env, served) as rollouts:
        for number, seed in enumerate(noise_seeds):
            instruction.clear()
            for first in range(0, num, env.num_envs):
                rows = np.arange(first, min(first + env.num_envs, num))
                e: Episodes = play_all(rollouts, take_starts(starts, rows), seed=seed, noise_scale=0.0)
                outcomes[number, rows] = e.success & e.valid
                steps[number, rows] = e.executed.sum(axis=1)
                broken += int((~e.valid).sum())
                instruction += e.instruction
                if footage is not None and camera is not None and number == 0:
                    footage.keep(side, rows, e.images[camera])
    return _Played(outcomes=outcomes, env_steps=steps, broken=broken, instruction=tuple(instruction))
