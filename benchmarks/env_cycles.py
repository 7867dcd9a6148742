"""Whether envs always start and stop, and whether memory stays flat: the goals are no hang in 1,000 starts and no
growth over 10,000 episodes.

    python benchmarks/env_cycles.py --suite pusht --cycles 1000 --episodes 10000

A cycle is what a run does at its ends: start (worker processes with the suite imported and an OpenGL context each; the
tabletop makes its contexts in this process), reset, one env step with a frame, stop. It is played with a member a
worker, since more of them start no more. Exits with status 1 if a cycle failed, or if memory grows by more than
``--growth``.
"""

import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from vla_rlaif.build import build_env
from vla_rlaif.env_config import EnvConfig, GymnasiumConfig, LiberoConfig, MetaWorldConfig, TabletopConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    suite: Literal["tabletop", "pusht", "metaworld", "libero"] = "pusht"
    cycles: int = 1000
    episodes: int = 10_000
    num_envs: int = 16
    """For the episodes; a cycle has one a worker."""
    workers: int = 2
    max_steps: int = 4
    """Env steps of an episode."""
    draw: bool = True
    """Without, no OpenGL context is made; of Meta-World and PushT."""
    growth: float = 1.0
    """MB that memory may grow over 1,000 episodes or cycles, after the first tenth of them."""
    interpreter: Path | None = None
    """Of LIBERO."""


def main(options: Options) -> None:
    failed, *grown = *cycles(options), episodes(options)
    sys.exit(1 if failed or max(grown) > options.growth else 0)


def cycles(options: Options) -> tuple[int, float]:
    """Play all cycles; how many failed, and the growth of this process."""
    seconds: list[float] = []
    sizes: list[float] = []
    failed, before = 0, leftovers()
    for number in range(options.cycles):
        begun = time.monotonic()
        try:
            cycle(options, number)
        except RuntimeError:  # a worker that hung or died; the rest of the cycles tells how often
            failed += 1
            traceback.print_exc()
        seconds.append(time.monotonic() - begun)
        sizes.append(memory_mb())
        if (number + 1) % 100 == 0:
            print(f"{number + 1} cycles, {failed} failed, the last 100 took {sum(seconds[-100:]):.0f} s", flush=True)
    if seconds:
        print(
            f"{options.suite}: {options.cycles} starts and stops, {failed} failed or hung; seconds each: median "
            f"{np.median(seconds):.2f}, slowest {max(seconds):.2f}; children and descriptors {before} -> {leftovers()}"
        )
    return failed, growth("starts and stops", sizes, 1)


def cycle(options: Options, number: int) -> None:
    env = build_env(config_of(options, options.workers))
    try:
        start = env.reset(number + np.arange(env.num_envs))
        now = env.step(np.zeros((env.num_envs, 1, env.spec.action_dim)))
    finally:
        env.close()
    if not (start.valid.all() and now.valid.all()):
        raise RuntimeError(f"a worker failed in cycle {number}")


def episodes(options: Options) -> float:
    """Play all episodes; the growth of driver and workers."""
    env = build_env(config_of(options, options.num_envs))
    action = np.zeros((env.num_envs, options.max_steps, env.spec.action_dim))
    rounds = -(-options.episodes // env.num_envs)
    sizes = []
    for i in range(rounds):
        env.reset(i * env.num_envs + np.arange(env.num_envs))
        if not env.step(action).done.all():
            raise RuntimeError("an episode did not end with its last step")
        sizes.append(memory_mb())
    env.close()
    return growth("episodes", sizes, env.num_envs)


def growth(what: str, sizes: list[float], each: int) -> float:
    """MB per 1,000, by the line through all ``sizes`` but the first tenth, which fills caches; 0 if there are too few.
    ``each``: how many of what lie between two sizes."""
    settled = np.array(sizes[len(sizes) // 10 :])
    if len(settled) < 3:
        return 0.0
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0]) / each * 1000
    print(
        f"{len(sizes) * each} {what}: memory {settled[0]:.0f} -> {settled[-1]:.0f} MB, most {settled.max():.0f}; "
        f"{slope:+.2f} MB per 1,000",
        flush=True,
    )
    return slope


def config_of(options: Options, num_envs: int) -> EnvConfig:
    steps = options.max_steps
    if options.suite == "tabletop":
        return TabletopConfig(task="push", num_envs=num_envs, chunk=steps, max_steps=steps)
    processes = {"num_envs": num_envs, "workers": options.workers, "chunk": steps, "max_steps": steps}
    if options.suite == "metaworld":
        blind = {} if options.draw else {"observation": "full", "cameras": ()}
        return MetaWorldConfig.model_validate(processes | blind)
    if options.suite == "libero":
        return LiberoConfig.model_validate(processes | {"interpreter": options.interpreter, "image_size": 64})
    pusht = {
        "factory": "vla_rlaif.envs.pusht:make_env",
        "cameras": {"top": "render"} if options.draw else {},
        "state": ("agent_pos",),
        "instructions": ("push the block onto the target",),
        "image_size": 96,
    }
    return GymnasiumConfig.model_validate(processes | pusht)


def memory_mb() -> float:
    """Resident memory of this process and its children."""
    pids = [os.getpid(), *children()]
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def children() -> list[int]:
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()]


def leftovers() -> tuple[int, int]:
    """What a stop must not leave: child processes, and open descriptors."""
    return len(children()), len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main(tyro.cli(Options))
