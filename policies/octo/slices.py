"""A batch in slices, for processors with small caches: the same numbers, computed a few rows at a time.

On a CPU a trunk pass over 32 rows of Octo-Small takes 1.2 to 1.4 times the processor time of as many rows two at a
time: what one layer writes has left the cache when the next one reads it (docs/benchmarks.md). Accelerators want whole
batches. Only acting is sliced: under differentiation it is a loss, what every slice keeps is copied into one array.
Axes: N rows of the batch, n readout tokens, D token width, F features.
"""

import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Float

from vla_rlaif.policies.octo.network import OctoNetwork, Params

CACHED_BYTES = 4 * 2**20  # of the hidden MLP layer of a slice; but every core has a row to work on


def acting_readout(network: OctoNetwork, params: Params, inputs: Mapping[str, jax.Array]) -> Float[jax.Array, "N n D"]:
    """``network.readout`` for acting, in slices where that is faster."""
    return in_slices(lambda rows: network.readout(params, rows), inputs, acting_rows(network, inputs))


def acting_features(
    network: OctoNetwork, params: Params, inputs: Mapping[str, jax.Array], projection: Float[jax.Array, "D K"]
) -> Float[jax.Array, "N F"]:
    """``network.features``, likewise."""
    return in_slices(lambda rows: network.features(params, rows, projection), inputs, acting_rows(network, inputs))


def in_slices(
    function: Callable[[Mapping[str, jax.Array]], jax.Array], rows: Mapping[str, jax.Array], size: int
) -> jax.Array:
    """``function(rows)``, for a function of each row by itself: a loop on the device over ``size`` rows at a time.

    The last slice is filled up with the first rows, whose results are dropped.
    """
    num = num_rows(rows)
    if size >= num:
        return function(rows)
    slices = -(-num // size)
    filled = {k: jnp.concatenate([v, v[: slices * size - num]]) for k, v in rows.items()}
    out = jax.lax.map(function, {k: v.reshape(slices, size, *v.shape[1:]) for k, v in filled.items()})
    return out.reshape(slices * size, *out.shape[2:])[:num]


def rows_at_once(num: int, row_bytes: int, cores: int) -> int:
    """How many of ``num`` rows to compute together; ``row_bytes`` is what one adds to the widest activation."""
    return min(num, max(cores, CACHED_BYTES // row_bytes))


def num_rows(rows: Mapping[str, jax.Array]) -> int:
    return len(next(iter(rows.values())))


def acting_rows(network: OctoNetwork, inputs: Mapping[str, jax.Array]) -> int:
    """How many rows acting computes together here. All of them on accelerators, and in bfloat16, where slices lose."""
    num, layout = num_rows(inputs), network.layout
    if jax.default_backend() != "cpu" or network.dtype != jnp.float32:
        return num
    step = sum(span.num_tokens for span in layout.step)
    tokens = sum(span.num_tokens for span in layout.prefix) + layout.window * step
    hidden = tokens * network.model.transformer.mlp_dim * jnp.dtype(network.dtype).itemsize
    return rows_at_once(num, hidden, os.cpu_count() or 1)
