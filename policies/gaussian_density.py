"""What Gaussian policies with one fixed deviation share in JAX: how an action is drawn, scored and imitated.

Axes: see types.py; E = H * A, S = 1.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32


def drawn(mean: Float[np.ndarray, "N E"], seeds: UInt32[np.ndarray, " N"], std: float) -> Float[np.ndarray, "N E"]:
    """``mean`` with the noise of each row's seed; the same from every backend."""
    noise = np.stack([np.random.default_rng(int(s)).standard_normal(mean.shape[1], np.float32) for s in seeds])
    return mean + np.float32(std) * noise


def scored(
    sample: Float[jax.Array, "B E"],
    means: Float[jax.Array, "B 1 E"],
    reference_means: Float[jax.Array, "B 1 E"] | None,
    executed: Int[jax.Array, " B"],
    *,
    std: float,
    action_dim: int,
) -> tuple[Float[jax.Array, "B 1"], Float[jax.Array, "B 1"] | None]:
    """Log-probability and divergence over the dims of the executed env steps, nats. Pure."""
    chunk = means.shape[-1] // action_dim
    mask = jnp.repeat(jnp.arange(chunk)[None] < executed[:, None], action_dim, axis=1)[:, None]
    error = (sample[:, None] - means) / std
    density = -0.5 * jnp.square(error) - math.log(std) - 0.5 * math.log(2 * math.pi)
    logp = jnp.sum(jnp.where(mask, density, 0.0), axis=-1)
    if reference_means is None:
        return logp, None
    return logp, jnp.sum(jnp.where(mask, 0.5 * jnp.square((means - reference_means) / std), 0.0), axis=-1)


def cloned(means: Float[jax.Array, "B 1 E"], action: Float[jax.Array, "B H A"], *, std: float) -> Float[jax.Array, ""]:
    """Negative log-density of demonstrated chunks but for its constant, nats, mean over rows. Pure."""
    error = (means[:, 0] - action.reshape(len(action), -1)) / std
    return jnp.mean(jnp.sum(0.5 * jnp.square(error), axis=-1))
