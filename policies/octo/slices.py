"""A batch in slices, for processors with small caches: same numbers, computed a few rows at a time.

On a CPU a trunk pass over 32 rows of Octo-Small takes 1.4 times the processor time of 16 passes over 2: what one layer
writes is out of the cache when the next reads it (docs/benchmarks.md). On an accelerator slicing only costs.
Acting alone is sliced: under differentiation it is a loss (what every slice keeps is copied into one array).
Axes: N rows of the batch.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

CACHED_BYTES = 9 * 2**20  # of a slice's widest activation; the best of 2 to 36 MiB


def rows_at_once(num_rows: int, row_bytes: int, backend: str) -> int:
    """How many of ``num_rows`` to compute together; ``row_bytes`` is what one adds to the widest activation."""
    if backend != "cpu":
        return num_rows
    return min(num_rows, max(1, CACHED_BYTES // row_bytes))


def in_slices(
    function: Callable[[Mapping[str, jax.Array]], jax.Array], rows: Mapping[str, jax.Array], size: int
) -> jax.Array:
    """``function(rows)``, for a function of each row by itself: a loop on the device over ``size`` rows at a time.

    The last slice is filled up with the first rows, whose results are dropped.
    """
    num = len(next(iter(rows.values())))
    if size >= num:
        return function(rows)
    slices = -(-num // size)
    filled = {k: jnp.concatenate([v, v[: slices * size - num]]) for k, v in rows.items()}
    out = jax.lax.map(function, {k: v.reshape(slices, size, *v.shape[1:]) for k, v in filled.items()})
    return out.reshape(slices * size, *out.shape[2:])[:num]
