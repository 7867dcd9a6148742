"""A tiny run for a live pool, and checkpoints of it, written by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.pool.work import Work
from vla_rlaif.serve.settings import ServeSettings

WIDTH, STATE = 2, 4  # of point_reach: actions of a chunk, values of the state


def run_config(folder: Path, **loop: Any) -> RunConfig:
    data = {
        "out": str(folder / "run"),
        "env": {"type": "point_reach", "num_envs": 16},
        "policy": {"type": "gaussian"},
        "reward": {"type": "pixel_distance"},
        "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
        "learner": {"lr": 0.02, "epochs": 1, "minibatch": 96, "ema": 0.5, "target_kl": None},
        "loop": {
            **{"steps": 6, "validate_every": 6, "validation_episodes": 16, "checkpoint_every": 2},
            **{"stored": str(folder / "store"), "min_live_share": 0.0, "staleness": 0},
            **loop,
        },
    }
    return parse_config(data, source="test")


def make_work(folder: Path, **loop: Any) -> Work:
    state_dir = folder / "state"
    state_dir.mkdir(parents=True, exist_ok=True)
    serve = ServeSettings(port=0, max_batch=2, fixed_batch=True)
    return Work(run=run_config(folder, **loop), state_dir=state_dir, serve=serve, fake_gpus=True)


def commit(run_dir: Path, version: int) -> None:
    """A checkpoint as the trainer writes it; every weight is the version, every averaged weight its half."""
    tensors: dict[str, np.ndarray] = {"learner/version": np.array(version)}
    for part, value in (("params", version), ("average", version / 2)):
        tensors[f"learner/{part}/weight"] = np.full((WIDTH, STATE), value, np.float32)
        tensors[f"learner/{part}/bias"] = np.full(WIDTH, value, np.float32)
    RunCheckpoints(run_dir / "checkpoints", 2).save(version, {}, tensors)


def damage_newest(run_dir: Path) -> None:
    folder = max((run_dir / "checkpoints").glob("step-*"))
    data = (folder / "tensors.safetensors").read_bytes()
    (folder / "tensors.safetensors").write_bytes(data[: len(data) // 2])


def audited(work: Work) -> list[str]:
    return [json.loads(line)["key"] for line in work.audit.read_text().splitlines()]


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    import time

    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
