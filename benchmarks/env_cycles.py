"""Whether env workers always start and stop, and whether their memory stays flat: the goals are no hang in 1,000 starts
and no growth over 10,000 episodes.

    python benchmarks/env_cycles.py --suite pusht --cycles 1000 --episodes 10000
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from vla_rlaif.build import build_env
from vla_rlaif.env_config import EnvConfig, GymnasiumConfig, MetaWorldConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    suite: Literal["pusht", "metaworld"] = "pusht"
    cycles: int = 1000
    episodes: int = 10_000
    num_envs: int = 16
    workers: int = 2
    max_steps: int = 4
    """Env steps of an episode."""


def main(options: Options) -> None:
    slowest = max((cycle(options, i) for i in range(options.cycles)), default=0.0)
    print(f"{options.cycles} starts and stops, no hang; the slowest took {slowest:.1f} s")
    env = build_env(config_of(options))
    action = np.zeros((env.num_envs, options.max_steps, env.spec.action_dim))
    rounds = -(-options.episodes // env.num_envs)
    sizes = []
    for i in range(rounds):
        env.reset(i * env.num_envs + np.arange(env.num_envs))
        if not env.step(action).done.all():
            raise RuntimeError("an episode did not end with its last step")
        if i in (rounds // 10, rounds - 1):  # the first tenth fills caches
            sizes.append(memory_mb())
    print(f"{rounds * env.num_envs} episodes; memory of driver and workers {sizes[0]:.0f} -> {sizes[-1]:.0f} MB")
    env.close()


def cycle(options: Options, number: int) -> float:
    """Seconds to start, play one chunk and stop."""
    begun = time.monotonic()
    env = build_env(config_of(options))
    start = env.reset(number + np.arange(env.num_envs))
    now = env.step(np.zeros((env.num_envs, 1, env.spec.action_dim)))
    env.close()
    if not (start.valid.all() and now.valid.all()):
        raise RuntimeError(f"a worker failed in cycle {number}")
    return time.monotonic() - begun


def config_of(options: Options) -> EnvConfig:
    if options.suite == "metaworld":
        return MetaWorldConfig(
            num_envs=options.num_envs, workers=options.workers, chunk=options.max_steps, max_steps=options.max_steps
        )
    return GymnasiumConfig(
        factory="vla_rlaif.envs.pusht:make_env",
        cameras={"top": "render"},
        state=("agent_pos",),
        instructions=("push the block onto the target",),
        image_size=96,
        num_envs=options.num_envs,
        workers=options.workers,
        chunk=options.max_steps,
        max_steps=options.max_steps,
    )


def memory_mb() -> float:
    """Resident memory of this process and its children."""
    me = os.getpid()
    pids = [me, *map(int, Path(f"/proc/self/task/{me}/children").read_text().split())]
    return (
        sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE") / 2**20
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
