"""The committed weights: those of the newest checkpoint of the run. Whoever acts on them survives the trainer.

Nothing goes back behind a checkpoint but a damaged disk, so versions only grow.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.types import under

ATTEMPTS = 5  # a running trainer removes old checkpoints while they are read


@dataclass(frozen=True, kw_only=True)
class Committed:
    """Weights that may act. Before the first checkpoint: none, the start policy's hold."""

    version: int
    step: int  # the next one of the run
    trained: Mapping[str, np.ndarray]  # parameters as the learner has them: what collects
    average: Mapping[str, np.ndarray]  # their running average: what serves


def checkpoints_of(run_dir: Path) -> RunCheckpoints:
    """For reading: how many are kept is the writer's business."""
    return RunCheckpoints(run_dir / "checkpoints", keep=2)


def newest_name(run_dir: Path) -> str:
    """Changes when a checkpoint is added; empty before the first."""
    return max((path.name for path in _folders(run_dir)), default="")


def committed_version(run_dir: Path) -> int:
    """Of the newest checkpoint that can be read, without its weights."""
    for folder in sorted(_folders(run_dir), reverse=True):
        try:
            with safe_open(folder / "tensors.safetensors", framework="np") as file:
                return int(file.get_tensor("learner/version"))
        except (OSError, SafetensorError):
            continue
    return 0


def committed_step(run_dir: Path) -> int:
    """The next step of the run, after its newest checkpoint."""
    for folder in sorted(_folders(run_dir), reverse=True):
        try:
            return json.loads((folder / "state.json").read_text())["step"]
        except (OSError, json.JSONDecodeError):
            continue
    return 0


def load_committed(run_dir: Path) -> Committed:
    """Raises ValueError if there are checkpoints and none is whole."""
    checkpoints = checkpoints_of(run_dir)
    if not checkpoints.exists():
        return Committed(version=0, step=0, trained={}, average={})
    state, tensors, _ = _load_latest(checkpoints)
    return Committed(
        version=int(tensors["learner/version"]),
        step=state["step"],
        trained=under("learner/params/", tensors),
        average=under("learner/average/", tensors),
    )


def verify_newest(run_dir: Path) -> None:
    """Read the newest checkpoint back. Raises ValueError if it is damaged; a run without one has nothing to lose."""
    checkpoints = checkpoints_of(run_dir)
    if checkpoints.exists():
        _, _, problems = _load_latest(checkpoints)
        if problems:
            raise ValueError(problems[0])


def _load_latest(checkpoints: RunCheckpoints) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """Once more if what was listed is gone by the time it is read."""
    for attempt in range(ATTEMPTS):
        try:
            found = checkpoints.load_latest()
        except ValueError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            if not found[2] or attempt == ATTEMPTS - 1:
                return found
        time.sleep(0.05)
    raise AssertionError("the last attempt returns or raises")


def _folders(run_dir: Path) -> list[Path]:
    return [p for p in (run_dir / "checkpoints").glob("step-*") if p.suffix not in (".part", ".old")]
