"""Observations to groups of tokens, by spec: what is stacked, what encodes it. Parameter names are upstream's.

Source: octo-models/octo, ImageTokenizer, TokenLearner and LowdimObsTokenizer.
Axes: B batch, T window, n tokens, C channels, P numbers of a low-dimensional input, F features. Images are NHWC.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Num

from vla_rlaif.policies.octo.bins import bin_index, thresholds
from vla_rlaif.policies.octo.map_head import MAPHead
from vla_rlaif.policies.octo.spec import ImageSpec, LowdimSpec
from vla_rlaif.policies.octo.stems import encoder_module, encoder_name

NORM_EPS = 1e-6


class TokenLearner(nn.Module):
    """Any number of tokens to ``num_tokens``, by attention pooling."""

    num_tokens: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: Float[jax.Array, "*b n F"]) -> Float[jax.Array, "*b k F"]:
        table = self.param("pos_embed", nn.initializers.normal(0.02), tokens.shape[-2:])
        x = nn.LayerNorm(epsilon=NORM_EPS, dtype=self.dtype, name="LayerNorm_0")(tokens + table)
        return MAPHead(self.num_tokens, dtype=self.dtype, name="MAPHead_0")(x)


class ImageTokenizer(nn.Module):
    """Encodes a stack of images frame by frame; the tokens are the patches, row by row."""

    spec: ImageSpec
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, frames: Num[jax.Array, "B T h w C"], film: Float[jax.Array, "B #T d"] | None = None
    ) -> Float[jax.Array, "B T n F"]:
        """Takes what ``stack_frames`` and ``film_condition`` give; the conditioning may be one for the whole window."""
        batch, window = frames.shape[:2]
        if film is not None:
            film = jnp.broadcast_to(film, (batch, window, film.shape[-1])).reshape(batch * window, -1)
        name = encoder_name(self.spec.encoder)
        encoder = encoder_module(self.spec.encoder, self.dtype, name=name or None)
        if not name:
            nn.share_scope(self, encoder)
        patches = encoder(frames.reshape(-1, *frames.shape[2:]), film)
        tokens = patches.reshape(batch, window, -1, patches.shape[-1])
        if self.spec.use_token_learner:
            tokens = TokenLearner(self.spec.num_tokens, self.dtype, name="TokenLearner_0")(tokens)
        return tokens


class LowdimTokenizer(nn.Module):
    """One token for each number: its value, or its bin as a one-hot vector. No parameters."""

    spec: LowdimSpec
    dtype: Any = jnp.float32

    def __call__(self, values: Float[jax.Array, "B T P"]) -> Float[jax.Array, "B T P F"]:
        """Takes what ``stack_lowdim`` gives."""
        spec = self.spec
        if not spec.discretize:
            return values[..., None].astype(self.dtype)
        edges = thresholds(spec.bin_type, spec.n_bins, spec.low, spec.high)
        index = bin_index(values, edges, spec.bin_type, spec.low, spec.high)
        return jax.nn.one_hot(index, spec.n_bins, dtype=self.dtype)


def matching(patterns: Sequence[str], keys: Iterable[str]) -> list[str]:
    """Keys that a pattern matches from the start (``re.match``), sorted."""
    return sorted(key for key in keys if any(re.match(pattern, key) for pattern in patterns))


def stack_frames(
    spec: ImageSpec,
    observation: Mapping[str, Num[jax.Array, "B T ..."]],
    goals: Mapping[str, Num[jax.Array, "B ..."]],
) -> Num[jax.Array, "B T h w C"] | None:
    """The matching images of each frame side by side on channels, the matching goal images behind them.

    A goal that is missing for an image of the observation is black (zero before normalisation), as upstream. None if
    no image of the observation matches. Both mappings may hold other things under other keys.

    Raises:
        ValueError: goals are stacked, but neither an observation nor a goal matches; or a match is no image.
    """
    keys = matching(spec.obs_stack_keys, observation)
    if not keys:
        return None
    stack = [_image(key, observation[key], "B T h w C") for key in keys]
    if spec.task_stack_keys:
        missing = [key for key in matching(spec.task_stack_keys, observation) if key not in goals]
        goals = {**goals, **{key: jnp.zeros_like(observation[key][:, 0]) for key in missing}}
        wanted = matching(spec.task_stack_keys, goals)
        if not wanted:
            raise ValueError(
                f"task_stack_keys {list(spec.task_stack_keys)} match no image: the observation has "
                f"{', '.join(sorted(observation))}, the task has {', '.join(sorted(goals)) or 'none'}."
            )
        window = stack[0].shape[1]
        for key in wanted:
            goal = _image(key, goals[key], "B h w C")
            stack.append(jnp.broadcast_to(goal[:, None], (len(goal), window, *goal.shape[1:])))
    return jnp.concatenate(stack, axis=-1)


def _image(key: str, value: jax.Array, axes: str) -> jax.Array:
    if value.ndim != len(axes.split()):
        raise ValueError(
            f"{key} has shape {value.shape}, wanted an image [{axes}]: change the pattern that matches it."
        )
    return value


def film_condition(spec: ImageSpec, task: Mapping[str, Num[jax.Array, "B ..."]]) -> Float[jax.Array, "B d"] | None:
    """The task's values under ``task_film_keys`` (names, not patterns), side by side; None without keys.

    Raises:
        ValueError: the task lacks one.
    """
    if not spec.task_film_keys:
        return None
    missing = [key for key in spec.task_film_keys if key not in task]
    if missing:
        raise ValueError(f"task_film_keys wants {missing[0]!r} in the task, which has {', '.join(sorted(task))}.")
    joined = jnp.concatenate([task[key] for key in spec.task_film_keys], axis=-1)
    return joined.reshape(len(joined), -1).astype(jnp.float32)


def stack_lowdim(
    spec: LowdimSpec, observation: Mapping[str, Num[jax.Array, "B T ..."]]
) -> Float[jax.Array, "B T P"] | None:
    """The matching values side by side: pattern by pattern, sorted within each. None if nothing matches.

    Raises:
        ValueError: the spec has no patterns, or one matches something that is not [B T P].
    """
    if not spec.obs_keys:
        raise ValueError("LowdimObsTokenizer has no obs_keys: name the observations it reads.")
    keys = [key for pattern in spec.obs_keys for key in matching([pattern], observation)]
    if not keys:
        return None
    wrong = [key for key in keys if observation[key].ndim != 3]
    if wrong:
        raise ValueError(f"obs_keys match {wrong[0]} of shape {observation[wrong[0]].shape}, wanted numbers [B T P].")
    return jnp.concatenate([observation[key].astype(jnp.float32) for key in keys], axis=-1)
