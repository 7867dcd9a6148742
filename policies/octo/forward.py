"""What the original Octo computes, as pure functions of flat parameters: token groups, actions, the training loss.

``network.py`` has the RL policy's functions; here is every head, and every position of the window. All of it can be
jitted and differentiated; equal specs share what was compiled.
Axes: B batch, T window, n tokens of a group, D token width, S noise draws, K denoising steps, E = H * A numbers of a
chunk, *s the sample shape. Actions are normalised; parameters have '/'-joined names, without the language encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Bool, Float, Int

from vla_rlaif.policies.octo import diffusion
from vla_rlaif.policies.octo.diffusion import Schedule, masked_mean, masked_mse
from vla_rlaif.policies.octo.heads import (
    continuous_loss,
    discrete_argmax,
    discrete_label,
    discrete_loss,
    discrete_sample,
    head_module,
)
from vla_rlaif.policies.octo.model import Inputs, OctoTokens, Tokens, attention_mask
from vla_rlaif.policies.octo.spec import DiffusionSpec, DiscreteSpec, ModelSpec
from vla_rlaif.policies.octo.transformer import BlockTransformer

Params = Mapping[str, jax.Array]
TRUNK, BODY, HEAD = "octo_transformer/", "octo_transformer/BlockTransformer_0/", "heads_action/"


class TokenGroup(NamedTuple):
    """What the transformer makes of a group. Task groups have no time axis."""

    tokens: Float[jax.Array, "B *T n D"]
    mask: Bool[jax.Array, "B *T n"]  # False: nobody may attend to it


class Draws(NamedTuple):
    """The random numbers of one diffusion loss."""

    time: Int[jax.Array, "S B T"]  # denoising step
    noise: Float[jax.Array, "S B T E"]


@dataclass(frozen=True)
class OctoForward:
    """The functions of one model. Knows nothing of datasets, files or users."""

    spec: ModelSpec

    @property
    def tokens(self) -> OctoTokens:
        return OctoTokens(self.spec)

    @property
    def body(self) -> BlockTransformer:
        sizes = self.spec.transformer
        return BlockTransformer(sizes.num_layers, sizes.num_attention_heads, sizes.mlp_dim)

    @property
    def diffusion_spec(self) -> DiffusionSpec:
        assert isinstance(self.spec.head, DiffusionSpec)
        return self.spec.head

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.cosine(self.diffusion_spec.diffusion_steps)

    def shapes(self, inputs: Inputs) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter that a model with such inputs has, by name."""

        def init(key: jax.Array, inputs: Inputs) -> dict[str, Any]:
            tokens, params = self.tokens.init_with_output(key, inputs)
            body = self.body.init(key, tokens.x, attention_mask(self.spec, tokens.layout, None))
            readout = tokens.group(self.spec.head.readout_key)
            more = ()
            if isinstance(self.spec.head, DiffusionSpec):
                lead, head = readout.shape[:2], self.spec.head
                more = jnp.zeros((*lead, head.action_horizon * head.action_dim)), jnp.zeros(lead)
            head = head_module(self.spec.head).init(key, readout, *more, method="init_all")
            trunk = {**params["params"], BODY.split("/")[1]: body["params"]}
            return {TRUNK[:-1]: trunk, HEAD[:-1]: head["params"]}

        tree = jax.eval_shape(init, jax.random.key(0), inputs)
        return flatten_dict(tree, sep="/")  # pyright: ignore[reportReturnType]

    def encode(self, params: Params, inputs: Inputs) -> Tokens:
        """The sequence before the transformer."""
        return self.tokens.apply({"params": subtree(params, TRUNK)}, inputs)  # pyright: ignore[reportReturnType]

    def groups(self, params: Params, inputs: Inputs) -> dict[str, TokenGroup]:
        """Every group by upstream's name; ``task`` is the whole prefix, ``obs`` all that a step observes."""
        tokens = self.encode(params, inputs)
        x, layout = self._through_body(params, tokens, None), tokens.layout
        ok = jnp.ones(x.shape[:2], bool) if tokens.key_ok is None else tokens.key_ok
        found: dict[str, TokenGroup] = {}
        for span in (*layout.prefix, *layout.step):
            at = layout.positions(span.name)
            at = at[0] if span.kind == "task" else at
            found[span.name] = TokenGroup(x[:, at], ok[:, at])
        prefix = [found[span.name] for span in layout.prefix]
        observed = [found[span.name] for span in layout.step if span.kind == "obs"]
        joined = ({"task": _joined(prefix)} if prefix else {}) | {"obs": _joined(observed)}
        return found | joined

    def embedding(self, params: Params, inputs: Inputs, *, last: bool = True) -> Float[jax.Array, "B T *n D"]:
        """What the action head is conditioned on, at the last position of the window (T is 1) or at all of them."""
        tokens = self.encode(params, inputs)
        at = tokens.layout.positions(self.spec.head.readout_key)
        at = at[-1:] if last else at
        rows = self._through_body(params, tokens, at.reshape(-1))
        readout = rows.reshape(len(rows), *at.shape, rows.shape[-1])
        return self._apply_head(params, readout, method="embed")

    def predict(self, params: Params, embedding: Float[jax.Array, "*b D"], *more: jax.Array) -> Float[jax.Array, "..."]:
        """What the head says: noise (of x and step, in ``more``), actions [*b H A] or logits of bins [*b H A V]."""
        return self._apply_head(params, embedding, *more)

    def denoise(
        self,
        params: Params,
        embedding: Float[jax.Array, "B D"],
        x: Float[jax.Array, "*s B E"],
        z: Float[jax.Array, "K *s B E"],
        live: Bool[jax.Array, " E"],
    ) -> Float[jax.Array, "*s B H A"]:
        """Upstream's sampler, from noise ``x``, with ``z`` added after each step; dims not ``live`` become noise."""
        head, shape = self.diffusion_spec, x.shape
        steps = np.arange(head.diffusion_steps - 1, -1, -1)

        def noise_in(x: jax.Array, step: jax.Array) -> jax.Array:
            noise = self.predict(params, embedding, x.reshape(shape), step.reshape(shape[:-1]))
            return noise.reshape(-1, shape[-1])

        flat, stds = z.reshape(len(steps), -1, shape[-1]), jnp.asarray(self.schedule.stds(0.0)[steps])
        start = x.reshape(-1, shape[-1])
        final, _, _ = diffusion.denoise(noise_in, self.schedule, start, flat, steps, stds, head.max_action, live)
        return final.reshape(*shape[:-1], head.action_horizon, head.action_dim)

    def choose(
        self,
        params: Params,
        embedding: Float[jax.Array, "B *k D"],
        rng: jax.Array | None,
        sample_shape: tuple[int, ...] = (),
        temperature: float = 1.0,
    ) -> Float[jax.Array, "*s B H A"]:
        """Actions of a head that does not denoise: its estimate, the likeliest bins, or bins drawn with ``rng``."""
        predicted, head = self.predict(params, embedding), self.spec.head
        if isinstance(head, DiscreteSpec) and rng is not None:
            return discrete_sample(head, predicted, rng, temperature, sample_shape)
        predicted = discrete_argmax(head, predicted) if isinstance(head, DiscreteSpec) else predicted
        return jnp.broadcast_to(predicted, (*sample_shape, *predicted.shape))

    def loss(
        self,
        params: Params,
        inputs: Inputs,
        action: Float[jax.Array, "B T H A"],
        action_ok: Bool[jax.Array, "B T H A"],
        draws: Draws | None,
    ) -> dict[str, Float[jax.Array, ""]]:
        """Upstream's, over all positions of the window; a diffusion head needs ``draws``."""
        ok = action_ok if inputs.frame_ok is None else action_ok & inputs.frame_ok[..., None, None]
        return self.head_loss(params, self.embedding(params, inputs, last=False), action, ok, draws)

    def head_loss(
        self,
        params: Params,
        embedding: Float[jax.Array, "B T *k D"],
        action: Float[jax.Array, "B T H A"],
        ok: Bool[jax.Array, "B T H A"],
        draws: Draws | None,
    ) -> dict[str, Float[jax.Array, ""]]:
        """``loss``, and upstream's metrics: ``mse``, for bins ``accuracy``."""
        head = self.spec.head
        if isinstance(head, DiscreteSpec):
            logits = self.predict(params, embedding)
            hit = jnp.argmax(logits, axis=-1) == discrete_label(head, action)
            mse = masked_mse(discrete_argmax(head, logits), action, ok) * head.action_dim
            return {"loss": discrete_loss(head, logits, action, ok), "mse": mse, "accuracy": masked_mean(hit, ok)}
        if isinstance(head, DiffusionSpec):
            assert draws is not None
            target, lead = draws.noise, action.shape[:2]
            clean = jnp.clip(action.reshape(*lead, -1), -head.max_action, head.max_action)
            x = self.schedule.corrupt(jnp.broadcast_to(clean, target.shape), draws.time, target)
            predicted, ok = self.predict(params, embedding[None], x, draws.time), ok.reshape(1, *lead, -1)
        else:
            target, predicted = action, self.predict(params, embedding)
        mse = masked_mse(predicted, target, ok) * head.action_dim
        return {"loss": continuous_loss(head, predicted, target, ok), "mse": mse}

    def draws(self, rng: jax.Array, batch: int, window: int) -> Draws:
        """Those of upstream's loss for this key, under ``jax.threefry_partitionable(False)``; others without."""
        head = self.diffusion_spec
        time_key, noise_key = jax.random.split(_dropout_key(rng))
        lead = (head.n_diffusion_samples, batch, window)
        time = jax.random.randint(time_key, lead, 0, head.diffusion_steps)
        return Draws(time, jax.random.normal(noise_key, (*lead, head.action_horizon * head.action_dim)))

    def noise(
        self, rng: jax.Array, sample_shape: tuple[int, ...], batch: int, window: int
    ) -> tuple[Float[jax.Array, "*s B E"], Float[jax.Array, "K *s B E"]]:
        """(x, z) of upstream's sampler for this key, under ``jax.threefry_partitionable(False)``.

        Upstream denoises all positions of the window and keeps the last, so that is what is drawn and kept here.
        """
        head = self.diffusion_spec
        shape = (*sample_shape, batch, window, head.action_horizon * head.action_dim)

        def draw(rng: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            rng, key = jax.random.split(rng)
            return rng, jax.random.normal(key, shape)[..., -1, :]

        _, drawn = jax.lax.scan(draw, rng, length=head.diffusion_steps + 1)
        return drawn[0], drawn[1:]

    def _through_body(
        self, params: Params, tokens: Tokens, rows: Int[np.ndarray, " R"] | None
    ) -> Float[jax.Array, "B R D"]:
        mask = attention_mask(self.spec, tokens.layout, tokens.key_ok)
        where = None if rows is None else rows.tolist()
        return self.body.apply({"params": subtree(params, BODY)}, tokens.x, mask, where)  # pyright: ignore

    def _apply_head(self, params: Params, *args: jax.Array, method: str | None = None) -> Any:
        return head_module(self.spec.head).apply({"params": subtree(params, HEAD)}, *args, method=method)


def subtree(params: Params, prefix: str) -> dict[str, Any]:
    """The nested parameters below a prefix, as flax wants them."""
    below = {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
    return unflatten_dict(below, sep="/")


def _joined(groups: list[TokenGroup]) -> TokenGroup:
    tokens = jnp.concatenate([group.tokens for group in groups], axis=-2)
    return TokenGroup(tokens, jnp.concatenate([group.mask for group in groups], axis=-1))


class _Draw(nn.Module):
    """Stands where upstream's head stands: flax makes the key of a module from its name."""

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.make_rng("dropout")


class _Root(nn.Module):
    @nn.compact
    def __call__(self) -> jax.Array:
        return _Draw(name=HEAD[:-1])()


def _dropout_key(rng: jax.Array) -> jax.Array:
    return _Root().apply({}, rngs={"dropout": rng})  # pyright: ignore[reportReturnType]
