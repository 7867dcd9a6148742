"""Small runs for the tests of what spreads a run over workers: the same config here and on a cluster."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_rlaif.build import build_env
from vla_rlaif.build_cluster import ClusterStage, RunWorkers
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.dist.cluster import Cluster
from vla_rlaif.metrics import read_metrics
from vla_rlaif.run import LocalStage

LEARNED = {
    "type": "preference",
    "budget": 100,
    "initial_labels": 40,
    "initial_episodes": 64,
    "labels_per_refresh": 20,
    "refresh_every": 2,
    "fit_steps": 20,
}
BASE: dict[str, Any] = {
    "name": "test",
    "env": {"type": "point_reach", "num_envs": 64},
    "policy": {"type": "gaussian"},
    "reward": LEARNED,
    "algorithm": {"group_size": 8, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.01},
    "learner": {"lr": 0.05, "minibatch": 128, "ema": 0.5, "target_kl": None, "timeout_s": 60},
    "loop": {"steps": 4, "validate_every": 2, "validation_episodes": 40, "checkpoint_every": 2, "act_batch": 32},
    "cluster": {
        "type": "ray",
        "roles": {"rollout": {"workers": 2}, "reference": {"workers": 1}},
        "faults": {"rollout_timeout_s": 20, "reward_timeout_s": 20, "start_timeout_s": 120, "silent_s": 60},
    },
}


def config_of(folder: Path, **sections: Any) -> RunConfig:
    folder.mkdir(exist_ok=True, parents=True)
    return parse_config({**BASE, "out": str(folder), **sections}, source="test")


def run_here(folder: Path, **sections: Any) -> list[dict[str, Any]]:
    config = config_of(folder, **sections)
    LocalStage(config, folder, build_env(config.env), print).train(resume=False)
    return read_metrics(folder / "metrics.jsonl")


def run_on(
    workers: Cluster,
    folder: Path,
    *,
    resume: bool = False,
    meanwhile: Callable[[ClusterStage], None] = lambda stage: None,
    say: Callable[[str], None] = print,
    **sections: Any,
) -> list[dict[str, Any]]:
    """``meanwhile`` is called when the workers are there, before training begins."""
    stage = ClusterStage(config_of(folder, **sections), folder, workers, say)
    meanwhile(stage)
    stage.train(resume=resume)
    return read_metrics(folder / "metrics.jsonl")


def after_steps(stage: ClusterStage, num: int, strike: Callable[[RunWorkers], None]) -> None:
    """In a thread: ``strike(workers)`` once the run in progress has written ``num`` lines of metrics."""
    path = stage.run_dir / "metrics.jsonl"

    def wait():
        until = time.monotonic() + 60
        while not (path.exists() and path.read_bytes().count(b"\n") >= num) and time.monotonic() < until:
            time.sleep(0.002)
        strike(stage.workers)

    threading.Thread(target=wait, daemon=True).start()


def comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Everything but times, and what a run in one process does not have."""
    other = ("time/", "idle/", "sync/", "env/", "minutes", "reward/fit_s", "jax/", "groups/lost", "episodes/carried")
    return [{k: v for k, v in line.items() if not k.startswith(other)} for line in lines]
