"""T5 v1.0 encoder: upstream's frozen language model. Parameter names are those of the checkpoint (``hf_model``).

Source: https://arxiv.org/abs/1910.10683 and the flax weights of t5-base inside Octo checkpoints.
Axes: B batch, L language tokens, D model width.
"""

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float, Int

RMS_EPS = 1e-6


def relative_buckets(length: int, num_buckets: int = 32, max_distance: int = 128) -> Int[np.ndarray, "L L"]:
    """Bucket of key position minus query position: exact up to 8 tokens, logarithmic beyond, signs apart."""
    position = np.arange(length)
    relative = position[None, :] - position[:, None]
    half = num_buckets // 2
    exact = half // 2
    distance = np.abs(relative)
    spread = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact) * (half - exact)
    bucket = np.where(distance < exact, distance, np.minimum(exact + spread, half - 1)).astype(np.int32)
    return bucket + (relative > 0).astype(np.int32) * half


class RMSNorm(nn.Module):
    """Scale by the root mean square; no centring, no bias."""

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b D"]:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        return weight * (x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + RMS_EPS))


class Embedding(nn.Module):
    """A plain table."""

    num_rows: int
    width: int
    std: float = 1.0

    @nn.compact
    def __call__(self, ids: Int[jax.Array, "*b"]) -> Float[jax.Array, "*b D"]:
        table = self.param("embedding", nn.initializers.normal(self.std), (self.num_rows, self.width))
        return table[ids]


class SelfAttention(nn.Module):
    """Bidirectional attention without biases and without the 1/sqrt(d) scale; layer 0 owns the position table."""

    num_heads: int
    head_dim: int
    owns_positions: bool

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], key_bias: Float[jax.Array, "B 1 1 L"], positions: jax.Array | None
    ) -> tuple[Float[jax.Array, "B L D"], Float[jax.Array, "heads L L"]]:
        inner, std = self.num_heads * self.head_dim, (self.num_heads * self.head_dim) ** -0.5
        if self.owns_positions:
            table = Embedding(32, self.num_heads, std, name="relative_attention_bias")
            positions = table(jnp.asarray(relative_buckets(x.shape[1]))).transpose(2, 0, 1)
        assert positions is not None

        def heads(name: str, scale: float) -> Float[jax.Array, "B L heads d"]:
            init = nn.initializers.normal(scale)
            y = nn.Dense(inner, use_bias=False, kernel_init=init, name=name)(x)
            return y.reshape(*y.shape[:2], self.num_heads, self.head_dim)

        query, key, value = heads("q", (inner * self.head_dim) ** -0.5), heads("k", std), heads("v", std)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) + positions + key_bias, -1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*x.shape[:2], inner)
        out = nn.Dense(x.shape[-1], use_bias=False, kernel_init=nn.initializers.normal(std), name="o")
        return out(mixed), positions


class DenseReluDense(nn.Module):
    """The feed-forward layer, without biases."""

    hidden: int

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b D"]:
        width = x.shape[-1]
        wide = nn.Dense(self.hidden, use_bias=False, kernel_init=nn.initializers.normal(width**-0.5), name="wi")(x)
        init = nn.initializers.normal(self.hidden**-0.5)
        return nn.Dense(width, use_bias=False, kernel_init=init, name="wo")(nn.relu(wide))


class AttentionLayer(nn.Module):
    """Checkpoint level ``layer/0``."""

    num_heads: int
    head_dim: int
    owns_positions: bool

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], key_bias: Float[jax.Array, "B 1 1 L"], positions: jax.Array | None
    ) -> tuple[Float[jax.Array, "B L D"], Float[jax.Array, "heads L L"]]:
        attention = SelfAttention(self.num_heads, self.head_dim, self.owns_positions, name="SelfAttention")
        mixed, positions = attention(RMSNorm(name="layer_norm")(x), key_bias, positions)
        return x + mixed, positions


class FeedForwardLayer(nn.Module):
    """Checkpoint level ``layer/1``."""

    hidden: int

    @nn.compact
    def __call__(self, x: Float[jax.Array, "B L D"]) -> Float[jax.Array, "B L D"]:
        return x + DenseReluDense(self.hidden, name="DenseReluDense")(RMSNorm(name="layer_norm")(x))


class Layers(nn.Module):
    """Checkpoint level ``block/<i>/layer``."""

    sizes: tuple[int, int, int]  # heads, head_dim, hidden
    owns_positions: bool

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], key_bias: Float[jax.Array, "B 1 1 L"], positions: jax.Array | None
    ) -> tuple[Float[jax.Array, "B L D"], Float[jax.Array, "heads L L"]]:
        num_heads, head_dim, hidden = self.sizes
        x, positions = AttentionLayer(num_heads, head_dim, self.owns_positions, name="0")(x, key_bias, positions)
        return FeedForwardLayer(hidden, name="1")(x), positions


class Block(nn.Module):
    """Checkpoint level ``block/<i>``."""

    sizes: tuple[int, int, int]
    owns_positions: bool

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], key_bias: Float[jax.Array, "B 1 1 L"], positions: jax.Array | None
    ) -> tuple[Float[jax.Array, "B L D"], Float[jax.Array, "heads L L"]]:
        return Layers(self.sizes, self.owns_positions, name="layer")(x, key_bias, positions)


class Blocks(nn.Module):
    """Checkpoint level ``block``: all layers share the position table of the first."""

    sizes: tuple[int, int, int]
    num_layers: int

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], key_bias: Float[jax.Array, "B 1 1 L"]
    ) -> Float[jax.Array, "B L D"]:
        positions = None
        for i in range(self.num_layers):
            x, positions = Block(self.sizes, i == 0, name=str(i))(x, key_bias, positions)
        return x


class Stack(nn.Module):
    """Checkpoint level ``encoder``."""

    sizes: tuple[int, int, int]
    num_layers: int

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], key_bias: Float[jax.Array, "B 1 1 L"]
    ) -> Float[jax.Array, "B L D"]:
        return RMSNorm(name="final_layer_norm")(Blocks(self.sizes, self.num_layers, name="block")(x, key_bias))


class T5Encoder(nn.Module):
    """Token ids and their padding mask to features. The defaults are t5-base; always deterministic."""

    vocabulary: int = 32128
    width: int = 768
    head_dim: int = 64
    num_heads: int = 12
    hidden: int = 3072
    num_layers: int = 12

    @nn.compact
    def __call__(self, ids: Int[jax.Array, "B L"], mask: Int[jax.Array, "B L"]) -> Float[jax.Array, "B L D"]:
        x = Embedding(self.vocabulary, self.width, name="shared")(ids)
        key_bias = jnp.where(mask[:, None, None, :] > 0, 0.0, jnp.finfo(jnp.float32).min)
        return Stack((self.num_heads, self.head_dim, self.hidden), self.num_layers, name="encoder")(x, key_bias)


# Compiled once for each size of encoder.
_encode = jax.jit(T5Encoder.apply, static_argnums=0)


def features_of(
    encoder: T5Encoder, params: Mapping[str, np.ndarray], ids: Int[np.ndarray, "n L"], mask: Int[np.ndarray, "n L"]
) -> list[Float[np.ndarray, "L D"]]:
    """One sentence a call: its features do not depend on what else is asked. ``params`` are on the device meanwhile."""
    if not len(ids):
        return []
    nested = {"params": unflatten_dict(jax.device_put(dict(params)), sep="/")}
    with jax.default_matmul_precision("highest"):  # once a sentence: worth equal numbers on every device
        return [np.asarray(_encode(encoder, nested, i[None], m[None]))[0] for i, m in zip(ids, mask, strict=True)]


def encoder_of(params: Mapping[str, np.ndarray]) -> T5Encoder:
    """The encoder with these parameters (flat names, from ``shared/embedding`` on), by their shapes.

    Raises:
        ValueError: they are no T5 v1.0 encoder's; the message names the first that is missing, unknown or misshaped.
    """
    layer = "encoder/block/0/layer"
    names = (
        "shared/embedding",
        f"{layer}/0/SelfAttention/q/kernel",
        f"{layer}/0/SelfAttention/relative_attention_bias/embedding",
        f"{layer}/1/DenseReluDense/wi/kernel",
    )
    if not all(name in params and params[name].ndim == 2 for name in names):
        raise ValueError(
            f"not a T5 v1.0 encoder: wanted the matrices {', '.join(names)} (v1.1 and Flan-T5 have wi_0 and wi_1)."
        )
    table, query, bias, wide = (params[name].shape for name in names)
    encoder = T5Encoder(
        vocabulary=table[0],
        width=table[1],
        head_dim=query[1] // bias[1],
        num_heads=bias[1],
        hidden=wide[1],
        num_layers=len({name.split("/")[2] for name in params if name.startswith("encoder/block/")}),
    )
    ids = jax.ShapeDtypeStruct((1, 1), np.int32)
    tree: Any = jax.eval_shape(encoder.init, jax.random.key(0), ids, ids)["params"]
    shapes: dict[str, Any] = flatten_dict(tree, sep="/")
    for name in sorted(shapes.keys() | params.keys()):
        want, got = shapes[name].shape if name in shapes else None, params[name].shape if name in params else None
        if want != got:
            raise ValueError(f"not a T5 v1.0 encoder: {name} has shape {got or 'none'}, wanted {want or 'none'}.")
    return encoder
