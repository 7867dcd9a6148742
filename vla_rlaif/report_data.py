"""What a report can find in a run directory. A run that is still going, or crashed, has only some of it."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jaxtyping import Bool, UInt8

from vla_rlaif.metrics import FILE_NAME, read_metrics


@dataclass(frozen=True, kw_only=True)
class Clips:
    """The same K start states played before and after training."""

    before: UInt8[np.ndarray, "K F height width 3"]
    after: UInt8[np.ndarray, "K F height width 3"]
    before_success: Bool[np.ndarray, " K"]
    after_success: Bool[np.ndarray, " K"]
    instruction: tuple[str, ...]  # K


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """None, or an empty list, is a piece the run has not written."""

    run_dir: Path
    config: Mapping[str, Any] | None
    result: Mapping[str, Any] | None  # written when the run has finished
    metrics: list[dict]
    clips: Clips | None

    def setting(self, *keys: str) -> Any:
        """A value of the config by its path; None where the config has no such key."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def load_run(run_dir: Path) -> RunRecord:
    """Read what is there. A piece that is there but damaged is an error, a missing one is not."""
    if not run_dir.is_dir():
        raise ValueError(
            f"{run_dir} is not a directory; wanted the run directory of a training run, e.g. runs/run-seed0."
        )
    metrics_path = run_dir / FILE_NAME
    record = RunRecord(
        run_dir=run_dir,
        config=_read_config(run_dir / "config.yaml"),
        result=_read_result(run_dir / "result.json"),
        metrics=read_metrics(metrics_path) if metrics_path.exists() else [],
        clips=read_clips(run_dir / "clips.npz"),
    )
    if record.config is None and record.result is None and not record.metrics:
        raise ValueError(
            f"{run_dir} holds neither config.yaml nor {FILE_NAME} nor result.json; wanted a run directory."
        )
    return record


def _read_config(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML ({error}); restore or delete it.") from error
    return _mapping(data, path)


def _read_result(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore or delete it, or evaluate again.") from error
    return _mapping(data, path)


def _mapping(data: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}; wanted a mapping of names to values.")
    return data


def read_clips(path: Path) -> Clips | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as data:
            clips = Clips(
                before=data["before"],
                after=data["after"],
                before_success=data["before_success"].astype(bool),
                after_success=data["after_success"].astype(bool),
                instruction=tuple(str(sentence) for sentence in data["instruction"]),
            )
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a clips file ({error}); delete it, or evaluate again.") from error
    counts = {len(column) for column in vars(clips).values()}
    if len(counts) > 1:
        raise ValueError(f"{path} holds columns of {sorted(counts)} clips; wanted one length. Evaluate again.")
    return clips if len(clips.before) else None
