"""What the reference of the KL costs: in the learner, which shares the trunk's pass with it, and on its own worker.

    python benchmarks/reference.py --config configs/tabletop_reach.yaml --rows 256 --repetitions 20 --out reference.json

One epoch of the config's learner from its start policy (without a warm start), on decisions that the policy took of
random images; for every way of tuning. Seconds, the best of the repetitions:

    update          with the reference computed by the learner: what nothing trains runs once for policy and reference
    update_given    with its means given, as a reference worker gives them: the learner does nothing for it
    kl_cost         update - update_given. With everything tuned it is a whole second forward pass, which is what a
                    reference that shares nothing costs; with the head or the last blocks tuned, what is left of it
    worker          the means alone, as a reference worker computes them
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from vla_rlaif.build import build_env, build_learner, build_policy
from vla_rlaif.build_workers import reference_of
from vla_rlaif.config import RunConfig, load_config
from vla_rlaif.policy_config import OctoSettings
from vla_rlaif.tune_config import FullTuning, HeadTuning, LoraTuning
from vla_rlaif.types import Batch, EnvSpec, Observation

TUNES = {"head": HeadTuning(), "full": FullTuning()}
Tune = Literal["head", "lora", "full"]


@dataclass(frozen=True)
class Options:
    config: Path = Path("configs/tabletop_reach.yaml")
    tune: tuple[Tune, ...] = ("head", "lora", "full")
    blocks: int = 2  # that lora adapts, from the last
    rows: int = 64  # decisions: one minibatch, in one piece
    repetitions: int = 5
    out: Path | None = None  # JSON file to write


def main(options: Options) -> None:
    config = load_config(options.config)
    learner = {"minibatch": options.rows, "micro_batches": 1, "epochs": 1, "devices": 1}
    config = config.model_copy(update={"learner": config.learner.model_copy(update=learner)})
    env = build_env(config.env.model_copy(update={"num_envs": config.algorithm.group_size}))
    spec = env.spec
    env.close()
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "config": options.config.name,
        "rows": options.rows,
    }
    for name in options.tune:
        tune = LoraTuning(blocks=options.blocks) if name == "lora" else TUNES[name]
        tuned = config.model_copy(update={"policy": config.policy.model_copy(update={"tune": tune})})
        result[name] = measure(tuned, spec, options)
        print(name, *(f"{key} {value:.4g}" for key, value in result[name].items()))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


def measure(config: RunConfig, spec: EnvSpec, options: Options) -> dict[str, float]:
    policy: Any = build_policy(config.policy, spec, config.seed)
    if isinstance(config.policy, OctoSettings):
        policy.freeze_reference()
    batch = decisions(policy, spec, options.rows)
    learner, reference = build_learner(config, policy, spec), reference_of(config, policy)
    means = reference.means(batch.obs, batch.trace, batch.executed)
    given = replace(batch, reference=means)
    sides: dict[str, Callable[[], Any]] = {
        "update": lambda: learner.update(batch, seed=0),
        "update_given": lambda: learner.update(given, seed=0),
        "worker": lambda: reference.means(batch.obs, batch.trace, batch.executed),
    }
    for run in sides.values():
        run()  # compiles
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(options.repetitions):
        for name, run in sides.items():
            begun = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begun)
    return {f"{name}_s": value for name, value in best.items()} | {"kl_cost_s": best["update"] - best["update_given"]}


def decisions(policy: Any, spec: EnvSpec, rows: int) -> Batch:
    """Of random images; the advantages are random too."""
    rng = np.random.default_rng(0)
    frames = (rows,) if policy.window == 1 else (rows, policy.window)
    shape = (*frames, spec.image_size, spec.image_size, 3)
    obs = Observation(
        images={camera: rng.integers(0, 256, shape, dtype=np.uint8) for camera in spec.cameras},
        state=rng.normal(size=(*frames, spec.state_dim)).astype(np.float32),
        instruction=tuple(spec.instructions[i % len(spec.instructions)] for i in range(rows)),
        frame_ok=None if policy.window == 1 else np.ones(frames, bool),
    )
    decision = policy.act(obs, rng.integers(0, 2**32, rows, dtype=np.uint32))
    return Batch(
        obs=obs,
        trace=decision.trace,
        executed=np.full(rows, spec.chunk),
        advantage=rng.normal(size=rows).astype(np.float32),
        mask=np.ones(rows, bool),
        num_valid=float(rows),
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
