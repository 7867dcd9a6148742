"""A random Octo-Small as an official folder: the published sizes, T5-base included, with a toy tokenizer."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vla_rlaif.policies.octo.initial import initial_params
from vla_rlaif.policies.octo.official import write_folder
from vla_rlaif.policies.octo.spec import ModelSpec

GOLDEN = Path(__file__).parent / "golden" / "octo"
SIZES = {"image_primary": 256, "image_wrist": 128}
T5 = "octo_transformer/task_tokenizers_language/hf_model/"


def write_octo_small(folder: Path, *, seed: int = 0, manifest: str = "octo_small_15_params.json") -> Path:
    """Values follow flax's initialisers; those of T5 are small normals. 547 MB."""
    import json

    import jax

    stored = json.loads((GOLDEN / manifest).read_text())
    leaves = {k: jax.ShapeDtypeStruct(tuple(v["shape"]), np.float32) for k, v in stored["params"].items()}
    params = initial_params({k: v for k, v in leaves.items() if not k.startswith(T5)}, seed)
    rng = np.random.default_rng(seed)
    t5 = {k: v for k, v in leaves.items() if k.startswith(T5)}
    params |= {k: 0.05 * rng.standard_normal(v.shape, np.float32) for k, v in t5.items()}
    tokenizer = {"max_length": 16, "padding": "max_length", "truncation": True, "return_tensors": "np"}
    text = {
        "module": "octo.data.utils.text_processing",
        "name": "HFTokenizer",
        "args": [],
        "kwargs": {"tokenizer_name": "t5-base", "encode_with_model": False, "tokenizer_kwargs": tokenizer},
    }
    vectors = {"mean": np.zeros(7, np.float32), "std": np.full(7, 0.3, np.float32), "mask": np.ones(7, bool)}
    write_folder(
        folder,
        step=300_000,
        params=params,
        config={"model": ModelSpec.from_official(stored["model_config"]).to_official(), "text_processor": text},
        example_batch=_example(),
        statistics={"random_arm": {"action": vectors}},
    )
    shutil.copytree(GOLDEN / "tiny_ckpt" / "t5-tiny", folder / "t5-base")
    return folder


def _example() -> dict[str, Any]:
    window = 2
    images = {k: np.zeros((1, window, s, s, 3), np.uint8) for k, s in SIZES.items()}
    ok = np.ones((1, window), bool)
    words = np.ones((1, 16), np.int64)
    goals = {k: v[:, 0] for k, v in images.items()}
    task = {**goals, "language_instruction": {"input_ids": words, "attention_mask": words}}
    return {
        "observation": {**images, "timestep_pad_mask": ok, "pad_mask_dict": dict.fromkeys(images, ok)},
        "task": {**task, "pad_mask_dict": {k: np.ones(1, bool) for k in task}},
        "action": np.zeros((1, window, 4, 7), np.float32),
        "action_pad_mask": np.ones((1, window, 4, 7), bool),
    }


if __name__ == "__main__":
    print(write_octo_small(Path(sys.argv[1])))
