"""How fast each suite's environments step with images: ours, gymnasium's vector envs, LeRobot's, and the bare floor.

Ours executes a chunk and draws once at its end, the others draw at every step, as their interfaces want; "ours, chunk
1" draws at every step too. The floor is the suite's own physics steps and one image a chunk in one thread, times the
number of cores: no observations, rewards or Python around them. "suite's step" is the suite's whole step in its place,
which nobody can do without: it is what tells success. LeRobot's Meta-World draws 480 pixels whatever is asked for.

Sides take turns, so that a change of load meets them all; medians, and medians of ratios of neighbours, are reported.

    python benchmarks/envs.py --suite metaworld --out envs.json
"""

import functools
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import tyro

from vla_rlaif.build import build_env
from vla_rlaif.env_config import EnvConfig, GymnasiumConfig, MetaWorldConfig, TabletopConfig

ENDLESS = 240  # env steps: no episode ends while the clock runs (PushT's limit is 300)


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


def main(options: Options) -> None:
    sides = build_sides(options)
    for side in sides.values():
        next(side)  # warm up
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.repetitions):
        for name, side in sides.items():
            samples[name].append(next(side))
    for side in sides.values():
        side.close()  # pyright: ignore[reportAttributeAccessIssue] (all are generators)
    print(f"{options.suite}, images of {options.image_size} px, chunk {options.chunk}, {options.cores} cores")
    ours = samples["ours"]
    report = {}
    for name, rates in samples.items():
        ratio = statistics.median(a / b for a, b in zip(ours, rates, strict=True))
        report[name] = {"env_steps_per_s": statistics.median(rates), "ours / this": ratio}
        print(f"{name:24}{report[name]['env_steps_per_s']:9.0f} steps/s   ours / this {ratio:6.2f}")
    if options.out is not None:
        machine = {"platform": platform.platform(), "load": os.getloadavg()}
        whole = {"options": asdict(options), "machine": machine, "report": report, "samples": samples}
        options.out.write_text(json.dumps(whole, indent=1, default=str))


def build_sides(options: Options) -> dict[str, Iterator[float]]:
    """Generators that play for ``options.seconds`` and yield env steps a second each time."""
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
    sides["floor x cores"] = floor_side(options, make_floor(options))
    if options.suite != "tabletop":  # its step is ours
        sides["suite's step x cores"] = floor_side(options, make_floor(options, whole_step=True))
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


def our_side(options: Options, config: EnvConfig) -> Iterator[float]:
    env = build_env(config)
    rng, round_ = np.random.default_rng(0), 0
    shape = (env.num_envs, env.spec.chunk, env.spec.action_dim)
    now = env.reset(np.arange(env.num_envs))
    try:
        while True:
            executed, begun, away = 0, time.perf_counter(), 0.0
            while (spent := time.perf_counter() - begun - away) < options.seconds:
                if now.done.all():  # resetting is nobody's step
                    round_, start = round_ + 1, time.perf_counter()
                    now = env.reset(round_ * env.num_envs + np.arange(env.num_envs))
                    away += time.perf_counter() - start
                now = env.step(rng.uniform(-1, 1, shape))
                executed += int(now.executed.sum())
            yield executed / spent
    finally:
        env.close()


def gymnasium_side(options: Options, make: Callable[[], gymnasium.Env], *, is_async: bool) -> Iterator[float]:
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
            played, begun, away = 0, time.perf_counter(), 0.0
            while (spent := time.perf_counter() - begun - away) < options.seconds:
                steps += 1
                if steps % ENDLESS == 0:
                    start = time.perf_counter()
                    env.reset(seed=list(range(steps, steps + options.others)))
                    away += time.perf_counter() - start
                env.step(rng.uniform(low, high, (options.others, len(low))).astype(np.float32))
                played += options.others
            yield played / spent
    finally:
        env.close()


def floor_side(options: Options, chunk_and_frame: Callable[[], None]) -> Iterator[float]:
    while True:
        chunks, begun = 0, time.perf_counter()
        while (spent := time.perf_counter() - begun) < options.seconds:
            chunk_and_frame()
            chunks += 1
        yield chunks * options.chunk / spent * options.cores


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


def tabletop_floor(options: Options) -> Callable[[], None]:
    import mujoco

    from vla_rlaif.envs.tabletop.gl_canvas import GLCanvas
    from vla_rlaif.envs.tabletop.physics import SUBSTEPS
    from vla_rlaif.envs.tabletop.scene import CAMERAS, load_model

    model = load_model(options.image_size)
    data, canvas = mujoco.MjData(model), GLCanvas(model, CAMERAS, options.image_size, "egl")
    mujoco.mj_resetDataKeyframe(model, data, 0)
    images = np.empty((len(CAMERAS), options.image_size, options.image_size, 3), np.uint8)
    state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))

    def chunk_and_frame() -> None:
        mujoco.mj_step(model, data, nstep=SUBSTEPS * options.chunk)
        mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        canvas.draw(state, images)

    return chunk_and_frame


def metaworld_floor(options: Options, *, whole_step: bool = False) -> Callable[[], None]:
    import mujoco

    from vla_rlaif.envs.metaworld import MetaWorldTask

    task = MetaWorldTask(
        tasks=("push-v3",),
        cameras=("corner2",),
        image_size=options.image_size,
        renderer="egl",
        fast_render=True,
        randomize={},
    )
    task.reset(0)
    env = task._env
    env.max_path_length = 10**9
    images = np.empty((1, options.image_size, options.image_size, 3), np.uint8)
    still = np.zeros(4, np.float32)

    def chunk_and_frame() -> None:
        if whole_step:
            for _ in range(options.chunk):
                env.step(still)
        else:
            mujoco.mj_step(env.model, env.data, nstep=env.frame_skip * options.chunk)
        task.render(images)

    return chunk_and_frame


def pusht_floor(options: Options, *, whole_step: bool = False) -> Callable[[], None]:
    from vla_rlaif.envs.pusht import make_env

    env = make_env(image_size=options.image_size)
    env.reset(seed=0)
    suite: Any = env.unwrapped
    middle = np.array([256, 256], np.float32)

    def chunk_and_frame() -> None:
        if whole_step:
            for _ in range(options.chunk):
                suite.step(middle)
        else:
            for _ in range(10 * options.chunk):
                suite.space.step(suite.dt)
        env.render()

    return chunk_and_frame


if __name__ == "__main__":
    main(tyro.cli(Options))
