"""The statistics of an official Octo folder: by dataset (pretrained), or of one dataset without a name (fine-tuned)."""

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

# {"action": {"mean": vector, ...}, "proprio": {...}, "num_transitions": count, ...}, or such by name of the dataset
DatasetStatistics = Mapping[str, Any]


def to_arrays(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Lists of a JSON file as float32 or bool arrays, counts as int64. Upstream's are float64, and used as float32."""
    return {
        k: to_arrays(v, f"{where}: {k}") if isinstance(v, dict) else _array(v, f"{where}: {k}")
        for k, v in values.items()
    }


def _array(value: Any, where: str) -> np.ndarray:
    try:
        array = np.array(value)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    if array.dtype.kind not in "bif":
        raise ValueError(f"{where} is {value!r}, wanted numbers or booleans.")
    if array.dtype.kind == "b" or (array.dtype.kind == "i" and not array.shape):  # a count
        return array
    return array.astype(np.float32)


def is_flat(statistics: DatasetStatistics) -> bool:
    """Of one dataset without a name. A dataset may be named 'action' all the same."""
    action = statistics.get("action")
    return action is not None and not (isinstance(action, Mapping) and "action" in action)


def statistics_for(
    statistics: DatasetStatistics, dataset: str | None, *, action_dim: int | None = None
) -> dict[str, Any]:
    """The ``action`` and, if measured, ``proprio`` statistics of one dataset: vectors mean, std, mask, p01, ...

    Args:
        dataset: one of those the model was pretrained on; None if there is one only, as in a fine-tuned folder.
        action_dim: of the model; actions of the dataset may have fewer dimensions.

    Raises:
        ValueError: no or several datasets fit, or a statistic is not one finite number per dimension.
    """
    if not statistics:
        raise ValueError("the folder has no statistics: actions cannot be brought into the robot's units.")
    if is_flat(statistics) and dataset is not None:
        raise ValueError(
            f"the statistics are of one dataset without a name, as fine-tuning leaves them: use None, not {dataset!r}."
        )
    if not is_flat(statistics):
        dataset = _choose(list(statistics), dataset)
    chosen: DatasetStatistics = statistics if dataset is None else statistics[dataset]
    where = "statistics" if dataset is None else f"statistics of {dataset}"
    if not isinstance(chosen, Mapping) or not isinstance(chosen.get("action"), Mapping):
        raise ValueError(f"{where}: there is no 'action' in them.")
    found = {group: dict(chosen[group]) for group in ("action", "proprio") if group in chosen}
    for group, vectors in found.items():
        _check_vectors(vectors, f"{where}: {group}")
    dims = len(next(iter(found["action"].values())))
    if action_dim is not None and dims > action_dim:
        raise ValueError(f"{where}: actions have {dims} dimensions, but the model's have {action_dim}.")
    return found


def _choose(names: list[str], dataset: str | None) -> str:
    if dataset is None and len(names) == 1:
        return names[0]
    if dataset is None:
        raise ValueError(f"the model knows {len(names)} datasets; say whose statistics to use: {', '.join(names)}.")
    if dataset not in names:
        near = difflib.get_close_matches(dataset, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"the model knows no dataset {dataset!r}.{hint} It knows {', '.join(names)}.")
    return dataset


def _check_vectors(vectors: Mapping[str, np.ndarray], where: str) -> None:
    pairs = ({"mean", "std"}, {"p01", "p99"})
    if not any(pair <= vectors.keys() for pair in pairs):
        raise ValueError(f"{where} has {', '.join(vectors) or 'nothing'}; wanted mean and std, or p01 and p99.")
    sizes = {name: value.shape for name, value in vectors.items()}
    if any(len(shape) != 1 for shape in sizes.values()) or len(set(sizes.values())) > 1:
        raise ValueError(f"{where} must have one number per dimension in each; shapes are {sizes}.")
    for name, value in vectors.items():
        if (value.dtype == np.bool_) != (name == "mask") or not np.isfinite(value).all():
            raise ValueError(f"{where}/{name} is {value.tolist()}; wanted finite numbers, and booleans in mask only.")


def to_lists(values: DatasetStatistics) -> dict[str, Any]:
    """What goes into a JSON file."""
    return {k: to_lists(v) if isinstance(v, Mapping) else v.tolist() for k, v in values.items()}
