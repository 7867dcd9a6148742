"""Observations and tasks to one token sequence, and back to named groups. Knows nothing of policies or environments.

Source: octo-models/octo @ 241fb35, rewritten; the parameter tree has upstream's names.
Axes: B batch, T window (the first T rows of each position table are used, oldest frame first), n tokens of a group,
L tokens of the whole sequence, D token width. The language encoder is outside: the model takes its features.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from vla_rlaif.policies.octo.attention import Kind, Span, attention_rule
from vla_rlaif.policies.octo.spec import ImageSpec, ModelSpec
from vla_rlaif.policies.octo.tokenizers import (
    ImageTokenizer,
    LowdimTokenizer,
    film_condition,
    matching,
    stack_frames,
    stack_lowdim,
)

POSITION = nn.initializers.normal(0.02)
LANGUAGE = "language_instruction"


class Inputs(NamedTuple):
    """What one forward pass reads, by upstream's keys. A group without input is left out of the sequence."""

    observation: Mapping[str, Num[jax.Array, "B T ..."]]  # image_primary [B T h w 3], proprio [B T P] (normalised), ...
    task: Mapping[str, Num[jax.Array, "B ..."]] = {}  # goal images [B h w 3] by key; language_instruction [B n F]
    frame_ok: Bool[jax.Array, "B T"] | None = None  # False for frames that pad the window
    observation_ok: Mapping[str, Bool[jax.Array, "B T"]] = {}  # by key: False where that input is missing
    language_ok: Bool[jax.Array, " B"] | None = None


class Group(NamedTuple):
    """Consecutive tokens of one origin. Task groups have no time axis."""

    kind: Kind
    name: str
    tokens: Float[jax.Array, "B *T n D"]
    mask: Bool[jax.Array, "B *T n"] | None  # None: all may be attended to


class Layout(NamedTuple):
    """Which group each position of the sequence belongs to. Static: it depends on shapes only."""

    prefix: tuple[Span, ...]
    step: tuple[Span, ...]
    window: int

    def rule(self, *, correct: bool) -> Bool[np.ndarray, "L L"]:
        return attention_rule(self.prefix, self.step, self.window, correct=correct)

    def positions(self, name: str) -> Int[np.ndarray, "T n"]:
        """Where a group stands in the sequence, by timestep; a task group counts as one timestep."""
        at = 0
        for span in self.prefix:
            if span.name == name:
                return at + np.arange(span.num_tokens)[None]
            at += span.num_tokens
        stride = sum(span.num_tokens for span in self.step)
        for span in self.step:
            if span.name == name:
                return at + stride * np.arange(self.window)[:, None] + np.arange(span.num_tokens)
            at += span.num_tokens
        raise ValueError(f"no group {name!r}; this input has {', '.join(s.name for s in (*self.prefix, *self.step))}.")


class Tokens(NamedTuple):
    """The sequence that goes into the transformer."""

    x: Float[jax.Array, "B L D"]
    key_ok: Bool[jax.Array, "B L"] | None  # what may be attended to at all; None: everything
    layout: Layout

    def group(self, name: str) -> Float[jax.Array, "B T n D"]:
        return take_group(self.x, self.layout, name)


def take_group(x: Float[jax.Array, "B L D"], layout: Layout, name: str) -> Float[jax.Array, "B T n D"]:
    return x[:, layout.positions(name)]


def attention_mask(
    spec: ModelSpec, layout: Layout, key_ok: Bool[jax.Array, "B L"] | None
) -> Bool[jax.Array, "#B 1 L L"]:
    """Row attends to column; one mask for all heads."""
    rule = jnp.asarray(layout.rule(correct=spec.use_correct_attention))[None, None]
    return rule if key_ok is None else rule & key_ok[:, None, None, :]


class OctoTokens(nn.Module):
    """Tokenizers, projections and positions: everything of ``octo_transformer`` but the transformer itself."""

    spec: ModelSpec
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs: Inputs) -> Tokens:
        prefix, step = self._task_groups(inputs), self._observation_groups(inputs)
        if not step:
            wanted = [name for name, _ in self.spec.observation_tokenizers]
            raise ValueError(
                f"no tokenizer of {wanted} reads any of the observation keys {sorted(inputs.observation)}."
            )
        batch, window = step[0].tokens.shape[:2]
        if self.spec.repeat_task_tokens:
            step += [_repeated(group, window) for group in prefix]
        step += [self._readout(name, num, batch, window) for name, num in self.spec.readouts]
        per_step = jnp.concatenate([group.tokens for group in step], axis=2)
        x = jnp.concatenate([*(g.tokens for g in prefix), per_step.reshape(batch, -1, per_step.shape[-1])], axis=1)
        layout = Layout(_spans(prefix), _spans(step), window)
        masked = any(group.mask is not None for group in (*prefix, *step))
        return Tokens(x, _key_mask(prefix, step) if masked else None, layout)

    def _task_groups(self, inputs: Inputs) -> list[Group]:
        if LANGUAGE not in inputs.task:
            return []
        groups = []
        for name, _ in self.spec.task_tokenizers:
            features = inputs.task[LANGUAGE]
            features = features[:, None] if features.ndim == 2 else features
            tokens = self._projected(f"task_{name}", features)
            table = self.param(f"task_{name}_pos_embedding", POSITION, (1, *tokens.shape[1:]))
            ok = inputs.language_ok
            mask = None if ok is None else jnp.broadcast_to(ok[:, None], tokens.shape[:2])
            groups.append(Group("task", f"task_{name}", tokens + table.astype(self.dtype), mask))
        return groups

    def _observation_groups(self, inputs: Inputs) -> list[Group]:
        groups = []
        for name, spec in self.spec.observation_tokenizers:
            if isinstance(spec, ImageSpec):
                frames = stack_frames(spec, inputs.observation, inputs.task)
                if frames is None:
                    continue
                tokenizer = ImageTokenizer(spec, dtype=self.dtype, name=f"observation_tokenizers_{name}")
                film = film_condition(spec, inputs.task)
                tokens = tokenizer(frames, None if film is None else film[:, None])
                keys = matching(spec.obs_stack_keys, inputs.observation)
                mask = _group_mask(inputs, keys if spec.proper_pad_mask else [], tokens)
            else:
                values = stack_lowdim(spec, inputs.observation)
                if values is None:
                    continue
                tokens = LowdimTokenizer(spec, dtype=self.dtype, name=f"observation_tokenizers_{name}")(values)
                mask = _group_mask(inputs, [], tokens)  # as upstream: numbers have no mask of their own
            window, horizon = tokens.shape[1], self.spec.max_horizon
            if window > horizon:
                raise ValueError(f"a window of {window} frames; the model has positions for {horizon}.")
            tokens = self._projected(f"obs_{name}", tokens)
            table = self.param(f"obs_{name}_pos_embedding", POSITION, (1, horizon, *tokens.shape[2:]))
            tokens = tokens + table[:, :window].astype(self.dtype)
            groups.append(Group("obs", f"obs_{name}", tokens, mask))
        return groups

    def _readout(self, name: str, num: int, batch: int, window: int) -> Group:
        width = self.spec.token_embedding_size
        table = self.param(f"readout_{name}_pos_embedding", POSITION, (1, self.spec.max_horizon, num, width))
        tokens = jnp.broadcast_to(table[:, :window].astype(self.dtype), (batch, window, num, width))
        return Group("readout", f"readout_{name}", tokens, None)

    def _projected(self, name: str, tokens: Float[jax.Array, "*b F"]) -> Float[jax.Array, "*b D"]:
        return nn.Dense(self.spec.token_embedding_size, dtype=self.dtype, name=f"{name}_projection")(tokens)


def _group_mask(
    inputs: Inputs, keys: list[str], tokens: Float[jax.Array, "B T n F"]
) -> Bool[jax.Array, "B T n"] | None:
    """Padding of the window, and whether any of the group's inputs is there. None: everything is."""
    flags = [inputs.observation_ok.get(key) for key in keys]
    present = [flag for flag in flags if flag is not None]
    masks = [] if inputs.frame_ok is None else [inputs.frame_ok]
    if present and len(present) == len(flags):
        masks.append(jnp.any(jnp.stack(present), axis=0))
    if not masks:
        return None
    return jnp.broadcast_to(jnp.all(jnp.stack(masks), axis=0)[..., None], tokens.shape[:3])


def _repeated(group: Group, window: int) -> Group:
    """The task tokens once more at every timestep, unchanged; their mask ignores the padding of the window."""

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], (x.shape[0], window, *x.shape[1:]))

    mask = None if group.mask is None else repeat(group.mask)
    return Group("obs", f"obs_{group.name}", repeat(group.tokens), mask)


def _spans(groups: list[Group]) -> tuple[Span, ...]:
    return tuple(Span(group.kind, group.name, group.tokens.shape[-2]) for group in groups)


def _key_mask(prefix: list[Group], step: list[Group]) -> Bool[jax.Array, "B L"]:
    """Which tokens may be attended to at all; readouts always."""

    def of(group: Group) -> jax.Array:
        return jnp.ones(group.tokens.shape[:-1], bool) if group.mask is None else group.mask

    per_step = jnp.concatenate([of(group) for group in step], axis=2)
    return jnp.concatenate([*(of(group) for group in prefix), per_step.reshape(per_step.shape[0], -1)], axis=1)
