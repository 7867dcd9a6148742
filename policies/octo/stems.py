"""Image encoders: pixels to a map of patch features, by spec. Parameter names are upstream's.

Source: octo-models/octo, SmallStem, PatchEncoder and FilmConditioning.
Axes: B images, C channels (stacked images side by side), F features. Images are NHWC.
Numbers: parameters are float32, convolutions run in ``dtype``, statistics always in float32.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from vla_rlaif.policies.octo.keypoints import KeypointStem
from vla_rlaif.policies.octo.spec import EncoderSpec, KeypointSpec, PatchSpec, StemSpec

STD_EPS = 1e-5  # added to the std, not to the variance
NORM_EPS = 1e-6
STEM_STRIDE = 16  # pixels; upstream divides the patch size by it whatever the strides are
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def standardised(kernel: Float[jax.Array, "*window C F"]) -> Float[jax.Array, "*window C F"]:
    """Weight standardisation over everything but the output features, with the population std."""
    axes = tuple(range(kernel.ndim - 1))
    centred = kernel - kernel.mean(axes)
    return centred / (centred.std(axes) + STD_EPS)


def normalised_pixels(pixels: Num[jax.Array, "B h w C"], img_norm_type: str) -> Float[jax.Array, "B h w C"]:
    """Grey levels 0 to 255 as [-1, 1], or by ImageNet's statistics, repeated for every stacked image."""
    pixels = pixels.astype(jnp.float32)
    if img_norm_type == "default":
        return pixels / 127.5 - 1.0
    if img_norm_type != "imagenet":
        raise ValueError(f"img_norm_type is {img_norm_type!r}, wanted 'default' or 'imagenet'.")
    if pixels.shape[-1] % 3:
        raise ValueError(f"img_norm_type 'imagenet' got {pixels.shape[-1]} channels, wanted a multiple of 3 (RGB).")
    repeats = pixels.shape[-1] // 3
    return (pixels / 255.0 - jnp.tile(jnp.array(IMAGENET_MEAN), repeats)) / jnp.tile(jnp.array(IMAGENET_STD), repeats)


class StdConv(nn.Module):
    """Square convolution whose kernel is standardised before use."""

    features: int
    kernel_size: int
    stride: int
    padding: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B h w C"]) -> Float[jax.Array, "B h2 w2 F"]:
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel = standardised(self.param("kernel", nn.initializers.lecun_normal(), shape)).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,)).astype(self.dtype)
        strides, padding = (self.stride, self.stride), [(self.padding, self.padding)] * 2
        x = x.astype(self.dtype)
        return bias + jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=DIMENSIONS)


class GroupNorm(nn.Module):
    """Group normalisation; the variance is E[x^2] - E[x]^2, as in flax."""

    groups: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B h w C"]) -> Float[jax.Array, "B h w C"]:
        num, channels = x.shape[0], x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        x = x.astype(jnp.float32)

        def grouped(v: jax.Array) -> jax.Array:
            means = v.mean((1, 2)).reshape(num, self.groups, -1).mean(-1)
            return jnp.repeat(means, channels // self.groups, axis=-1)[:, None, None]

        mean = grouped(x)
        variance = jnp.maximum(grouped(x * x) - mean * mean, 0.0)
        return ((x - mean) * (jax.lax.rsqrt(variance + NORM_EPS) * scale) + bias).astype(self.dtype)


class PatchEmbedding(nn.Module):
    """A convolution whose stride equals its kernel, as one matrix product; an incomplete patch is dropped."""

    features: int
    size: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B h w C"]) -> Float[jax.Array, "B h2 w2 F"]:
        size, channels = self.size, x.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (size, size, channels, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,)).astype(self.dtype)
        rows, columns = x.shape[1] // size, x.shape[2] // size
        x = x[:, : rows * size, : columns * size].astype(self.dtype)
        blocks = x.reshape(-1, rows, size, columns, size, channels).transpose(0, 1, 3, 2, 4, 5)
        blocks = blocks.reshape(-1, rows, columns, size * size * channels)
        return blocks @ kernel.reshape(-1, self.features).astype(self.dtype) + bias


class FilmConditioning(nn.Module):
    """Scale and shift of every feature by the conditioning; the identity at the start.

    Upstream names the two projections the other way round; what counts for a checkpoint is that Dense_0 scales.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B h w F"], film: Float[jax.Array, "B d"]) -> Float[jax.Array, "B h w F"]:
        zeros, width = nn.initializers.zeros, x.shape[-1]
        scale = nn.Dense(width, kernel_init=zeros, dtype=self.dtype, name="Dense_0")(film)[:, None, None]
        shift = nn.Dense(width, kernel_init=zeros, dtype=self.dtype, name="Dense_1")(film)[:, None, None]
        return x * (1.0 + scale) + shift


class SmallStem(nn.Module):
    """Strided convolutions and a patch embedding (https://arxiv.org/abs/2106.14881)."""

    spec: StemSpec
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, pixels: Num[jax.Array, "B h w C"], film: Float[jax.Array, "B d"] | None = None
    ) -> Float[jax.Array, "B h2 w2 F"]:
        spec = self.spec
        _check(spec, pixels, film)
        x = normalised_pixels(pixels, spec.img_norm_type)
        layers = zip(spec.features, spec.kernel_sizes, spec.strides, spec.padding, strict=True)
        for i, layer in enumerate(layers):
            x = StdConv(*layer, dtype=self.dtype, name=f"StdConv_{i}")(x)
            x = nn.relu(GroupNorm(spec.num_groups, self.dtype, name=f"GroupNorm_{i}")(x))
        x = PatchEmbedding(spec.num_features, spec.patch_size // STEM_STRIDE, self.dtype, name="embedding")(x)
        return x if film is None else FilmConditioning(self.dtype, name="FilmConditioning_0")(x, film)


class PatchEncoder(nn.Module):
    """A linear map of every patch of pixels."""

    spec: PatchSpec
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, pixels: Num[jax.Array, "B h w C"], film: Float[jax.Array, "B d"] | None = None
    ) -> Float[jax.Array, "B h2 w2 F"]:
        spec = self.spec
        _check(spec, pixels, film)
        x = normalised_pixels(pixels, spec.img_norm_type)
        x = PatchEmbedding(spec.num_features, spec.patch_size, self.dtype, name="embedding")(x)
        return x if film is None else FilmConditioning(self.dtype, name="FilmConditioning_0")(x, film)


def patch_stride(spec: StemSpec | PatchSpec) -> int:
    """Pixels from one token to the next; image sizes are multiples of it.

    Raises:
        ValueError: lists of different lengths, a patch size that the stem cannot make, or features that do not split
            into the groups of the normalisation.
    """
    if isinstance(spec, PatchSpec):
        return spec.patch_size
    sizes = {name: len(getattr(spec, name)) for name in ("features", "kernel_sizes", "strides", "padding")}
    if len(set(sizes.values())) > 1:
        lengths = ", ".join(f"{name} {length}" for name, length in sizes.items())
        raise ValueError(f"{spec.NAME}: got lists of lengths {lengths}; wanted one entry of each for every layer.")
    if spec.patch_size < STEM_STRIDE or spec.patch_size % STEM_STRIDE:
        raise ValueError(f"{spec.NAME}: patch_size is {spec.patch_size}, wanted a multiple of {STEM_STRIDE}.")
    odd = [features for features in spec.features if features % spec.num_groups]
    if odd:
        raise ValueError(f"{spec.NAME}: {odd[0]} features do not split into {spec.num_groups} groups (num_groups).")
    return math.prod(spec.strides) * (spec.patch_size // STEM_STRIDE)


def _check(spec: StemSpec | PatchSpec, pixels: jax.Array, film: jax.Array | None) -> None:
    """Mistakes of a config or of a camera, before they become a shape error inside a convolution."""
    multiple, (height, width) = patch_stride(spec), pixels.shape[1:3]
    if height % multiple or width % multiple:
        raise ValueError(
            f"{spec.NAME}: the image has {height} x {width} pixels, wanted multiples of {multiple}: resize it."
        )
    if spec.use_film != (film is not None):
        got = "none" if film is None else "a conditioning"
        raise ValueError(
            f"{spec.NAME}: use_film is {spec.use_film} but got {got}; see task_film_keys of the tokenizer."
        )


def encoder_module(spec: EncoderSpec, dtype: Any = jnp.float32, name: str | None = None) -> nn.Module:
    """The encoder of a spec. All are called with (pixels [B h w C], film [B d] or None) and give [B h2 w2 F]."""
    if isinstance(spec, KeypointSpec):
        return KeypointStem(spec, dtype, name=name)
    if isinstance(spec, PatchSpec):
        return PatchEncoder(spec, dtype, name=name)
    return SmallStem(spec, dtype, name=name)


def encoder_name(spec: EncoderSpec) -> str:
    """Where a tokenizer keeps the encoder's parameters: the class and a number. The key points' lie directly in it."""
    return "" if isinstance(spec, KeypointSpec) else f"{spec.NAME}_0"
