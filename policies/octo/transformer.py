"""Pre-norm transformer encoder, the body of Octo. Parameter names are upstream's.

Axes: B batch, L tokens, R the rows that are wanted, D token width.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

NORM_EPS = 1e-6
KERNEL = nn.initializers.xavier_uniform()


class MlpBlock(nn.Module):
    """Dense, tanh-approximated gelu, Dense."""

    hidden: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b D"]:
        def dense(features: int, name: str) -> nn.Dense:
            bias = nn.initializers.normal(1e-6)
            return nn.Dense(features, dtype=self.dtype, kernel_init=KERNEL, bias_init=bias, name=name)

        return dense(x.shape[-1], "Dense_1")(nn.gelu(dense(self.hidden, "Dense_0")(x)))


class EncoderBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and around a residual."""

    num_heads: int
    mlp_dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], mask: Bool[jax.Array, "#B 1 L L"], rows: Sequence[int] | None = None
    ) -> Float[jax.Array, "B R D"]:
        """Only the ``rows`` that are asked for; all of them by default."""
        normed = nn.LayerNorm(epsilon=NORM_EPS, dtype=self.dtype, name="LayerNorm_0")(x)
        queries = normed
        if rows is not None:
            index = jnp.asarray(rows)
            x, queries, mask = x[:, index], normed[:, index], mask[:, :, index]
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads,
            dtype=self.dtype,
            kernel_init=KERNEL,
            force_fp32_for_softmax=True,
            name="MultiHeadDotProductAttention_0",
        )
        x = x + attention(queries, normed, mask=mask)
        normed = nn.LayerNorm(epsilon=NORM_EPS, dtype=self.dtype, name="LayerNorm_1")(x)
        return x + MlpBlock(self.mlp_dim, self.dtype, name="MlpBlock_0")(normed)


class Transformer(nn.Module):
    """A stack of blocks and a final LayerNorm."""

    num_layers: int
    num_heads: int
    mlp_dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[jax.Array, "B L D"],
        mask: Bool[jax.Array, "#B 1 L L"],
        rows: Sequence[int] | None = None,
        blocks: tuple[int, int] | None = None,
    ) -> Float[jax.Array, "B R D"]:
        """With ``rows`` the last block computes no others: acting needs the readout only. ``blocks`` runs a part of the
        stack (first, end); only a part that reaches the end has the final LayerNorm."""
        first, end = blocks or (0, self.num_layers)
        for i in range(first, end):
            last = i == self.num_layers - 1
            block = EncoderBlock(self.num_heads, self.mlp_dim, self.dtype, name=f"encoderblock_{i}")
            x = block(x, mask, rows if last else None)
        if end < self.num_layers:
            return x
        return nn.LayerNorm(epsilon=NORM_EPS, dtype=self.dtype, name="encoder_norm")(x)


class BlockTransformer(nn.Module):
    """Holds the transformer one level down, where upstream's checkpoints have it."""

    num_layers: int
    num_heads: int
    mlp_dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[jax.Array, "B L D"],
        mask: Bool[jax.Array, "#B 1 L L"],
        rows: Sequence[int] | None = None,
        blocks: tuple[int, int] | None = None,
    ) -> Float[jax.Array, "B R D"]:
        body = Transformer(self.num_layers, self.num_heads, self.mlp_dim, self.dtype, name="Transformer_0")
        return body(x, mask, rows, blocks)
