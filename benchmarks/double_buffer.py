"""What double buffering brings: whole rollouts with `env.double_buffer` off and on, the same act batch on both sides.

Policies: "away" waits and computes nothing, as one on a GPU does for this process; "tiny octo" computes on the same
cores as the env, so that only waiting can be saved. Sides take turns; medians, and medians of ratios of neighbours.

    python benchmarks/double_buffer.py --suite tabletop --away-ms 100
    python benchmarks/double_buffer.py --suite metaworld --num-envs 16 --away-ms 300
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import tyro

from vla_rlaif.build import build_env
from vla_rlaif.env_config import EnvConfig, GymnasiumConfig, MetaWorldConfig, TabletopConfig
from vla_rlaif.rollout import rollout, train_starts
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights


@dataclass(frozen=True, kw_only=True)
class Options:
    suite: Literal["tabletop", "metaworld", "pusht"] = "tabletop"
    policies: tuple[Literal["away", "tiny octo"], ...] = ("away", "tiny octo")
    num_envs: int = 64
    chunk: int = 4
    decisions: int = 4
    """Of an episode."""
    image_size: int = 64
    """Pixels."""
    away_ms: float = 100.0
    """What policy "away" takes for a decision of all members; for a half of them half of it."""
    cores: int = os.cpu_count() or 1
    repetitions: int = 5


@dataclass
class Away:
    """Random actions after some time, in proportion to the rows."""

    spec: EnvSpec
    row_s: float
    version: int = 0
    window: int = 1
    seconds: float = field(default=0.0)

    def act(self, obs: Observation, seeds: np.ndarray, *, noise_scale: float = 1.0) -> Decision:
        time.sleep(len(seeds) * self.row_s)
        shape = (self.spec.chunk, self.spec.action_dim)
        action = np.stack([np.random.default_rng(int(s)).uniform(-1, 1, shape) for s in seeds])
        return Decision(action=action, logp=np.zeros((len(seeds), 1)), trace={})

    def load(self, weights: Weights, version: int) -> None: ...


def main(options: Options) -> None:
    print(f"{options.suite}, {options.num_envs} members, chunk {options.chunk}, {options.cores} cores")
    for policy in options.policies:
        measure(options, policy)


def measure(options: Options, policy: str) -> None:
    envs = {name: build_env(config_of(options, is_double)) for name, is_double in (("off", False), ("on", True))}
    act_batch = options.num_envs // 2
    acting = make_policy(options, policy, envs["off"].spec)
    starts = train_starts(0, 0, options.num_envs, 1)
    play = {
        name: timed(lambda env=env: rollout(acting, env, starts, seed=0, act_batch=act_batch))
        for name, env in envs.items()
    }
    for run in play.values():
        run()  # warm up
    found: dict[str, list[float]] = {name: [] for name in play}
    for _ in range(options.repetitions):
        for name, run in play.items():
            found[name].append(run())
    for name, seconds in found.items():
        rate = options.num_envs * options.decisions / statistics.median(seconds)
        print(f"{policy:10} double buffer {name:4}{statistics.median(seconds):8.2f} s  {rate:7.0f} decisions/s")
    ratio = statistics.median(off / on for off, on in zip(found["off"], found["on"], strict=True))
    print(f"{policy:10} on is {ratio:.2f} x as fast as off")
    for env in envs.values():
        env.close()


def timed(run: Callable[[], Any]) -> Callable[[], float]:
    def seconds() -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    return seconds


def make_policy(options: Options, policy: str, spec: EnvSpec) -> Any:
    if policy == "away":
        return Away(spec, options.away_ms / 1e3 / options.num_envs)
    from vla_rlaif.policies.octo.construct import from_scratch
    from vla_rlaif.policy_config import OctoConfig

    return from_scratch(OctoConfig(), spec, seed=0)


def config_of(options: Options, is_double: bool) -> EnvConfig:
    """As many workers and threads on both sides as there are cores for each half: a half alone can use them all."""
    shared: dict[str, Any] = {"num_envs": options.num_envs, "chunk": options.chunk, "double_buffer": is_double}
    shared |= {"max_steps": options.chunk * options.decisions, "image_size": options.image_size}
    if options.suite == "tabletop":
        return TabletopConfig(task="push", threads=options.cores, success_radius=1e-9, **shared)
    shared["workers"] = 2 * options.cores if is_double else options.cores
    if options.suite == "metaworld":
        return MetaWorldConfig(tasks=("push-v3",), **shared)
    return GymnasiumConfig(
        factory="vla_rlaif.envs.pusht:make_env",
        options={"image_size": options.image_size},
        cameras={"top": "render"},
        state=("agent_pos",),
        instructions=("push the block onto the target",),
        **shared,
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
