"""The floors of envs.py: what a suite cannot be played faster than, in one thread.

Each maker returns a function that plays a chunk of random actions and draws a frame: with the suite's bare physics, or
with its whole step (``whole_step``), in which it also observes and rewards.
"""

import itertools
import time
from collections.abc import Callable
from threading import Barrier
from typing import Any

import numpy as np

ENDLESS = 240  # env steps: no episode ends while the clock runs (PushT's limit is 300)
_floor: list[tuple[Callable[[], None], Barrier]] = []  # of this process


def start_floor(make: Callable[[], Callable[[], None]], together: Barrier) -> None:
    """What a process of a pool begins with. ``together`` is shared with those that play at the same time."""
    _floor.append((make(), together))


def floor_rate(seconds: float) -> tuple[float, float]:
    """Chunks a second of this process, and the CPU seconds of each."""
    ((chunk_and_frame, together),) = _floor
    together.wait()
    chunks, begun, cpu = 0, time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - begun) < seconds:
        chunk_and_frame()
        chunks += 1
    return chunks / spent, (time.process_time() - cpu) / chunks


def tabletop_floor(image_size: int, chunk: int) -> Callable[[], None]:
    """Follows the joint targets that the controller found for random actions, without finding them again."""
    import mujoco

    from vla_rlaif.envs.tabletop.gl_canvas import GLCanvas
    from vla_rlaif.envs.tabletop.physics import SUBSTEPS
    from vla_rlaif.envs.tabletop.scene import CAMERAS, load_model

    model = load_model(image_size)
    start, targets = random_play(model)
    data, canvas = mujoco.MjData(model), GLCanvas(model, CAMERAS, image_size, "egl")
    images = np.empty((len(CAMERAS), image_size, image_size, 3), np.uint8)
    state, played = start.copy(), itertools.count()

    def chunk_and_frame() -> None:
        for _ in range(chunk):
            step = next(played) % ENDLESS
            if step == 0:
                mujoco.mj_setState(model, data, start, mujoco.mjtState.mjSTATE_INTEGRATION)
            data.ctrl[:] = targets[step]
            mujoco.mj_step(model, data, nstep=SUBSTEPS)
        mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        canvas.draw(state, images)

    return chunk_and_frame


def random_play(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """The state that a tabletop member starts from, and the controls "ENDLESS 8" of random actions from there on."""
    import mujoco

    from vla_rlaif.envs.tabletop.physics import Physics
    from vla_rlaif.envs.tabletop.tasks import TASKS

    physics, rng = Physics(model, num_envs=1, num_threads=1), np.random.default_rng(0)
    physics.reset([0], TASKS["push"])
    start, data, targets = physics.states[0].copy(), mujoco.MjData(model), []
    for _ in range(ENDLESS):
        physics.advance(np.array([0]), rng.uniform(-1, 1, (1, 7)))
        mujoco.mj_setState(model, data, physics.states[0], mujoco.mjtState.mjSTATE_INTEGRATION)
        targets.append(data.ctrl.copy())
    return start, np.array(targets)


def metaworld_floor(image_size: int, chunk: int, *, whole_step: bool = False) -> Callable[[], None]:
    import mujoco

    from vla_rlaif.envs.metaworld import MetaWorldTask

    task = MetaWorldTask(
        tasks=("push-v3",),
        observation="proprio",
        cameras=("corner2",),
        image_size=image_size,
        renderer="egl",
        fast_render=True,
        randomize={},
    )
    task.reset(0)
    env, rng = task._env, np.random.default_rng(0)
    env.max_path_length = 10**9
    images = np.empty((1, image_size, image_size, 3), np.uint8)

    def chunk_and_frame() -> None:
        for action in rng.uniform(-1, 1, (chunk, 4)).astype(np.float32):
            if whole_step:
                env.step(action)
            else:  # what the suite's step does before it observes
                env.set_xyz_action(action[:3])
                env.data.ctrl[:] = action[3], -action[3]
                mujoco.mj_step(env.model, env.data, nstep=env.frame_skip)
        task.render(images)

    return chunk_and_frame


def pusht_floor(image_size: int, chunk: int, *, whole_step: bool = False) -> Callable[[], None]:
    from vla_rlaif.envs.pusht import make_env

    env = make_env(image_size=image_size)
    env.reset(seed=0)
    suite: Any = env.unwrapped
    rng = np.random.default_rng(0)

    def chunk_and_frame() -> None:
        for target in rng.uniform(0, 512, (chunk, 2)).astype(np.float32):
            if whole_step:
                suite.step(target)
            else:
                follow(suite, *target.tolist())
        env.render()

    return chunk_and_frame


def follow(suite: Any, x: float, y: float) -> None:
    """The suite's control and physics of one env step, with plain floats where it has vectors."""
    agent, space, dt, k_p, k_v = suite.agent, suite.space, suite.dt, suite.k_p, suite.k_v
    for _ in range(int(1 / (dt * suite.control_hz))):
        (here_x, here_y), (speed_x, speed_y) = agent.position, agent.velocity
        push_x, push_y = k_p * (x - here_x) - k_v * speed_x, k_p * (y - here_y) - k_v * speed_y
        agent.velocity = speed_x + push_x * dt, speed_y + push_y * dt
        space.step(dt)
