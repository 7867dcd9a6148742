"""The pools and the run that pool_live.py rehearses. Lengths are units: what a process takes to load JAX."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vla_rlaif.pool.clock import HOUR, MINUTE, Micros, resolve, zone_of
from vla_rlaif.pool.history import MIN_SAMPLES, STEPS, Step
from vla_rlaif.pool.store import PoolStore
from vla_rlaif.pool.times import parse_wall_time

FACTORY = Path(__file__).parents[1] / "configs" / "pool_factory.yaml"
HOUR_UNITS, NIGHT_UNITS = 14, 100  # how long they last


@dataclass(frozen=True, kw_only=True)
class Scene:
    speed: float  # pool seconds in a second
    pool: dict[str, Any]
    start: Micros
    end: Micros | None = None  # None: when the run is done
    death: Micros | None = None  # when a node dies, if one is to die


def small(unit_s: float) -> Scene:
    """One node of 8 GPUs: 4 train by day, none at night, 4 in the morning, 2 later."""
    speed = 120.0
    wall = lambda units: _clock_time(12 * HOUR + round(units * unit_s * speed * 1e6))  # noqa: E731
    night, morning, late = wall(16), wall(25), wall(35)
    windows = [
        {"name": "day", "days": "mon-sun", "start": "06:00", "end": night},
        {"name": "night", "days": "mon-sun", "start": night, "end": morning},
        {"name": "day", "days": "mon-sun", "start": morning, "end": late},
        {"name": "late", "days": "mon-sun", "start": late, "end": "06:00"},
    ]
    shares = {
        "day": {"serve": {"min": 1, "target": 2}, "train": {"target": 4}},
        "night": {"serve": {"min": 1, "target": 1}, "rollout": {"target": 4}},
        "late": {"serve": {"min": 1, "target": 2}, "train": {"target": 2}},
    }
    pool = one_node(windows, shares, speed * unit_s)
    return Scene(speed=speed, pool=pool, start=_instant("2026-11-02T12:00", "UTC"))


def hourly(unit_s: float) -> Scene:
    """One node of 8 GPUs: 4 train in even hours, none in odd ones."""
    speed = 3600 / (HOUR_UNITS * unit_s)
    windows = [
        {
            **{"name": "night" if hour % 2 else "day", "days": "mon-sun"},
            **{"start": f"{hour:02}:00", "end": f"{hour + 1:02}:00"},
        }
        for hour in range(24)
    ]
    shares = {
        "day": {"serve": {"min": 1, "target": 2}, "train": {"target": 4}},
        "night": {"serve": {"min": 1, "target": 1}, "rollout": {"target": 4}},
    }
    pool = one_node(windows, shares, speed * unit_s)
    return Scene(speed=speed, pool=pool, start=_instant("2026-11-02T12:00", "UTC"))


def one_node(windows: list[dict[str, Any]], shares: dict[str, Any], unit: float) -> dict[str, Any]:
    return {
        "pool": {"nodes": 1, "gpus_per_node": 8},
        "timezone": "UTC",
        "windows": windows,
        "shares": shares,
        "roles": roles(unit, {"serve": 1, "train": 1, "rollout": 2}, num_chunks=4),
        "transition": {"safety": 1.0, "min_dwell": "1s"},
    }


def factory(unit_s: float) -> Scene:
    """The factory's calendar from Monday 16:00, on 8 x 8 GPUs. A replica is a whole node: 64 processes are too many for
    2 processors, so shares are rounded to 8."""
    speed = 8 * 3600 / (NIGHT_UNITS * unit_s)
    data = yaml.safe_load(FACTORY.read_text())
    night = {"serve": {"min": 8, "target": 8}, "train": {"min": 8, "target": 8}, "rollout": {"target": 48}}
    data["shares"] = {
        "day": {"serve": {"min": 16, "target": 24}, "train": {"target": 40}},
        "night": night,
        "weekend": night,
        "line_stop": {"serve": {"min": 8, "target": 24}, "train": {"target": 40}},
    }
    data["roles"] = roles(speed * unit_s, {"serve": 8, "train": 8, "rollout": 8}, num_chunks=5)
    data["transition"] = {"safety": 1.0, "min_dwell": "1m"}
    instant = lambda wall: _instant(wall, data["timezone"])  # noqa: E731
    return Scene(
        speed=speed,
        pool=data,
        start=instant("2026-11-02T16:00"),
        end=instant("2026-11-03T10:00"),
        death=instant("2026-11-03T08:00"),
    )


def roles(unit: float, sizes: dict[str, int], *, num_chunks: int) -> dict[str, Any]:
    """Generous declared durations, in units (pool seconds): timeouts come from them, leads from what was measured."""
    units = {"acquire": 20, "warmup": 15, "sync": 4, "drain": 5, "checkpoint": 4, "release": 4}
    common = {name: f"{round(1000 * num * unit)}ms" for name, num in units.items()}
    return {
        "serve": {"priority": 100, "preemptible": False, "gpus_per_replica": sizes["serve"], **common},
        "train": {
            **{"priority": 50, "preemptible": "checkpoint", "gpus_per_replica": sizes["train"]},
            **{"global_batch": num_chunks, **common},
        },
        "rollout": {"priority": 10, "preemptible": "at_chunk", "gpus_per_replica": sizes["rollout"], **common},
    }


def run_of(size: str, folder: Path, unit_s: float, *, staleness: int) -> dict[str, Any]:
    steps, pause = {"small": (120, 0.07), "hourly": (80, 0.07), "factory": (5000, 0.25)}[size]
    os.environ["POOL_REHEARSAL_PAUSE_S"] = str(pause * unit_s)  # of a step; the trainers inherit it
    return {
        "name": "rehearsal",
        "out": str(folder / "run"),
        "env": {"type": "point_reach", "num_envs": 64},
        "policy": {"type": "gaussian"},
        "reward": {"type": "python", "function": "pool_rehearsal:slow_reward"},
        "algorithm": {"group_size": 16, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
        "learner": {"lr": 0.005, "epochs": 2, "minibatch": 240, "ema": 0.5, "target_kl": None},
        "loop": {
            **{"steps": steps, "validate_every": 50, "validation_episodes": 64, "checkpoint_every": 10},
            **{"stored": str(folder / "store"), "staleness": staleness, "min_live_share": 0.0},
        },
    }


def remember_durations(store: PoolStore, size: str, speed: float, unit_s: float) -> None:
    """As a pool that has run for a while: how long the steps take on this machine. Measured ones replace them.

    In the factory half a dozen processes start at the same time.
    """
    units = (4.0, 3.0, 0.5, 2.0, 0.3, 0.5) if size == "factory" else (1.0, 1.0, 0.2, 1.2, 0.2, 0.3)  # of STEPS
    for role in ("serve", "train", "rollout"):
        samples: list[tuple[str, Step, Micros]] = []
        for step, num in zip(STEPS, units, strict=True):
            samples.extend((role, step, round(1e6 * num * unit_s * speed)) for _ in range(MIN_SAMPLES))
        store.add_durations(samples)


def _instant(wall: str, zone: str) -> Micros:
    return resolve(parse_wall_time(wall), zone_of(zone))


def _clock_time(instant: Micros) -> str:
    minutes = instant // MINUTE
    return f"{minutes // 60:02}:{minutes % 60:02}"
