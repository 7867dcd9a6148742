"""Random initial parameters, drawn on the host.

Flax's own initialisers give the same distributions, but compiling a hundred of them takes ten seconds of CPU, and every
process that builds a policy would pay. A frozen language encoder is not drawn: it comes with its weights.
"""

import math
import zlib
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Float

XAVIER = ("MultiHeadDotProductAttention_0/", "MlpBlock_0/", "cond_encoder/", "reverse_network/Dense_")
NORMAL = {"pos_embedding": 0.02, "/pos_embed": 0.02, "time_preprocess/kernel": 0.2, "word_table/embedding": 1.0}


def initial_params(shapes: Mapping[str, jax.ShapeDtypeStruct], seed: int) -> dict[str, Float[np.ndarray, "..."]]:
    """Values for every name; each depends on the seed and its own name only."""
    return {name: _draw(name, leaf.shape, seed) for name, leaf in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Float[np.ndarray, "..."]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    for ending, std in NORMAL.items():
        if name.endswith(ending):
            return (std * rng.standard_normal(shape)).astype(np.float32)
    if name.endswith("/scale"):
        return np.ones(shape, np.float32)
    if name.endswith("/bias"):
        std = 1e-6 if "MlpBlock_0/" in name else 0.0
        return (std * rng.standard_normal(shape)).astype(np.float32)
    if name.endswith("/probe"):  # [1, k, D]: xavier, as a map from k to D
        return _xavier(rng, shape, fan_in=shape[1])
    assert name.endswith("/kernel"), name
    if "FilmConditioning_0/" in name:
        return np.zeros(shape, np.float32)
    if any(part in name for part in XAVIER):  # heads of an attention have an axis of their own
        joined = len(shape) == 2 or name.endswith("out/kernel")
        return _xavier(rng, shape, fan_in=math.prod(shape[:-1]) if joined else shape[0])
    return (_truncated_normal(rng, shape) / math.sqrt(math.prod(shape[:-1]))).astype(np.float32)  # lecun_normal


def _xavier(rng: np.random.Generator, shape: tuple[int, ...], *, fan_in: int) -> Float[np.ndarray, "..."]:
    limit = math.sqrt(6.0 / (fan_in + math.prod(shape) // fan_in))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def _truncated_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
    """Within two standard deviations, rescaled to unit variance."""
    values = rng.standard_normal(shape)
    while (outside := np.abs(values) > 2.0).any():
        values[outside] = rng.standard_normal(int(outside.sum()))
    return values / 0.87962566103423978
