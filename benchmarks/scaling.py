"""Rollout and update throughput, and how long each pool has nothing to do, on 1, 2, 4 and 8 GPUs of one node.

    python benchmarks/scaling.py --config configs/smolvla_base_node.yaml --out scaling.json
    python benchmarks/scaling.py --dry-run              the placements only, on any machine

On one GPU learner and rollouts share it; on more each side has half of them. Episodes a step grow with the rollout
workers, so every worker plays as many as the one worker of the first run. Steps are played one ahead. The policy starts
without a warm start: phases cost the same whatever it can do, but for episodes that end early. Medians over the steps
after the first three, which compile.
"""

import json
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from vla_rlaif.config import RunConfig, load_config, parse_config
from vla_rlaif.metrics import read_metrics

COMPILING = 3  # steps left out


@dataclass(frozen=True, kw_only=True)
class Options:
    config: Path = Path("configs/octo_small_reach.yaml")
    gpus: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of GPUs; those that the machine does not have are left out."""
    steps: int = 13
    cpus: int = 8
    """Of each rollout worker, for its envs."""
    dry_run: bool = False
    """Print the placements and run nothing."""
    out: Path | None = None
    """JSON file to write."""


def main(options: Options) -> None:
    base = load_config(options.config)
    found = count_gpus()
    if not found and not options.dry_run:
        raise SystemExit(
            "benchmarks/scaling.py measures GPUs, and nvidia-smi finds none on this machine. `--dry-run` prints the "
            "placements; benchmarks/overlap.py measures the overlap of rollouts and updates on CPUs."
        )
    results = {}
    for num in options.gpus:
        config = on_gpus(base, num, options)
        if options.dry_run:
            print(f"{num} GPUs: {describe(config)}")
        elif num > found:
            print(f"{num} GPUs: left out, the machine has {found}")
        else:
            results[num] = measure(config)
            print(f"{num} GPUs: " + ", ".join(f"{name} {value:.4g}" for name, value in results[num].items()))
    if options.out is not None:
        options.out.write_text(json.dumps({"config": str(options.config), "gpus": results}, indent=1))


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def on_gpus(base: RunConfig, num: int, options: Options) -> RunConfig:
    """Raises ValueError if the config's minibatch does not split over the learner's GPUs."""
    each, players = max(1, num // 2), max(1, num // 2)
    learner: dict[str, Any] = {"workers": 1, "gpus": each}
    if base.policy.backend == "torch":
        learner = {"workers": each, "gpus": 1}
    rollout: dict[str, Any] = {"workers": players, "gpus": 1, "cpus": options.cpus}
    if num == 1:
        learner["share"] = rollout["share"] = 0.5
    cluster = {
        "type": "ray",
        "address": "local",
        "mode": "colocated" if num == 1 else "disaggregated",
        "roles": {"learner": learner, "rollout": rollout, "reward": {"workers": 1, "cpus": 1}},
    }
    data = base.model_dump(mode="json")
    data["env"]["num_envs"] = base.env.num_envs * players
    data["learner"]["devices"] = None
    data["loop"] |= {"steps": options.steps, "overlap": True, "staleness": 1, "stored": None}
    data["loop"] |= {"validate_every": 10**6, "validation_episodes": players, "checkpoint_every": 10**6}
    return parse_config({**data, "warm_start": None, "cluster": cluster}, source=f"{options.config} on {num} GPUs")


def describe(config: RunConfig) -> str:
    assert config.cluster.type == "ray"
    roles = config.cluster.roles.present().items()
    placed = ", ".join(f"{name} {role.workers} x {role.gpus:g} GPU {role.cpus} CPU" for name, role in roles)
    return f"{config.cluster.mode}; {placed}; {config.env.num_envs} episodes a step"


def measure(config: RunConfig) -> dict[str, float]:
    from vla_rlaif.build_cluster import cluster_stage

    with tempfile.TemporaryDirectory() as folder:
        here = config.model_copy(update={"out": Path(folder)})
        with cluster_stage(here, Path(folder), lambda: None, print) as stage:
            stage.train(resume=False)
        lines = read_metrics(Path(folder) / "metrics.jsonl")
    lines = [line for line in lines[COMPILING:] if "validation/success" not in line]
    median = lambda key: statistics.median(line[key] for line in lines)  # noqa: E731
    decisions = median("rollout/decisions")
    return {
        "step_s": median("time/step_s"),
        "env_steps_per_s": median("rollout/env_steps") / median("time/rollout_s"),
        "decisions_per_s": decisions / median("time/rollout_s"),
        "samples_per_s_of_update": decisions * config.learner.epochs / median("time/update_s"),
        "sync_s": median("time/sync_s"),
        "idle_rollout": median("idle/rollout"),
        "idle_learner": median("idle/learner"),
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
