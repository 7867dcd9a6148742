"""Octo's other action heads: a point estimate and a distribution over bins; their losses, and how they are read.

Every head has two methods, as the diffusion head: ``embed`` pools the readout tokens, ``__call__`` predicts from that.
Initialise with ``head.init(key, tokens, method="init_all")``.
Source: octo-models/octo, action_heads.py. Parameter names are upstream's.
Axes: *b leading axes, n readout tokens, k tokens that predict, D token width, H actions of a chunk, A dims, V bins,
G = V + 1 edges.
Actions are normalised.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from vla_rlaif.policies.octo.bins import bin_centres, bin_index, thresholds
from vla_rlaif.policies.octo.diffusion import DiffusionHead, masked_mean
from vla_rlaif.policies.octo.map_head import MAPHead, pooled
from vla_rlaif.policies.octo.spec import ContinuousSpec, DiffusionSpec, DiscreteSpec, HeadSpec


class ContinuousHead(nn.Module):
    """A projection, squashed into the range of actions."""

    spec: ContinuousSpec
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.map_head = MAPHead(dtype=self.dtype) if self.spec.use_map else None
        self.mean_proj = nn.Dense(self.spec.action_horizon * self.spec.action_dim, dtype=self.dtype)

    def embed(
        self, tokens: Float[jax.Array, "*b n D"], mask: Bool[jax.Array, "*b n"] | None = None
    ) -> Float[jax.Array, "*b D"]:
        """``mask`` counts with attention pooling only."""
        return pooled(tokens, mask, self.map_head)

    def __call__(self, embedding: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b H A"]:
        """The action, in float32."""
        spec, y = self.spec, self.mean_proj(embedding).astype(jnp.float32)
        y = y.reshape(*y.shape[:-1], spec.action_horizon, spec.action_dim)
        return jnp.tanh(y / spec.max_action) * spec.max_action

    def init_all(self, tokens: Float[jax.Array, "*b n D"]) -> Float[jax.Array, "*b H A"]:
        """Both methods in turn, so that ``init`` meets every parameter."""
        return self(self.embed(tokens))


class DiscreteHead(nn.Module):
    """Logits over bins, from one token for the chunk, for each action, or for each number."""

    spec: DiscreteSpec
    dtype: Any = jnp.float32

    def setup(self) -> None:
        spec, num = self.spec, tokens_per_action(self.spec)
        self.map_head = MAPHead(num, dtype=self.dtype) if spec.use_map else None
        width = spec.action_horizon * spec.action_dim * spec.vocab_size // num
        self.vocab_proj = nn.Dense(width, dtype=self.dtype)

    def embed(
        self, tokens: Float[jax.Array, "*b n D"], mask: Bool[jax.Array, "*b n"] | None = None
    ) -> Float[jax.Array, "*b k D"]:
        """One vector for each token that predicts: the probes' answers, or the readout tokens as they are.

        Raises:
            ValueError: without attention pooling, the readout has another number of tokens than ``token_per`` asks for.
        """
        if self.map_head is not None:
            return self.map_head(tokens, mask)
        num = tokens_per_action(self.spec)
        if tokens.shape[-2] != num:
            raise ValueError(
                f"DiscreteActionHead: the readout has {tokens.shape[-2]} tokens, wanted {num} for token_per "
                f"{self.spec.token_per!r}: change readouts, or set use_map."
            )
        return tokens

    def __call__(self, embedding: Float[jax.Array, "*b k D"]) -> Float[jax.Array, "*b H A V"]:
        """The logits, in float32."""
        spec, y = self.spec, self.vocab_proj(embedding).astype(jnp.float32)
        return y.reshape(*y.shape[:-2], spec.action_horizon, spec.action_dim, spec.vocab_size)

    def init_all(self, tokens: Float[jax.Array, "*b n D"]) -> Float[jax.Array, "*b H A V"]:
        """Both methods in turn, so that ``init`` meets every parameter."""
        return self(self.embed(tokens))


def tokens_per_action(spec: DiscreteSpec) -> int:
    """How many tokens predict a chunk (k)."""
    match spec.token_per:
        case "":
            return 1
        case "action_horizon":
            return spec.action_horizon
        case "action_dim_and_action_horizon":
            return spec.action_horizon * spec.action_dim
    raise ValueError(
        f"token_per is {spec.token_per!r}, wanted '', 'action_horizon' or 'action_dim_and_action_horizon'."
    )


def head_module(spec: HeadSpec, dtype: Any = jnp.float32) -> ContinuousHead | DiscreteHead | DiffusionHead:
    """The head of a spec."""
    if isinstance(spec, DiffusionSpec):
        return DiffusionHead(spec, dtype)
    return DiscreteHead(spec, dtype) if isinstance(spec, DiscreteSpec) else ContinuousHead(spec, dtype)


def continuous_loss(
    spec: ContinuousSpec | DiffusionSpec,
    predicted: Float[jax.Array, "*b"],
    target: Float[jax.Array, "*b"],
    mask: Bool[jax.Array, "*#b"],
) -> Float[jax.Array, ""]:
    """Masked mean of the error, summed over action dims; of actions, or of noise for the diffusion head."""
    error = predicted - target
    return masked_mean(jnp.abs(error) if spec.loss_type == "l1" else jnp.square(error), mask) * spec.action_dim


def discrete_loss(
    spec: DiscreteSpec,
    logits: Float[jax.Array, "*b V"],
    target: Float[jax.Array, "*b"],
    mask: Bool[jax.Array, "*#b"],
) -> Float[jax.Array, ""]:
    """Masked mean of the cross entropy, nats; a mean over action dims, too, as upstream."""
    label = discrete_label(spec, target)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], axis=-1)[..., 0]
    return masked_mean(-logp, mask)


def discrete_label(spec: DiscreteSpec, action: Float[jax.Array, "*b"]) -> Int[jax.Array, "*b"]:
    """The bin of each number."""
    return bin_index(action, _edges(spec), spec.normalization_type)


def discrete_argmax(spec: DiscreteSpec, logits: Float[jax.Array, "*b V"]) -> Float[jax.Array, "*b"]:
    """The centre of the likeliest bin."""
    return bin_centres(_edges(spec))[jnp.argmax(logits, axis=-1)]


def discrete_sample(
    spec: DiscreteSpec,
    logits: Float[jax.Array, "*b V"],
    key: jax.Array,
    temperature: float = 1.0,
    sample_shape: tuple[int, ...] = (),
) -> Float[jax.Array, "..."]:
    """The centre of a bin drawn from softmax(logits / temperature): ``sample_shape``, then the axes of the logits."""
    shape = (*sample_shape, *logits.shape[:-1])
    return bin_centres(_edges(spec))[jax.random.categorical(key, logits / temperature, shape=shape)]


def _edges(spec: DiscreteSpec) -> Float[jax.Array, " G"]:
    """Uniform bins span [0, 1]: upstream's default, which its config cannot change."""
    return thresholds(spec.normalization_type, spec.vocab_size)
