"""Official Octo folders, in and out.

    config.json                  the ``model`` section, the text processor, and what else the training script kept
    dataset_statistics.json      of actions and proprioception: by dataset (pretrained), or of one (fine-tuned)
    example_batch.msgpack        one batch of size 1: the observations, tasks and actions that were trained on
    <step>/default/checkpoint    the parameters, as one msgpack tree
    <step>/default/_METADATA     their names once more; not needed for reading

A folder saved from sharded parameters has array stores (zarr, in files or in an OCDBT database) beside, or in place of,
``checkpoint``. Format: octo-models/octo @ 241fb35 with orbax-checkpoint 0.4.4; stores of current orbax are read too.
Arrays are read as they lie on disk, so the devices that saved them do not matter. Nothing in a folder can name code.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rlaif.checkpoint import WholeFolder, write_whole
from vla_rlaif.policies.octo.adapt import Reshaped, listed, shapes
from vla_rlaif.policies.octo.dataset_statistics import DatasetStatistics, is_flat, statistics_for, to_arrays, to_lists
from vla_rlaif.policies.octo.spec import ModelSpec
from vla_rlaif.policies.octo.trees import again, check_arrays, flatten, nest, pack_tree, read_stores, read_tree

FILES = ("config.json", "dataset_statistics.json", "example_batch.msgpack")
PLACEHOLDER = "PLACEHOLDER://"  # stands in ``checkpoint`` for an array that is in a store


@dataclass(frozen=True, kw_only=True)
class OfficialFolder:
    """A whole folder in memory. Params are float32 by '/'-joined name, and read-only."""

    config: dict[str, Any]  # as in the file
    spec: ModelSpec  # of its ``model`` section
    example_batch: dict[str, Any]  # nested; in the names of version 1.5
    statistics: dict[str, Any]  # nested as in the file; float32 and bool vectors, int64 counts
    params: dict[str, np.ndarray]
    step: int


def read_folder(folder: Path, step: int | None = None) -> OfficialFolder:
    """Read the parameters of ``step``, or of the latest one, and what belongs to them.

    Raises:
        ValueError: the folder is not Octo's, incomplete or damaged, or has no such step.
    """
    _refuse_url(folder)
    _check_layout(folder)
    config = _read_json(folder / "config.json")
    spec = _spec(config, str(folder / "config.json"))
    steps = _steps(folder)
    if not steps:
        raise ValueError(f"{folder} has no parameters: wanted a folder <step>/default in it. Download it again.")
    step = max(steps) if step is None else step
    if step not in steps:
        raise ValueError(f"{folder} has no step {step}; it has {', '.join(map(str, sorted(steps)))}.")
    return OfficialFolder(
        config=config,
        spec=spec,
        example_batch=_read_example(folder / "example_batch.msgpack"),
        statistics=_read_statistics(folder / "dataset_statistics.json"),
        params=_read_params(steps[step] / "default"),
        step=step,
    )


def _refuse_url(folder: Path) -> None:
    if folder.parts[:1] == ("hf:",):
        repo = "/".join(folder.parts[1:])
        raise ValueError(
            f"hf://{repo} is not a folder. Download first: hf download {repo} --local-dir {folder.name}, and give that."
        )


def _check_layout(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}.")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        inside = [p for p in (folder.parent, folder.parent.parent) if (p / "config.json").is_file()]
        hint = f" Give {inside[0]}, and the step separately." if inside else ""
        raise ValueError(f"{folder} is not an official Octo folder: {', '.join(missing)} missing.{hint}")


def _steps(folder: Path) -> dict[int, Path]:
    found = folder.iterdir() if folder.is_dir() else iter(())
    return {int(p.name): p for p in found if p.name.isdecimal() and (p / "default").is_dir()}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:  # of the text's encoding too
        raise ValueError(f"{path} is not JSON ({error}). {again(path)}") from None


def _spec(config: Any, where: str) -> ModelSpec:
    if not isinstance(config, Mapping) or not isinstance(config.get("model"), Mapping):
        raise ValueError(f"{where} has no 'model' section: it is not an Octo config.")
    return ModelSpec.from_official(config["model"])


def _read_example(path: Path) -> dict[str, Any]:
    batch = read_tree(path)
    check_arrays(batch, str(path))
    if "tasks" in batch:  # 1.0
        batch["task"] = batch.pop("tasks")
    for key in ("observation", "task"):
        if not isinstance(batch.get(key), dict):
            raise ValueError(f"{path} has no group {key!r}; it has {', '.join(batch)}.")
    observation = batch["observation"]
    if "pad_mask" in observation:  # 1.0
        observation["timestep_pad_mask"] = observation.pop("pad_mask")
    return batch


def _read_params(folder: Path) -> dict[str, np.ndarray]:
    path = folder / "checkpoint"
    params = flatten(read_tree(path), str(path)) if path.exists() else {}
    in_stores = {name: v.removeprefix(PLACEHOLDER) for name, v in params.items() if isinstance(v, str)}
    if in_stores or not path.exists():
        stored = read_stores(folder)
        in_stores = in_stores or {name.replace(".", "/"): name for name in stored}
        if not in_stores:
            raise ValueError(f"{folder} holds no parameters: it has neither a file 'checkpoint' nor array stores.")
        missing = [name for name, store in in_stores.items() if store not in stored]
        if missing:
            raise ValueError(f"{folder} lacks the arrays of {listed(missing, params)}: it was copied incompletely.")
        params |= {name: stored[store] for name, store in in_stores.items()}
    _check_float32(params, str(folder))
    return params


def _check_float32(params: Mapping[str, Any], where: str) -> None:
    for name, value in params.items():
        if not isinstance(value, np.ndarray) or value.dtype != np.float32:
            kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise ValueError(f"{where}: parameter {name} is {kind}, wanted a float32 array. Convert it before saving.")
    if not params:
        raise ValueError(f"{where}: there are no parameters.")


def _read_statistics(path: Path) -> dict[str, Any]:
    """A model made without statistics has null."""
    values = _read_json(path)
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, wanted statistics by name.")
    return to_arrays(values or {}, str(path))


def check_params(params: Mapping[str, np.ndarray], wanted_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless names and shapes are the wanted ones; the message has all that differ."""
    missing = wanted_shapes.keys() - params.keys()
    extra = params.keys() - wanted_shapes.keys()
    other = [Reshaped(n, params[n].shape, s) for n, s in wanted_shapes.items() if n in params and params[n].shape != s]
    if missing or extra or other:
        lines = ["the parameters are not those of the config."]
        if missing:
            lines.append(f"Missing: {listed(missing, wanted_shapes)}.")
        if extra:
            lines.append(f"Unexpected: {listed(extra, params)}.")
        if other:
            lines.append(f"Of another shape: {shapes(other, wanted_shapes)}.")
        raise ValueError("\n".join(lines))


def write_folder(
    folder: Path,
    *,
    step: int,
    params: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    example_batch: Mapping[str, Any],
    statistics: DatasetStatistics,
) -> None:
    """Add a step to an official folder, or begin one. The step appears last, complete or not at all.

    Files that are there already stay as they are.

    Raises:
        ValueError: the step exists, the folder is another model's, or a value is not what an official folder holds.
    """
    _refuse_url(folder)
    spec = _spec(config, "config")
    _check_float32(params, "params")
    tree = nest(params)
    check_arrays(example_batch, "example_batch")
    check_arrays(statistics, "statistics")
    if is_flat(statistics):  # those of many datasets are upstream's, and stay as they are
        statistics_for(statistics, None)
    if step < 0:
        raise ValueError(f"step is {step}, wanted 0 or more.")
    if step in _steps(folder) or (folder / str(step)).exists():
        raise ValueError(f"{folder} has a step {step} already: give another step or folder.")
    _check_same(folder, spec, config, example_batch, statistics)
    batch = b"".join(pack_tree(example_batch))
    contents = (json.dumps(config).encode(), json.dumps(to_lists(statistics)).encode(), batch)
    for name, data in zip(FILES, contents, strict=True):
        if not (folder / name).exists():
            write_whole(folder / name, data)
    with WholeFolder(folder / str(step)) as part:
        (part / "default").mkdir()
        with (part / "default" / "checkpoint").open("wb") as file:
            file.writelines(pack_tree(tree))
            file.flush()
            os.fsync(file.fileno())
        write_whole(part / "default" / "_METADATA", _metadata(params))


def _check_same(
    folder: Path,
    spec: ModelSpec,
    config: Mapping[str, Any],
    example_batch: Mapping[str, Any],
    statistics: DatasetStatistics,
) -> None:
    """What is in the folder already must say the same of the model. Training settings and example values may differ."""
    same = dict.fromkeys(FILES, True)
    config_path, statistics_path, example_path = (folder / name for name in FILES)
    if config_path.exists():
        there = _read_json(config_path)
        same["config.json"] = _spec(there, str(config_path)) == spec and (
            there.get("text_processor") == config.get("text_processor")
        )
    if statistics_path.exists():
        old, new = flatten(_read_statistics(statistics_path), "old"), flatten(statistics, "new")
        same["dataset_statistics.json"] = old.keys() == new.keys() and all(
            np.array_equal(value, new[name]) for name, value in old.items()
        )
    if example_path.exists():
        old, new = flatten(_read_example(example_path), "old"), flatten(example_batch, "new")
        same["example_batch.msgpack"] = {k: (v.shape, v.dtype) for k, v in old.items()} == {
            k: (v.shape, v.dtype) for k, v in new.items()
        }
    other = [name for name, is_same in same.items() if not is_same]
    if other:
        raise ValueError(f"{folder} has another model's {', '.join(other)}: write to a new folder.")


def _metadata(params: Mapping[str, np.ndarray]) -> bytes:
    """The names, as orbax 0.4 keeps them: key type 2 is a dict's key."""
    tree = {}
    for name in sorted(params, key=lambda n: n.split("/")):
        keys = tuple(name.split("/"))
        tree[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": True},
        }
    return json.dumps({"tree_metadata": tree}).encode()
