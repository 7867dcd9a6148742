"""Read a folder of ours as upstream's ``load_pretrained`` does, in upstream's environment, and compare bit by bit.

    python check_orbax_044.py FOLDER STEP PARAMS.npz EXAMPLE.npz

Runs under Python 3.11 with jax 0.4.20, flax 0.7.5 and orbax-checkpoint 0.4.4, so it imports nothing of this project.
The npz files hold the expected arrays by '/'-joined name.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import orbax.checkpoint
from flax.serialization import msgpack_restore
from flax.traverse_util import flatten_dict, unflatten_dict


def compare(what: str, found: Mapping[str, Any], expected: Mapping[str, np.ndarray]) -> None:
    flat = {"/".join(path): value for path, value in flatten_dict(dict(found)).items()}
    if flat.keys() != expected.keys():
        raise SystemExit(f"{what}: names differ: {sorted(flat.keys() ^ expected.keys())}")
    for name, value in expected.items():
        got = np.asarray(flat[name])
        if got.dtype != value.dtype or got.shape != value.shape or got.tobytes() != value.tobytes():
            raise SystemExit(f"{what}: {name} differs")
    print(f"{what}: {len(flat)} arrays are equal")


def main() -> None:
    folder, step = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    params, example = dict(np.load(sys.argv[3])), dict(np.load(sys.argv[4]))
    print(f"python {sys.version.split()[0]} jax {jax.__version__} flax {flax.__version__}", end=" ")
    print(f"orbax {orbax.checkpoint.__version__} numpy {np.__version__}")
    config = json.loads((folder / "config.json").read_text())
    statistics = json.loads((folder / "dataset_statistics.json").read_text())
    print(f"config {sorted(config)}; statistics {sorted(statistics)}")
    batch: Any = msgpack_restore((folder / "example_batch.msgpack").read_bytes())
    compare("example_batch", batch, example)
    manager = orbax.checkpoint.CheckpointManager(str(folder), orbax.checkpoint.PyTreeCheckpointer())
    latest = manager.latest_step()
    if latest != step:
        raise SystemExit(f"the latest step is {latest}, wanted {step}")
    shapes = {tuple(n.split("/")): jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in params.items()}
    compare("params", manager.restore(step, items=unflatten_dict(shapes)), params)


if __name__ == "__main__":
    main()
