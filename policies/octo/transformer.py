"""Pre-norm transformer encoder, the body of Octo. Parameter names are upstream's.

Axes: B batch, L tokens, R the rows that are wanted, D token width.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

NORM_EPS = 1e-6
KERNEL = nn.initializers.xavier_uniform()


class MlpBlock(nn.Module):
    """Dense, tanh-approximated gelu, Dense."""

    hidden: int

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b D"]:
        bias = nn.initializers.normal(1e-6)
        hidden = nn.Dense(self.hidden, kernel_init=KERNEL, bias_init=bias, name="Dense_0")(x)
        return nn.Dense(x.shape[-1], kernel_init=KERNEL, bias_init=bias, name="Dense_1")(nn.gelu(hidden))


class EncoderBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and around a residual."""

    num_heads: int
    mlp_dim: int

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], mask: Bool[jax.Array, "#B 1 L L"], rows: Sequence[int] | None = None
    ) -> Float[jax.Array, "B R D"]:
        """Only the ``rows`` that are asked for; all of them by default."""
        normed = nn.LayerNorm(epsilon=NORM_EPS, name="LayerNorm_0")(x)
        queries = normed
        if rows is not None:
            index = jnp.asarray(rows)
            x, queries, mask = x[:, index], normed[:, index], mask[:, :, index]
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads, kernel_init=KERNEL, name="MultiHeadDotProductAttention_0"
        )
        x = x + attention(queries, normed, mask=mask)
        return x + MlpBlock(self.mlp_dim, name="MlpBlock_0")(nn.LayerNorm(epsilon=NORM_EPS, name="LayerNorm_1")(x))


class Transformer(nn.Module):
    """A stack of blocks and a final LayerNorm."""

    num_layers: int
    num_heads: int
    mlp_dim: int

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], mask: Bool[jax.Array, "#B 1 L L"], rows: Sequence[int] | None = None
    ) -> Float[jax.Array, "B R D"]:
        """With ``rows`` the last block computes no others: acting needs the readout only."""
        for i in range(self.num_layers):
            last = i == self.num_layers - 1
            block = EncoderBlock(self.num_heads, self.mlp_dim, name=f"encoderblock_{i}")
            x = block(x, mask, rows if last else None)
        return nn.LayerNorm(epsilon=NORM_EPS, name="encoder_norm")(x)


class BlockTransformer(nn.Module):
    """Holds the transformer one level down, where upstream's checkpoints have it."""

    num_layers: int
    num_heads: int
    mlp_dim: int

    @nn.compact
    def __call__(
        self, x: Float[jax.Array, "B L D"], mask: Bool[jax.Array, "#B 1 L L"], rows: Sequence[int] | None = None
    ) -> Float[jax.Array, "B R D"]:
        body = Transformer(self.num_layers, self.num_heads, self.mlp_dim, name="Transformer_0")
        return body(x, mask, rows)
