"""The Octo network: groups of tokens, one transformer, one diffusion head. Knows nothing of policies or environments.

Source: octo-models/octo @ 241fb35, rewritten; with the sizes of Octo-Small the parameter tree has upstream's names.
Axes: B batch, T window (the first T rows of each position table are used, oldest frame first), n tokens of a group,
D token width. The language encoder is outside: the model takes its features.
"""

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Num

from vla_rlaif.config import KeypointStemConfig, SmallStemConfig
from vla_rlaif.policies.octo.attention import Kind, Span, attention_rule
from vla_rlaif.policies.octo.keypoints import KeypointTokenizer
from vla_rlaif.policies.octo.tokenizers import SmallStem16, scalar_tokens, with_goal
from vla_rlaif.policies.octo.transformer import BlockTransformer

POSITION = nn.initializers.normal(0.02)


class Inputs(NamedTuple):
    """What one forward pass reads. A group without input is left out of the sequence."""

    images: Mapping[str, Num[jax.Array, "B T h w 3"]]  # by camera, in the order of the tokenizers
    language: Float[jax.Array, "B n L"] | None = None
    proprio: Float[jax.Array, "B T P"] | None = None  # normalised
    goals: Mapping[str, Num[jax.Array, "B h w 3"]] = {}
    frame_ok: Bool[jax.Array, "B T"] | None = None  # False for frames that pad the window
    image_ok: Mapping[str, Bool[jax.Array, "B T"]] = {}
    language_ok: Bool[jax.Array, " B"] | None = None


class Group(NamedTuple):
    """Consecutive tokens of one origin. Task groups have no time axis."""

    kind: Kind
    name: str
    tokens: Float[jax.Array, "B *T n D"]
    mask: Bool[jax.Array, "B *T n"] | None  # None: all may be attended to


class Trunk(NamedTuple):
    """What comes out: the readout, and what tests and features look at."""

    readout: Float[jax.Array, "B T n D"]
    tokens: Mapping[str, Float[jax.Array, "B *T n D"]]  # every group, before the transformer
    outputs: Mapping[
        str, Float[jax.Array, "B *T n D"]
    ]  # every group, after it; empty if only the readout was asked for
    mask: Bool[jax.Array, "#B 1 L L"]


class OctoTransformer(nn.Module):
    """Tokens to readout."""

    token_dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    stem: SmallStemConfig | KeypointStemConfig
    repeat_task_tokens: bool
    max_horizon: int
    correct_attention: bool = True  # False for v1.0 checkpoints

    @nn.compact
    def __call__(self, inputs: Inputs, readout_only: bool = True) -> Trunk:
        prefix, step = self._prefix(inputs), self._step_groups(inputs)
        batch, window = step[-1].tokens.shape[:2]
        if self.repeat_task_tokens:
            step[-1:-1] = [_repeated(group, window) for group in prefix]
        per_step = jnp.concatenate([group.tokens for group in step], axis=2)
        x = per_step.reshape(batch, -1, self.token_dim)
        if prefix:
            x = jnp.concatenate([*(group.tokens for group in prefix), x], axis=1)
        rule = attention_rule(_spans(prefix), _spans(step), window, correct=self.correct_attention)
        mask = jnp.asarray(rule)[None, None]
        if any(group.mask is not None for group in (*prefix, *step)):
            mask = mask & _key_mask(prefix, step)[:, None, None, :]
        num_prefix, num_step = x.shape[1] - window * per_step.shape[2], per_step.shape[2]
        rows = [num_prefix + (t + 1) * num_step - 1 for t in range(window)]
        body = BlockTransformer(self.num_layers, self.num_heads, self.mlp_dim, name="BlockTransformer_0")
        y = body(x, mask, rows if readout_only else None)
        outputs = {} if readout_only else _split(y, prefix, step, window)
        readout = y[:, :, None] if readout_only else outputs["readout_action"]
        return Trunk(readout, {group.name: group.tokens for group in (*prefix, *step)}, outputs, mask)

    def _prefix(self, inputs: Inputs) -> list[Group]:
        if inputs.language is None:
            return []
        tokens = nn.Dense(self.token_dim, name="task_language_projection")(inputs.language)
        tokens = tokens + self.param("task_language_pos_embedding", POSITION, (1, *tokens.shape[1:]))
        mask = None if inputs.language_ok is None else jnp.broadcast_to(inputs.language_ok[:, None], tokens.shape[:2])
        return [Group("task", "task_language", tokens, mask)]

    def _step_groups(self, inputs: Inputs) -> list[Group]:
        groups = []
        for camera, frames in inputs.images.items():
            name, stem = f"observation_tokenizers_{camera}", self.stem
            if isinstance(stem, KeypointStemConfig):
                tokens = KeypointTokenizer(stem.channels, name=name)(frames)
            else:
                tokenizer = ImageTokenizer(stem.features, stem.groups, stem.embedding, stem.patch_size, name=name)
                tokens = tokenizer(with_goal(frames, inputs.goals.get(camera)) if stem.goal_images else frames)
            mask = _both(inputs.frame_ok, inputs.image_ok.get(camera), tokens)
            groups.append(self._placed(camera, tokens, mask))
        if inputs.proprio is not None:
            tokens = scalar_tokens(inputs.proprio)
            groups.append(self._placed("proprio", tokens, _both(inputs.frame_ok, None, tokens)))
        batch, window = groups[0].tokens.shape[:2]
        table = self.param("readout_action_pos_embedding", POSITION, (1, self.max_horizon, 1, self.token_dim))
        readout = jnp.broadcast_to(table[:, :window], (batch, window, 1, self.token_dim))
        return [*groups, Group("readout", "readout_action", readout, None)]

    def _placed(self, name: str, tokens: Float[jax.Array, "B T n F"], mask: Bool[jax.Array, "B T n"] | None) -> Group:
        """Projected to the token width, with the position of each frame and token added."""
        tokens = nn.Dense(self.token_dim, name=f"obs_{name}_projection")(tokens)
        shape = (1, self.max_horizon, *tokens.shape[2:])
        table = self.param(f"obs_{name}_pos_embedding", POSITION, shape)
        return Group("obs", f"obs_{name}", tokens + table[:, : tokens.shape[1]], mask)


class ImageTokenizer(nn.Module):
    """Folds the window into the batch and flattens the patches, row by row."""

    features: tuple[int, ...]
    groups: int
    embedding: int
    patch_size: int

    @nn.compact
    def __call__(self, frames: Num[jax.Array, "B T h w C"]) -> Float[jax.Array, "B T n F"]:
        batch, window = frames.shape[:2]
        stem = SmallStem16(self.features, self.groups, self.embedding, self.patch_size, name="SmallStem16_0")
        patches = stem(frames.reshape(-1, *frames.shape[2:]))
        return patches.reshape(batch, window, -1, patches.shape[-1])


def _both(
    frame_ok: Bool[jax.Array, "B T"] | None,
    image_ok: Bool[jax.Array, "B T"] | None,
    tokens: Float[jax.Array, "B T n F"],
) -> Bool[jax.Array, "B T n"] | None:
    given = [mask for mask in (frame_ok, image_ok) if mask is not None]
    if not given:
        return None
    return jnp.broadcast_to(jnp.all(jnp.stack(given), axis=0)[..., None], tokens.shape[:3])


def _repeated(group: Group, window: int) -> Group:
    """The task tokens once more at every timestep, unchanged; their mask ignores the padding of the window."""

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], (x.shape[0], window, *x.shape[1:]))

    mask = None if group.mask is None else repeat(group.mask)
    return Group("obs", f"obs_{group.name}", repeat(group.tokens), mask)


def _spans(groups: list[Group]) -> list[Span]:
    return [Span(group.kind, group.name, group.tokens.shape[-2]) for group in groups]


def _key_mask(prefix: list[Group], step: list[Group]) -> Bool[jax.Array, "B L"]:
    """Which tokens may be attended to at all; readouts always."""

    def of(group: Group) -> jax.Array:
        return jnp.ones(group.tokens.shape[:-1], bool) if group.mask is None else group.mask

    per_step = jnp.concatenate([of(group) for group in step], axis=2)
    return jnp.concatenate([*(of(group) for group in prefix), per_step.reshape(per_step.shape[0], -1)], axis=1)


def _split(
    y: Float[jax.Array, "B L D"], prefix: list[Group], step: list[Group], window: int
) -> dict[str, Float[jax.Array, "B *T n D"]]:
    """The sequence by group name again."""
    out, at = {}, 0
    for group in prefix:
        size = group.tokens.shape[1]
        out[group.name] = y[:, at : at + size]
        at += size
    per_step, at = y[:, at:].reshape(y.shape[0], window, -1, y.shape[-1]), 0
    for group in step:
        size = group.tokens.shape[2]
        out[group.name] = per_step[:, :, at : at + size]
        at += size
    return out
