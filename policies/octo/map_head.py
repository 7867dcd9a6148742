"""Attention pooling: a few learned probes read a set of tokens. Parameter names are upstream's (MAPHead).

Upstream applies dropout 0.1 inside its MLP while training; here nothing is dropped, so that a policy scores its own
actions exactly. Source: https://arxiv.org/abs/2106.04560, octo-models/octo.
Axes: *b leading axes, n tokens, k probes, D token width.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from vla_rlaif.policies.octo.transformer import MlpBlock

NORM_EPS = 1e-6
XAVIER = nn.initializers.xavier_uniform()


class MAPHead(nn.Module):
    """Probes attend to the tokens, then an MLP around a residual."""

    num_readouts: int = 1
    num_heads: int = 8
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, tokens: Float[jax.Array, "*b n D"], mask: Bool[jax.Array, "*b n"] | None = None
    ) -> Float[jax.Array, "*b k D"]:
        """``mask`` is False for tokens that are not read."""
        *lead, num, width = tokens.shape
        rows = math.prod(lead)
        probe = self.param("probe", XAVIER, (1, self.num_readouts, width))
        queries = jnp.broadcast_to(probe, (rows, self.num_readouts, width))
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads,
            kernel_init=XAVIER,
            dtype=self.dtype,
            force_fp32_for_softmax=True,
            name="MultiHeadDotProductAttention_0",
        )
        keys = None if mask is None else mask.reshape(rows, 1, 1, num)
        out = attention(queries, tokens.reshape(rows, num, width), mask=keys)
        normed = nn.LayerNorm(epsilon=NORM_EPS, dtype=self.dtype, name="LayerNorm_0")(out)
        out = out + MlpBlock(4 * width, dtype=self.dtype, name="MlpBlock_0")(normed)
        return out.reshape(*lead, self.num_readouts, width)


def pooled(
    tokens: Float[jax.Array, "*b n D"], mask: Bool[jax.Array, "*b n"] | None, head: MAPHead | None
) -> Float[jax.Array, "*b D"]:
    """One vector for a set: the answer of the first probe, or the mean (which ignores the mask, as upstream)."""
    return tokens.mean(-2) if head is None else head(tokens, mask)[..., 0, :]
