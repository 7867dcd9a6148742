"""Where the time of a training step goes: seconds per phase and learned samples a second.

    python benchmarks/train_step.py --config configs/tabletop_reach.yaml --steps 12 --out train_step.json

Runs the real `train()` from a random policy (phases cost the same whatever the policy can do, but for episodes that end
early) and reports medians over the steps after the first two, which compile.
"""

import json
import os
import platform
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from vla_rlaif.build import build_env, build_parts
from vla_rlaif.config import RunConfig, load_config
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.start import start_policy
from vla_rlaif.train import train

PHASES = ("rollout", "physics", "render", "policy", "reward", "update")
COMPILING = 2  # steps left out


@dataclass(frozen=True)
class Options:
    config: Path = Path("configs/tabletop_reach.yaml")
    steps: int = 12
    out: Path | None = None  # JSON file to write


def main(options: Options) -> None:
    config = load_config(options.config)
    loop = config.loop.model_copy(update={"steps": options.steps, "validate_every": 10**6})
    config = config.model_copy(update={"warm_start": None, "loop": loop})
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(config, Path(folder))
    timed = lines[COMPILING:]
    median = {phase: statistics.median(line[f"time/{phase}_s"] for line in timed) for phase in PHASES}
    refits = [line["reward/fit_s"] for line in timed if "reward/fit_s" in line]
    decisions = statistics.median(line["rollout/decisions"] for line in timed)
    env_steps = statistics.median(line["rollout/env_steps"] for line in timed)
    step = median["rollout"] + median["reward"] + median["update"]
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "step_s": step,
        **{f"{phase}_s": value for phase, value in median.items()},
        "refit_s": statistics.median(refits) if refits else None,
        "env_steps_per_s": env_steps / median["rollout"],
        "decisions_per_s": decisions / median["rollout"],
        "samples_per_s_of_update": decisions * config.learner.epochs / median["update"],
        "episodes_per_s": config.env.num_envs / step,
    }
    for name, value in result.items():
        print(f"{name:26} {value if isinstance(value, str | None) else format(value, '.4g')}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


def measure(config: RunConfig, folder: Path) -> list[dict]:
    env = build_env(config.env)
    try:
        policy = start_policy(config, env, folder, print)
        parts = build_parts(config, env, policy, folder)
        with MetricsLog(folder) as log:
            # One step short of the end: the last step of a run validates.
            train(config, parts, log, folder, resume=False, say=print, until=config.loop.steps - 1)
        return read_metrics(folder / "metrics.jsonl")
    finally:
        env.close()


if __name__ == "__main__":
    main(tyro.cli(Options))
