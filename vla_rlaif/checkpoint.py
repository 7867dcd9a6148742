"""Checkpoints on disk: policies as a folder anyone can load, and the whole run for an exact resume.

    policy folder   policy.json (config, spec, statistics, vocabulary)   params.safetensors
                    pretrained_model/ (of LeRobot's policies: the same in LeRobot's form)
    run checkpoint  checkpoints/step-000010/  state.json (step, counters, checksum)   tensors.safetensors

A checkpoint is written beside its place and renamed, so it is there whole or not at all. Nothing is ever unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save

from vla_rlaif.types import Weights

FORMAT = 1


def save_policy(
    folder: Path, metadata: Mapping[str, Any], weights: Weights, *, also: Callable[[Path, Path], None] | None = None
) -> None:
    """``also`` writes more into the folder: it is called with the name that the folder has meanwhile, and its final
    one."""
    with WholeFolder(folder) as part:
        (part / "policy.json").write_text(json.dumps({"format": FORMAT, **metadata}, indent=1))
        _write_bytes(part / "params.safetensors", save(_contiguous(weights)))
        if also is not None:
            also(part, folder)


def load_policy(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(metadata, weights). Raises ValueError for a missing, foreign or truncated folder."""
    path = folder / "policy.json"
    if not path.exists():
        raise ValueError(
            f"no policy checkpoint at {folder}: policy.json is missing. `vla-rlaif imitate` or `train` makes one."
        )
    try:
        metadata = json.loads(path.read_text())
        weights = load_file(folder / "params.safetensors")
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"policy checkpoint {folder} is damaged or incomplete: {error}. Make it again.") from None
    if metadata.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not format {FORMAT}; it was made by another version of vla_rlaif.")
    return metadata, weights


class RunCheckpoints:
    """The checkpoints of one run, newest last; keeps the last ``keep``."""

    def __init__(self, folder: Path, keep: int):
        self._folder, self._keep = folder, keep

    def save(self, step: int, state: Mapping[str, Any], tensors: Weights) -> None:
        """``state`` is JSON-able; ``step`` is the next step to run."""
        data = save(_contiguous(tensors))
        header = {"format": FORMAT, "step": step, "sha256": hashlib.sha256(data).hexdigest(), **state}
        with WholeFolder(self._folder / f"step-{step:06d}") as part:
            _write_bytes(part / "tensors.safetensors", data)
            _write_bytes(part / "state.json", json.dumps(header).encode())
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old)

    def exists(self) -> bool:
        return bool(self._all())

    def load_latest(self) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
        """(state, tensors, problems). A torn checkpoint is reported in ``problems`` and the one before it is used.

        The step is read from the content, never from the folder's name.
        """
        problems = []
        for folder in reversed(self._all()):
            try:
                state = json.loads((folder / "state.json").read_text())
                data = (folder / "tensors.safetensors").read_bytes()
                if state["format"] != FORMAT:
                    raise ValueError(f"format {state['format']}, wanted {FORMAT}")
                if hashlib.sha256(data).hexdigest() != state["sha256"]:
                    raise ValueError("the tensors do not match their checksum (truncated?)")
                return state, load(data), problems
            except (OSError, ValueError, KeyError, SafetensorError) as error:  # JSONDecodeError is a ValueError
                problems.append(f"checkpoint {folder} cannot be used: {error}")
        detail = "; ".join(problems) if problems else f"{self._folder} has none"
        raise ValueError(f"nothing to resume from: {detail}. Start the run anew without --resume.")

    def _all(self) -> list[Path]:
        found = self._folder.glob("step-*") if self._folder.exists() else iter(())
        return sorted(p for p in found if p.is_dir() and p.suffix != ".part")


class WholeFolder:
    """A folder that appears complete: filled under another name, then renamed into place."""

    def __init__(self, folder: Path):
        self._folder, self._part = folder, folder.with_name(folder.name + ".part")

    def __enter__(self) -> Path:
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir(parents=True)
        return self._part

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._part, ignore_errors=True)
            return
        if self._folder.exists():  # the old one steps aside first, so that a crash here loses neither
            aside = self._folder.with_name(self._folder.name + ".old")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(self._folder, aside)
            os.replace(self._part, self._folder)
            shutil.rmtree(aside)
        else:
            os.replace(self._part, self._folder)


def write_whole(path: Path, data: bytes) -> None:
    """A file that appears complete; what was there before is kept until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _write_bytes(part, data)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _contiguous(weights: Weights) -> dict[str, np.ndarray]:
    return {k: np.asarray(v, order="C") for k, v in weights.items()}  # ascontiguousarray makes a vector of a scalar
