"""How long a step takes when rollouts and updates overlap, against the longer of the two.

    python benchmarks/overlap.py                             an env and a learner that sleep: the pipeline itself
    python benchmarks/overlap.py --kind real                 tabletop reach and a small Octo, in one process
    python benchmarks/overlap.py --kind workers --staleness 1   the same, learner and rollouts in processes of their own
    python benchmarks/overlap.py --steps 30 --out overlap.json

Runs the real `train()` sequentially and with steps played ahead, and reports means over the steps after the first
three (which compile) without a validation (both sides stand still then). "of the longer" is the wall time of a step
over the longer of rollouts (with scoring) and update in the same run: 1 is a perfect overlap, 2 none at equal lengths.
"of the longer alone" takes both from the sequential run, so it also counts that the two sides slow each other down.
With `real` and `workers` the number of epochs is first chosen so that rollouts and updates take about equally long.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.interfaces import Learner
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.run import LocalStage
from vla_rlaif.train import train
from vla_rlaif.types import Batch, EnvSpec, Transition, Weights

COMPILING = 3  # steps left out
POINT = {
    "env": {"type": "point_reach", "num_envs": 32},
    "policy": {"type": "gaussian"},
    "reward": {"type": "pixel_distance"},
    "algorithm": {"group_size": 8, "clip_low": 0.2, "clip_high": 0.2},
    "learner": {"minibatch": 64, "epochs": 1, "target_kl": None},
}
TABLETOP = {
    "env": {"type": "tabletop", "task": "reach", "num_envs": 64, "threads": 1},
    "reward": {"type": "preference", "initial_labels": 64, "initial_episodes": 64, "refresh_every": 10**6},  # all live
    "learner": {"epochs": 1, "target_kl": None, "devices": 1},
}
WORKERS = {
    "type": "ray",
    "address": "local",
    "roles": {"learner": {"cpus": 0.9}, "rollout": {"cpus": 0.9}, "reward": {"cpus": 0.2}},  # two cores
}


@dataclass(frozen=True, kw_only=True)
class Options:
    kind: Literal["sleep", "real", "workers"] = "sleep"
    steps: int = 20
    seconds: float = 0.6
    """Of each side, if it sleeps."""
    jitter: float = 0.0
    """Share by which a side that sleeps is longer or shorter, at random."""
    staleness: tuple[int, ...] = (0, 1, 2)
    """0 is sequential."""
    epochs: int | None = None
    """Passes over the data in an update; by default as many as make it as long as the rollouts."""
    out: Path | None = None
    """JSON file to write."""


class SleepingEnv:
    """Point reaching of which every decision takes a while, without using a core."""

    def __init__(self, num_envs: int, pause_s: float, jitter: float) -> None:
        self._env, self._pause_s, self._jitter = PointReach(num_envs), pause_s, jitter
        self._rng = np.random.default_rng(0)

    @property
    def num_envs(self) -> int:
        return self._env.num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    def reset(self, seeds: np.ndarray) -> Transition:
        self._scale = 1 + self._jitter * self._rng.uniform(-1, 1)
        return self._env.reset(seeds)

    def step(self, action: np.ndarray) -> Transition:
        time.sleep(self._pause_s * self._scale)
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()


class SleepingLearner:
    """A learner whose updates take a given time."""

    def __init__(self, learner: Learner, seconds: float, jitter: float) -> None:
        self._learner, self._seconds, self._jitter = learner, seconds, jitter
        self._rng = np.random.default_rng(1)

    @property
    def version(self) -> int:
        return self._learner.version

    def update(self, batch: Batch, seed: int) -> Mapping[str, float]:
        begun = time.perf_counter()
        metrics = self._learner.update(batch, seed)
        wanted = self._seconds * (1 + self._jitter * self._rng.uniform(-1, 1))
        time.sleep(max(0.0, wanted - (time.perf_counter() - begun)))
        return metrics

    def weights(self, *, averaged: bool = False) -> Weights:
        return self._learner.weights(averaged=averaged)

    def trained(self, *, averaged: bool) -> Weights:
        return self._learner.trained(averaged=averaged)

    def state(self) -> Weights:
        return self._learner.state()

    def restore(self, state: Weights) -> None:
        self._learner.restore(state)


def main(options: Options) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    epochs = options.epochs or (1 if options.kind == "sleep" else equal_epochs(options))
    runs = {staleness: timed(options, staleness, epochs) for staleness in options.staleness}
    alone = runs.get(0)
    results: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "kind": options.kind,
        "epochs": epochs,
    }
    for staleness, run in runs.items():
        longer = max(run["gather_s"], run["update_s"])
        run["of the longer"] = run["step_s"] / longer
        if alone is not None:
            run["of the longer alone"] = run["step_s"] / max(alone["gather_s"], alone["update_s"])
        results["sequential" if staleness == 0 else f"staleness {staleness}"] = run
        figures = ", ".join(f"{name} {value:.3f}" for name, value in run.items())
        print(f"{'sequential' if staleness == 0 else f'staleness {staleness}'}: {figures}")
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))


def equal_epochs(options: Options) -> int:
    run = timed(replace(options, steps=COMPILING + 4), 0, 1)
    return max(1, round(run["gather_s"] / run["update_s"]))


def timed(options: Options, staleness: int, epochs: int) -> dict[str, float]:
    """Means over the steps of a run, in seconds; idle shares as they are. Rollouts and wall time of one line are not of
    the same moment, so medians would not fit together."""
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(options, config_of(options, staleness, epochs, Path(folder)))
    lines = [line for line in lines[COMPILING:] if "validation/success" not in line]
    mean = lambda key: statistics.fmean(line[key] for line in lines)  # noqa: E731
    gather_s = mean("time/rollout_s") + mean("time/reward_s")
    idle = {f"idle {pool}": mean(f"idle/{pool}") for pool in ("rollout", "learner")}
    return {"step_s": mean("time/step_s"), "gather_s": gather_s, "update_s": mean("time/update_s"), **idle}


def config_of(options: Options, staleness: int, epochs: int, folder: Path) -> RunConfig:
    data: dict[str, Any] = dict(POINT if options.kind == "sleep" else TABLETOP)
    data["learner"] = {**data["learner"], "epochs": epochs}
    data["loop"] = {"steps": options.steps, "overlap": staleness > 0, "staleness": staleness}
    data["loop"] |= {"validate_every": 10**6, "checkpoint_every": 10**6, "max_refills": 0, "validation_episodes": 8}
    if options.kind == "workers":
        data["cluster"] = WORKERS
    return parse_config({**data, "out": folder / "run"}, source="benchmark")


def measure(options: Options, config: RunConfig) -> list[dict[str, Any]]:
    """The lines of metrics of a whole run."""
    run_dir = config.run_dir
    run_dir.mkdir()
    if options.kind == "sleep":
        sleep(options, config)
    elif options.kind == "real":
        env = build_env(config.env)
        try:
            LocalStage(config, run_dir, env, print).train(resume=False)
        finally:
            env.close()
    else:
        from vla_rlaif.build_cluster import cluster_stage

        with cluster_stage(config, run_dir, lambda: None, print) as stage:
            stage.train(resume=False)
    return read_metrics(run_dir / "metrics.jsonl")


def sleep(options: Options, config: RunConfig) -> None:
    env = SleepingEnv(config.env.num_envs, 0.0, options.jitter)
    env = SleepingEnv(config.env.num_envs, options.seconds / env.spec.max_decisions, options.jitter)
    policy = build_policy(config.policy, env.spec, config.seed)
    parts = build_parts(config, env, policy, config.run_dir)
    learner = SleepingLearner(parts.learner, options.seconds, options.jitter)
    slow = replace(parts, rollouts=LocalRollouts(policy, env), learner=learner)
    with MetricsLog(config.run_dir) as log:
        train(config, slow, log, config.run_dir, resume=False, say=print)


if __name__ == "__main__":
    main(tyro.cli(Options))
