"""Numbers as categories and back: the bins of low-dimensional tokens and of the discrete action head.

Source: octo-models/octo, BinTokenizer. Axes: V bins, G = V + 1 edges.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Float, Int

EPS = 1e-6

Kind = Literal["uniform", "normal"]


@partial(jax.jit, static_argnums=range(4))
def thresholds(kind: Kind, num_bins: int, low: float = 0.0, high: float = 1.0) -> Float[jax.Array, " G"]:
    """Edges of the bins: evenly spaced, or of equal probability under N(0, 1) (``low`` and ``high`` are not used)."""
    if kind == "uniform":
        return jnp.linspace(low, high, num_bins + 1)
    return norm.ppf(jnp.linspace(EPS, 1 - EPS, num_bins + 1))


def bin_index(
    x: Float[jax.Array, "*b"], edges: Float[jax.Array, " G"], kind: Kind, low: float = 0.0, high: float = 1.0
) -> Int[jax.Array, "*b"]:
    """The bin of each number. Uniform bins clip to the range; beyond the outermost normal edges it is 0 (upstream)."""
    if kind == "uniform":
        x = jnp.clip(x, low + EPS, high - EPS)
    x = x[..., None]
    return jnp.argmax((x < edges[1:]) & (x >= edges[:-1]), axis=-1)


def bin_centres(edges: Float[jax.Array, " G"]) -> Float[jax.Array, " V"]:
    """The number that stands for a bin."""
    return (edges[1:] + edges[:-1]) / 2
