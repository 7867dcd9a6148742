"""Image stem and token groups that need no attention: pixels and proprioception to tokens.

Source: octo-models/octo, SmallStem16 and LowdimObsTokenizer; parameter names are upstream's.
Axes: B batch, T window, n tokens, C channels. Images are NHWC.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

STD_EPS = 1e-5  # added to the std, not to the variance
NORM_EPS = 1e-6


def standardised(kernel: Float[jax.Array, "*window C F"]) -> Float[jax.Array, "*window C F"]:
    """Weight standardisation over everything but the output features, with the population std."""
    axes = tuple(range(kernel.ndim - 1))
    centred = kernel - kernel.mean(axes)
    return centred / (centred.std(axes) + STD_EPS)


class StdConv(nn.Module):
    """3x3 convolution with stride 2 and padding 1 whose kernel is standardised before use."""

    features: int

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B h w C"]) -> Float[jax.Array, "B h2 w2 F"]:
        shape = (3, 3, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return bias + jax.lax.conv_general_dilated(
            x, standardised(kernel), (2, 2), [(1, 1), (1, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


class GroupNorm(nn.Module):
    """Group normalisation; the variance is E[x^2] - E[x]^2, as in flax."""

    groups: int

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B h w C"]) -> Float[jax.Array, "B h w C"]:
        num, channels = x.shape[0], x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))

        def grouped(v: jax.Array) -> jax.Array:
            means = v.mean((1, 2)).reshape(num, self.groups, -1).mean(-1)
            return jnp.repeat(means, channels // self.groups, axis=-1)[:, None, None]

        mean = grouped(x)
        variance = jnp.maximum(grouped(x * x) - mean * mean, 0.0)
        return (x - mean) * (jax.lax.rsqrt(variance + NORM_EPS) * scale) + bias


class SmallStem16(nn.Module):
    """Four strided convolutions and a patch embedding: one token for every ``patch_size`` square of pixels."""

    features: tuple[int, ...]
    groups: int
    embedding: int
    patch_size: int = 16

    @nn.compact
    def __call__(self, pixels: Num[jax.Array, "B h w C"]) -> Float[jax.Array, "B h2 w2 F"]:
        x = pixels.astype(jnp.float32) / 127.5 - 1.0
        for i, features in enumerate(self.features):
            x = StdConv(features, name=f"StdConv_{i}")(x)
            x = nn.relu(GroupNorm(self.groups, name=f"GroupNorm_{i}")(x))
        size = (self.patch_size // 16, self.patch_size // 16)
        return PatchEmbedding(self.embedding, size, name="embedding")(x)


class PatchEmbedding(nn.Module):
    """A convolution whose stride equals its kernel, as one matrix product."""

    features: int
    size: tuple[int, int]

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B h w C"]) -> Float[jax.Array, "B h2 w2 F"]:
        (rows, cols), (num, height, width, channels) = self.size, x.shape
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (rows, cols, channels, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        blocks = x.reshape(num, height // rows, rows, width // cols, cols, channels).transpose(0, 1, 3, 2, 4, 5)
        blocks = blocks.reshape(num, height // rows, width // cols, -1)
        return blocks @ kernel.reshape(-1, self.features) + bias


def with_goal(
    frames: Num[jax.Array, "B T h w C"], goal: Num[jax.Array, "B h w C"] | None
) -> Num[jax.Array, "B T h w C2"]:
    """Stack the goal image behind each frame's channels; a missing goal is black, as upstream."""
    stacked = jnp.zeros_like(frames) if goal is None else jnp.broadcast_to(goal[:, None], frames.shape)
    return jnp.concatenate([frames, stacked], axis=-1)


def scalar_tokens(values: Float[jax.Array, "B T P"]) -> Float[jax.Array, "B T P 1"]:
    """Upstream's LowdimObsTokenizer without discretisation: one token of width 1 for each number."""
    return values[..., None]
