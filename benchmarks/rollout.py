"""How fast rollouts are, side by side: ``Tabletop``, gymnasium's AsyncVectorEnv of the same task, and the bare floor.

The floor is what nothing can beat: MuJoCo's own steps and images for the same states, without control, observations or
Python around them. "one thread x cores" is measured on one thread and assumes perfect scaling, which needs an idle
machine; "all cores" runs the same work on as many threads as there are cores, so it feels other load as we do.

Sides take turns, so that a change of load meets them all, and medians are reported.

    python benchmarks/rollout.py --out rollout.json
"""

import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import gymnasium
import mujoco
import numpy as np
import tyro

from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.envs.tabletop.gl_canvas import CanvasThread, GLCanvas
from vla_rlaif.envs.tabletop.gym_env import TabletopEnv
from vla_rlaif.envs.tabletop.physics import SUBSTEPS
from vla_rlaif.envs.tabletop.scene import CAMERAS, load_model
from vla_rlaif.types import Observation

Act = Callable[[Observation], np.ndarray]  # a chunk for every member, "N H A"
ENDLESS = 10**9  # steps: no episode ends while the clock runs
UNREACHABLE = 1e-9  # metres, a success radius


@dataclass(frozen=True, kw_only=True)
class Options:
    task: Literal["reach", "push", "pick_place"] = "push"
    num_envs: int = 64
    async_envs: int = 4
    """Processes of AsyncVectorEnv: one env each."""
    chunk: int = 4
    image_size: int = 64
    """Pixels."""
    cores: int = os.cpu_count() or 1
    decisions: int = 2
    """Per repetition and member."""
    repetitions: int = 9
    out: Path | None = None
    """Where to write all samples as JSON."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One repetition of one side. Seconds of wall time; ``waiting`` is what the other parts leave over."""

    env_steps: int
    decisions: int
    wall: float
    cpu: float = float("nan")  # of this process; AsyncVectorEnv computes in others
    physics: float = float("nan")
    render: float = float("nan")
    policy: float = float("nan")
    waiting: float = float("nan")


def main(options: Options) -> None:
    sides, notes = build_sides(options)
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for side in sides.values():
        next(side)  # warm up
    for _ in range(options.repetitions):
        for name, side in sides.items():
            samples[name].append(next(side))
    for side in sides.values():
        side.close()  # pyright: ignore[reportAttributeAccessIssue] (all are generators)
    report = summarise(samples)
    print_report(options, report, notes)
    if options.out is not None:
        machine = {"platform": platform.platform(), "cores": options.cores, "load": os.getloadavg()}
        raw = {name: [asdict(sample) for sample in side] for name, side in samples.items()}
        text = json.dumps(
            {"options": asdict(options), "machine": machine, "report": report, "notes": notes, "samples": raw},
            indent=1,
            default=str,
        )
        options.out.write_text(text)


def build_sides(options: Options) -> tuple[dict[str, Iterator[Sample]], list[str]]:
    """Generators that play and yield one sample each time; and why a side is missing."""
    # The worker processes come first: they must not be copies of a process that has rendered.
    sides = {"async, random": async_side(options)}
    next(sides["async, random"])
    sides["ours, random"] = tabletop_side(options, lambda env: random_policy(env))
    sides["ours, expert"] = tabletop_side(options, expert_policy)
    notes = []
    try:
        from vla_rlaif.policies.octo.construct import from_scratch
        from vla_rlaif.policy_config import OctoConfig
    except ImportError as error:
        notes.append(f"ours, tiny octo: skipped, {error}")
    else:

        def octo_policy(env: Tabletop) -> Act:
            policy = from_scratch(OctoConfig(), env.spec, seed=0)
            seeds = np.arange(env.num_envs, dtype=np.uint32)
            return lambda obs: policy.act(obs, seeds).action

        sides["ours, tiny octo"] = tabletop_side(options, octo_policy)
    sides["floor, one thread x cores"] = floor_side(options, num_threads=1)
    sides["floor, all cores"] = floor_side(options, num_threads=options.cores)
    return sides, notes


def tabletop_side(options: Options, make_policy: Callable[[Tabletop], Act]) -> Iterator[Sample]:
    env = make_tabletop(options)
    act = make_policy(env)
    obs = env.reset(np.arange(env.num_envs)).obs
    try:
        while True:
            before, policy, executed = env.seconds, 0.0, 0
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(options.decisions):
                thought = time.perf_counter()
                action = act(obs)
                policy += time.perf_counter() - thought
                after = env.step(action)
                obs = after.obs
                executed += int(after.executed.sum())
            wall = time.perf_counter() - start
            physics, render = (env.seconds[part] - before[part] for part in ("physics", "render"))
            yield Sample(
                env_steps=executed,
                decisions=options.decisions * env.num_envs,
                wall=wall,
                cpu=time.process_time() - cpu,
                physics=physics,
                render=render,
                policy=policy,
                waiting=wall - physics - render - policy,
            )
    finally:
        env.close()


def async_side(options: Options) -> Iterator[Sample]:
    make = functools.partial(
        TabletopEnv, options.task, image_size=options.image_size, max_steps=ENDLESS, success_radius=UNREACHABLE
    )
    env = gymnasium.vector.AsyncVectorEnv([make] * options.async_envs, shared_memory=True, context="spawn")
    env.reset(seed=list(range(options.async_envs)))
    rng = np.random.default_rng(0)
    num_steps = options.decisions * options.chunk
    try:
        while True:
            start = time.perf_counter()
            for _ in range(num_steps):
                env.step(rng.uniform(-1, 1, (options.async_envs, 7)).astype(np.float32))
            yield Sample(
                env_steps=num_steps * options.async_envs,
                decisions=options.decisions * options.async_envs,
                wall=time.perf_counter() - start,
            )
    finally:
        env.close()


def floor_side(options: Options, num_threads: int) -> Iterator[Sample]:
    """MuJoCo's steps and two images a decision, from states that random play visits."""
    states = visited_states(options)
    model = load_model(options.image_size)
    threads = [CanvasThread(lambda: GLCanvas(model, CAMERAS, options.image_size, "egl")) for _ in range(num_threads)]
    for thread in threads:
        thread.ready.result()

    def work(rows: np.ndarray, canvas: GLCanvas) -> None:
        data = mujoco.MjData(model)
        images = np.empty((len(CAMERAS), options.image_size, options.image_size, 3), np.uint8)
        for state in rows:
            mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
            mujoco.mj_step(model, data, nstep=SUBSTEPS * options.chunk)
            canvas.draw(state, images)

    try:
        while True:
            start, cpu = time.perf_counter(), time.process_time()
            calls = [t.submit(functools.partial(work, states[i::num_threads])) for i, t in enumerate(threads)]
            for call in calls:
                call.result()
            scale = options.cores / num_threads  # perfect scaling, where it is assumed
            yield Sample(
                env_steps=len(states) * options.chunk,
                decisions=len(states),
                wall=(time.perf_counter() - start) / scale,
                cpu=time.process_time() - cpu,
            )
    finally:
        for thread in threads:
            thread.stop()


def visited_states(options: Options) -> np.ndarray:
    env = make_tabletop(options)
    env.reset(np.arange(env.num_envs))
    act = random_policy(env)
    states = []
    for _ in range(2):
        env.step(act(None))
        states += [env.snapshot(i).state for i in range(min(16, env.num_envs))]
    env.close()
    return np.stack(states)


def make_tabletop(options: Options) -> Tabletop:
    return Tabletop(
        options.task,
        num_envs=options.num_envs,
        image_size=options.image_size,
        chunk=options.chunk,
        max_steps=ENDLESS,
        success_radius=UNREACHABLE,
        physics_threads=options.cores,
        render_threads=options.cores,
    )


def random_policy(env: Tabletop) -> Callable[[Observation | None], np.ndarray]:
    rng = np.random.default_rng(0)
    return lambda obs: rng.uniform(-1, 1, (env.num_envs, env.spec.chunk, env.spec.action_dim))


def expert_policy(env: Tabletop) -> Act:
    """Its first action, held for the chunk: good enough to bring the arm into contact."""
    return lambda obs: np.repeat(env.expert()[:, None], env.spec.chunk, axis=1)


def summarise(samples: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    """Medians over the repetitions: rates per second, and milliseconds a decision."""
    report = {}
    for name, side in samples.items():
        report[name] = {
            "env_steps_per_s": statistics.median(s.env_steps / s.wall for s in side),
            "decisions_per_s": statistics.median(s.decisions / s.wall for s in side),
        }
        for part in ("cpu", "physics", "render", "policy", "waiting"):
            report[name][f"{part}_ms"] = statistics.median(1e3 * getattr(s, part) / s.decisions for s in side)
    # The ratio of neighbours in time, then the median: the load at that moment cancels.
    ours = samples["ours, random"]
    report["ours, random / other"] = {
        name: statistics.median(
            (a.env_steps / a.wall) / (b.env_steps / b.wall) for a, b in zip(ours, samples[name], strict=True)
        )
        for name in ("async, random", "floor, one thread x cores", "floor, all cores")
    }
    floor_cpu = report["floor, one thread x cores"]["cpu_ms"]
    report["ours, random / other"]["floor, CPU time"] = floor_cpu / report["ours, random"]["cpu_ms"]
    return report


def print_report(options: Options, report: dict[str, dict[str, float]], notes: list[str]) -> None:
    print(f"{options.task}, {options.num_envs} members, chunk {options.chunk}, 2 x {options.image_size} px images")
    print(
        f"{'':27}{'steps/s':>9}{'dec/s':>8}   ms a decision: cpu{'physics':>9}{'render':>8}{'policy':>8}{'waiting':>9}"
    )
    ratios = report["ours, random / other"]
    for name, row in report.items():
        if row is not ratios:
            parts = [row[f"{part}_ms"] for part in ("cpu", "physics", "render", "policy", "waiting")]
            print(f"{name:27}{row['env_steps_per_s']:9.0f}{row['decisions_per_s']:8.0f}", end="")
            print("{:21.2f}{:9.2f}{:8.2f}{:8.2f}{:9.2f}".format(*parts).replace("nan", "  -"))
    for name, ratio in ratios.items():
        print(f"ours, random / {name}: {ratio:.2f}")
    for note in notes:
        print(note)


if __name__ == "__main__":
    main(tyro.cli(Options))
