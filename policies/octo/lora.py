"""Low-rank adapters (https://arxiv.org/abs/2106.09685) on the kernels of the last transformer blocks.

The adapted kernel is ``W + alpha / rank * a @ b``, built inside the compiled function: for Octo-Small a thousandth of
one forward pass. With ``b`` = 0 it is exactly ``W``. Parameters are flat, by '/'-joined name.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

PREFIX = "lora/"
BLOCK = "octo_transformer/BlockTransformer_0/Transformer_0/encoderblock_"


def adapted_kernels(shapes: Mapping[str, tuple[int, ...]], first_block: int) -> dict[str, tuple[int, int]]:
    """Kernels of attention and MLP from ``first_block`` on, with the sizes (in, out) of their matrices."""
    found = {}
    for name, shape in shapes.items():
        if not name.startswith(BLOCK) or not name.endswith("/kernel"):
            continue
        if int(name.removeprefix(BLOCK).split("/")[0]) >= first_block:
            inputs = math.prod(shape[:-1]) if name.endswith("/out/kernel") else shape[0]
            found[name] = inputs, math.prod(shape) // inputs
    return found


def initial_adapters(kernels: Mapping[str, tuple[int, int]], rank: int, seed: int) -> dict[str, np.ndarray]:
    """``a`` [in, rank] is drawn, ``b`` [rank, out] is 0: the policy starts unchanged."""
    values = {}
    for name, (inputs, outputs) in kernels.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values[f"{PREFIX}{name}/a"] = (rng.standard_normal((inputs, rank)) / math.sqrt(inputs)).astype(np.float32)
        values[f"{PREFIX}{name}/b"] = np.zeros((rank, outputs), np.float32)
    return values


def merged(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """The parameters with the adapters added into their kernels; ``scale`` is alpha / rank."""
    plain = {name: value for name, value in params.items() if not name.startswith(PREFIX)}
    for key in params:
        if key.startswith(PREFIX) and key.endswith("/a"):
            name = key.removeprefix(PREFIX).removesuffix("/a")
            update = params[key] @ params[f"{PREFIX}{name}/b"]
            plain[name] = plain[name] + scale * update.reshape(plain[name].shape)
    return plain
