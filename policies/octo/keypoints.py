"""A stem for small budgets: a shallow CNN whose feature maps are read as key points (spatial softmax).

It is not upstream's: Octo's own stem needs far more pictures and steps before it knows where things are. One token a
camera, so the transformer is short, too. Source: Levine et al. 2016, https://arxiv.org/abs/1504.00702 (section 5.1).
Axes: B images, C channels. Images are NHWC.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from vla_rlaif.policies.octo.spec import KeypointSpec

SHARPNESS = 3.0  # of the softmax at the start; the weights before it take over
STRIDE = 4  # pixels


class KeypointStem(nn.Module):
    """Expected (x, y) of every channel of the last feature map, in [-1, 1], as the only token of an image."""

    spec: KeypointSpec
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, pixels: Num[jax.Array, "B h w C"], film: Float[jax.Array, "B d"] | None = None
    ) -> Float[jax.Array, "B 1 1 F"]:
        if film is not None:
            raise ValueError("KeypointStem takes no conditioning: leave task_film_keys empty.")
        x = pixels.astype(jnp.float32) / 127.5 - 1.0
        channels = self.spec.channels
        x = nn.relu(nn.Conv(channels, (6, 6), (STRIDE, STRIDE), dtype=self.dtype, name="Conv_0")(x))
        x = nn.Conv(channels, (3, 3), dtype=self.dtype, name="Conv_1")(x)
        return spatial_softmax(SHARPNESS * x.astype(jnp.float32))[:, None, None].astype(self.dtype)


def spatial_softmax(x: Float[jax.Array, "B h w C"]) -> Float[jax.Array, "B F"]:
    """F = 2 C: expected column, then expected row, under a softmax over the positions of each channel."""
    height, width, channels = x.shape[1:]
    weight = jax.nn.softmax(x.reshape(len(x), height * width, channels), axis=1)
    rows, columns = jnp.meshgrid(jnp.linspace(-1, 1, height), jnp.linspace(-1, 1, width), indexing="ij")
    grid = jnp.stack([columns.reshape(-1), rows.reshape(-1)])  # 2, positions
    return jnp.einsum("bpc,kp->bkc", weight, grid).reshape(len(x), -1)
