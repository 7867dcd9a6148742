"""Upstream's folders and parameters, for the tests that read and write such folders."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.serialization import msgpack_restore
from flax.traverse_util import flatten_dict, unflatten_dict

GOLDEN = Path(__file__).parents[1] / "golden" / "octo"
PARAMS: dict[str, np.ndarray] = dict(np.load(GOLDEN / "tiny_params.npz"))
SHAPES = {name: value.shape for name, value in PARAMS.items()}


def copied(name: str, to: Path) -> Path:
    """A golden folder that may be changed."""
    shutil.copytree(GOLDEN / name, to / name)
    return to / name


def assert_golden(params: Mapping[str, np.ndarray]) -> None:
    assert params.keys() == PARAMS.keys()
    for name, value in PARAMS.items():
        np.testing.assert_array_equal(params[name], value, strict=True)


def nested(params: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return unflatten_dict({tuple(name.split("/")): value for name, value in params.items()})


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {"/".join(path): value for path, value in flatten_dict(dict(tree)).items()}


def flax_tree(path: Path) -> dict[str, Any]:
    """A file as flax reads it."""
    tree = msgpack_restore(path.read_bytes())
    assert isinstance(tree, dict)
    return tree


def vectors(size: int) -> dict[str, np.ndarray]:
    """Statistics of one group."""
    return {"mean": np.zeros(size, np.float32), "std": np.ones(size, np.float32), "mask": np.ones(size, bool)}
