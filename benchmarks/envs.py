"""How fast each suite's environments step with images: ours, gymnasium's vector envs, LeRobot's, and the bare floor.

Ours executes a chunk and draws once at its end, the others draw at every step, as their interfaces want; "ours, chunk
1" draws at every step too. The floor is the suite's own physics steps and one image a chunk: no observations, rewards
or Python around them, but moved by random actions as all the others are. "suite's step" is the suite's whole step in
its place, which nobody can do without: it is what tells success. Both are measured in one process, times the number of
cores, which assumes that the other cores are as fast at the same time, and in a process a core, which finds it out.
LeRobot's Meta-World draws 480 pixels whatever is asked for.

Sides take turns, so that a change of load meets them all; medians, and medians of ratios of neighbours, are reported.
CPU milliseconds, of all processes of a side, do not count other people's load: ratios of them hold on a busy machine.

    python benchmarks/envs.py --suite metaworld --out envs.json
"""

import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import tyro
from env_floors import ENDLESS, floor_rate, metaworld_floor, pusht_floor, start_floor, tabletop_floor

from vla_rlaif.build import build_env
from vla_rlaif.env_config import EnvConfig, GymnasiumConfig, MetaWorldConfig, TabletopConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    suite: Literal["tabletop", "metaworld", "pusht"] = "metaworld"
    num_envs: int = 16
    """Of ours; the others have one env a process, and as many as ``others``."""
    others: int = 4
    chunk: int = 4
    image_size: int = 64
    """Pixels."""
    cores: int = os.cpu_count() or 1
    seconds: float = 2.0
    """Of one sample."""
    repetitions: int = 5
    out: Path | None = None
    """Where to write all samples as JSON."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    rate: float  # env steps a second
    cpu_ms: float  # of all processes, an env step


class Clock:
    """Wall and CPU seconds since it was made, without what ``paused`` spans."""

    def __init__(self) -> None:
        self._wall, self._cpu = -time.perf_counter(), -cpu_seconds()

    @property
    def wall(self) -> float:
        return self._wall + time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), cpu_seconds()
        yield
        self._wall -= time.perf_counter() - wall
        self._cpu -= cpu_seconds() - cpu

    def sample(self, env_steps: int) -> Sample:
        return Sample(rate=env_steps / self.wall, cpu_ms=1000 * (self._cpu + cpu_seconds()) / env_steps)


def cpu_seconds() -> float:
    """Of this process and its children."""
    me, ticks = os.getpid(), 0
    for child in Path(f"/proc/self/task/{me}/children").read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def main(options: Options) -> None:
    sides = build_sides(options)
    for side in sides.values():
        next(side)  # warm up
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for _ in range(options.repetitions):
        for name, side in sides.items():
            samples[name].append(next(side))
    for side in sides.values():
        side.close()  # pyright: ignore[reportAttributeAccessIssue] (all are generators)
    print(f"{options.suite}, images of {options.image_size} px, chunk {options.chunk}, {options.cores} cores")
    report = {}
    for name, these in samples.items():
        pairs = [(ours, this) for ours, this in zip(samples["ours"], these, strict=True)]
        rate, cpu_ms = (statistics.median(getattr(s, figure) for s in these) for figure in ("rate", "cpu_ms"))
        faster = statistics.median(ours.rate / this.rate for ours, this in pairs)
        cheaper = statistics.median(this.cpu_ms / ours.cpu_ms for ours, this in pairs)
        report[name] = {"env_steps_per_s": rate, "cpu_ms": cpu_ms, "ours / this": faster, "CPU, this / ours": cheaper}
        print(
            f"{name:24}{rate:8.0f} steps/s, ours / this {faster:6.2f};{cpu_ms:7.2f} CPU ms, this / ours {cheaper:6.2f}"
        )
    if options.out is not None:
        machine = {"platform": platform.platform(), "load": os.getloadavg()}
        whole = {"options": asdict(options), "machine": machine, "report": report}
        whole |= {"samples": {name: [asdict(one) for one in these] for name, these in samples.items()}}
        options.out.write_text(json.dumps(whole, indent=1, default=str))


def build_sides(options: Options) -> dict[str, Iterator[Sample]]:
    """Generators that play for ``options.seconds`` each time."""
    make_single = {"tabletop": tabletop_single, "metaworld": metaworld_single, "pusht": pusht_single}[options.suite]
    single = functools.partial(make_single, options.image_size)
    sides = {"gymnasium, async": gymnasium_side(options, single, is_async=True)}
    if options.suite == "metaworld" and importlib.util.find_spec("lerobot") is not None:
        sides["lerobot, async"] = gymnasium_side(options, lerobot_single, is_async=True)
    for side in sides.values():
        next(side)  # their workers start before this process has rendered
    sides["gymnasium, sync"] = gymnasium_side(options, single, is_async=False)
    sides["ours"] = our_side(options, our_config(options, options.chunk))
    sides["ours, chunk 1"] = our_side(options, our_config(options, 1))
    make_floor = {"tabletop": tabletop_floor, "metaworld": metaworld_floor, "pusht": pusht_floor}[options.suite]
    floors = {"floor": functools.partial(make_floor, options.image_size, options.chunk)}
    if options.suite != "tabletop":  # its step is ours
        floors["suite's step"] = functools.partial(floors["floor"], whole_step=True)
    for name, make in floors.items():
        sides[f"{name} x cores"] = floor_side(options, make, num_processes=1)
        sides[f"{name}, all cores"] = floor_side(options, make, num_processes=options.cores)
    return sides


def our_config(options: Options, chunk: int) -> EnvConfig:
    shared: dict[str, Any] = {"num_envs": options.num_envs, "chunk": chunk, "max_steps": ENDLESS}
    shared["image_size"] = options.image_size
    if options.suite == "tabletop":
        return TabletopConfig(task="push", threads=options.cores, success_radius=1e-9, **shared)
    if options.suite == "metaworld":
        return MetaWorldConfig(tasks=("push-v3",), cameras=("corner2",), workers=options.cores, **shared)
    return GymnasiumConfig(
        factory="vla_rlaif.envs.pusht:make_env",
        options={"image_size": options.image_size},
        cameras={"top": "render"},
        state=("agent_pos",),
        instructions=("push the block onto the target",),
        workers=options.cores,
        **shared,
    )


def our_side(options: Options, config: EnvConfig) -> Iterator[Sample]:
    env = build_env(config)
    rng, round_ = np.random.default_rng(0), 0
    shape = (env.num_envs, env.spec.chunk, env.spec.action_dim)
    now = env.reset(np.arange(env.num_envs))
    try:
        while True:
            executed, clock = 0, Clock()
            while clock.wall < options.seconds:
                if now.done.all():  # resetting is nobody's step
                    round_ += 1
                    with clock.paused():
                        now = env.reset(round_ * env.num_envs + np.arange(env.num_envs))
                now = env.step(rng.uniform(-1, 1, shape))
                executed += int(now.executed.sum())
            yield clock.sample(executed)
    finally:
        env.close()


def gymnasium_side(options: Options, make: Callable[[], gymnasium.Env], *, is_async: bool) -> Iterator[Sample]:
    makers = [make] * options.others
    mode = gymnasium.vector.AutoresetMode.DISABLED
    env: gymnasium.vector.VectorEnv
    if is_async:
        env = gymnasium.vector.AsyncVectorEnv(makers, shared_memory=False, context="spawn", autoreset_mode=mode)
    else:
        env = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=mode)
    env.reset(seed=list(range(options.others)))
    low, high = (np.asarray(getattr(env.single_action_space, side)) for side in ("low", "high"))
    rng, steps = np.random.default_rng(0), 0
    try:
        while True:
            played, clock = 0, Clock()
            while clock.wall < options.seconds:
                steps += 1
                if steps % ENDLESS == 0:
                    with clock.paused():
                        env.reset(seed=list(range(steps, steps + options.others)))
                env.step(rng.uniform(low, high, (options.others, len(low))).astype(np.float32))
                played += options.others
            yield clock.sample(played)
    finally:
        env.close()


def floor_side(options: Options, make: Callable[[], Callable[[], None]], *, num_processes: int) -> Iterator[Sample]:
    """Processes that play the same floor at the same time, scaled to all cores."""
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(num_processes)
    with ProcessPoolExecutor(num_processes, spawn, initializer=start_floor, initargs=(make, together)) as pool:
        while True:
            calls = [pool.submit(floor_rate, options.seconds) for _ in range(num_processes)]
            rates, cpu = zip(*(call.result() for call in calls), strict=True)
            yield Sample(
                rate=sum(rates) * options.chunk * options.cores / num_processes,
                cpu_ms=1000 * statistics.mean(cpu) / options.chunk,
            )


class Framed(gymnasium.Wrapper):
    """Draws at every step, as an observation."""

    def __init__(self, env: gymnasium.Env, size: int) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.env.reset(**kwargs)
        return self.env.render(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        _, reward, _, _, _ = self.env.step(action)
        return self.env.render(), reward, False, False, {}


def tabletop_single(size: int) -> gymnasium.Env:
    from vla_rlaif.envs.tabletop.gym_env import TabletopEnv

    return TabletopEnv("push", image_size=size, max_steps=10**9, success_radius=1e-9)


def metaworld_single(size: int) -> gymnasium.Env:
    """The suite's env at its own settings, with an image of ``size``."""
    os.environ["MUJOCO_GL"] = "egl"
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    from vla_rlaif.envs.metaworld import import_suite

    import_suite()
    env: Any = ALL_V3_ENVIRONMENTS["push-v3"](render_mode="rgb_array", camera_name="corner2", width=size, height=size)
    env._freeze_rand_vec, env._set_task_called, env.max_path_length = False, True, 10**9
    return Framed(env, size)


def lerobot_single() -> gymnasium.Env:
    os.environ["MUJOCO_GL"] = "egl"
    from vla_rlaif.envs.metaworld import import_suite

    import_suite()
    from lerobot.envs.metaworld import MetaworldEnv

    return MetaworldEnv("push-v3", obs_type="pixels_agent_pos")


def pusht_single(size: int) -> gymnasium.Env:
    import gym_pusht  # noqa: F401 (registers the id)

    return gymnasium.make(
        "gym_pusht/PushT-v0", obs_type="pixels_agent_pos", observation_width=size, observation_height=size
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
