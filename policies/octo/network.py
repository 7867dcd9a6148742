"""Pure functions of Octo's parameters: encode, act, score, imitate. Everything here can be jitted and differentiated.

Axes: N rows acting, B decisions being learned from, S trained denoising steps, E = H * A numbers of a chunk, D token
width. Actions are normalised; parameters are flat, by '/'-joined name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Bool, Float, Int, UInt32

from vla_rlaif.config import OctoConfig
from vla_rlaif.policies.octo import diffusion
from vla_rlaif.policies.octo.diffusion import DiffusionHead, Schedule
from vla_rlaif.policies.octo.model import Inputs, OctoTransformer, Trunk
from vla_rlaif.types import EnvSpec

Params = Mapping[str, jax.Array]
HEAD = "heads_action/"
TRUNK = "octo_transformer/"
REFERENCE = "reference/"  # the frozen copy of the head
WORDS = "octo_transformer/task_tokenizers_language/word_table/embedding"


@dataclass(frozen=True)
class OctoNetwork:
    """The network for one environment, with the denoising steps split into frozen and trained ones.

    A step that has no density (step 0 with ``std_floor`` 0) or that is not among the last ``tuned_steps`` runs on the
    frozen head, so the action is a fixed function of the samples that are scored. Equal networks hash alike: policies
    of one process share their compiled functions.
    """

    config: OctoConfig
    spec: EnvSpec
    vocabulary_size: int

    def __post_init__(self) -> None:
        if not self.tuned.size:
            raise ValueError("tuned_steps 1 with std_floor 0 leaves no denoising step with a density: raise either.")

    @property
    def width(self) -> int:
        """E, the numbers of a chunk."""
        return self.spec.chunk * self.spec.action_dim

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.cosine(self.config.diffusion_steps, self.config.clip_prediction)

    @cached_property
    def stds(self) -> Float[np.ndarray, " K"]:
        return self.schedule.stds(self.config.std_floor)

    @cached_property
    def tuned(self) -> Int[np.ndarray, " S"]:
        """The trained denoising steps, in acting order."""
        return np.array([s for s in range(self.config.tuned_steps - 1, -1, -1) if self.stds[s] > 0], np.int32)

    @cached_property
    def tuned_stds(self) -> Float[np.ndarray, " S"]:
        return self.stds[self.tuned]

    @cached_property
    def trunk(self) -> OctoTransformer:
        config = self.config
        return OctoTransformer(
            token_dim=config.token_dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            mlp_dim=config.mlp_dim,
            stem=config.stem,
            repeat_task_tokens=config.repeat_task_tokens,
            max_horizon=config.max_horizon,
        )

    @cached_property
    def head(self) -> DiffusionHead:
        return DiffusionHead(self.width, self.config.head_dim, self.config.head_blocks, self.config.time_dim)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter, by name, without the frozen head."""
        return jax.eval_shape(self.flax_init, jax.random.key(0))

    def flax_init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Parameters drawn by flax's initialisers; ``initial.py`` draws the same distributions faster."""
        config, spec = self.config, self.spec
        frame = jnp.zeros((1, 1, spec.image_size, spec.image_size, 3), jnp.uint8)
        language = jnp.zeros((1, config.language_tokens, config.language_dim))
        proprio = jnp.zeros((1, 1, spec.state_dim)) if config.proprio else None
        inputs = Inputs(dict.fromkeys(spec.cameras, frame), language, proprio)
        head_inputs = jnp.zeros((1, config.token_dim)), jnp.zeros((1, self.width)), jnp.zeros((1,), jnp.int32)
        trunk_key, head_key, word_key = jax.random.split(key, 3)
        tree: dict[str, Any] = {
            TRUNK[:-1]: self.trunk.init(trunk_key, inputs)["params"],
            HEAD[:-1]: self.head.init(head_key, *head_inputs)["params"],
        }
        words = jax.random.normal(word_key, (self.vocabulary_size, config.language_dim))
        params: dict[str, Any] = flatten_dict(tree, sep="/")  # pyright: ignore[reportAssignmentType]
        return params | {WORDS: words}

    def encode(self, params: Params, inputs: Mapping[str, jax.Array], *, readout_only: bool = True) -> Trunk:
        """The trunk, on a window of one frame. Leaves of ``inputs``: ``image/<camera>``, ``ids``, ``state``."""
        images = {camera: inputs[f"image/{camera}"][:, None] for camera in self.spec.cameras}
        language = params[WORDS][inputs["ids"]]
        proprio = inputs["state"][:, None] if self.config.proprio else None
        variables = {"params": _subtree(params, TRUNK)}
        return self.trunk.apply(variables, Inputs(images, language, proprio), readout_only)  # pyright: ignore[reportReturnType]

    def readout(self, params: Params, inputs: Mapping[str, jax.Array]) -> Float[jax.Array, "B D"]:
        """What the head is conditioned on: cached in the inputs, or from the trunk."""
        if "readout" in inputs:
            return inputs["readout"]
        return self.encode(params, inputs).readout[:, -1].mean(-2)

    def predict(
        self,
        params: Params,
        readout: Float[jax.Array, "*#b D"],
        x: Float[jax.Array, "*b E"],
        step: Int[jax.Array, "*#b"],
        prefix: str = HEAD,
    ) -> Float[jax.Array, "*b E"]:
        """The noise in ``x``."""
        return self.head.apply({"params": _subtree(params, prefix)}, readout, x, step)  # pyright: ignore[reportReturnType]

    def act(
        self,
        params: Params,
        inputs: Mapping[str, jax.Array],
        seeds: UInt32[jax.Array, " N"],
        noise_scale: Float[jax.Array, ""],
    ) -> dict[str, jax.Array]:
        """Denoise from N(0, 1): the final ``action`` [N, E], ``logp`` [N, S] of the whole chunk, and the trace."""
        readout = self.readout(params, inputs)
        steps = np.arange(self.config.diffusion_steps - 1, -1, -1)
        rows = jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (len(steps) + 1, self.width)))(seeds)
        x, noise = rows[:, 0], noise_scale * jnp.moveaxis(rows[:, 1:], 1, 0)
        first, last = steps > self.tuned[0], steps < self.tuned[-1]

        def run(x: jax.Array, part: Bool[np.ndarray, " K"], prefix: str) -> tuple[jax.Array, jax.Array, jax.Array]:
            def predict(x: jax.Array, step: jax.Array) -> jax.Array:
                return self.predict(params, readout, x, step, prefix)

            stds = jnp.asarray(self.stds[steps[part]])
            limit = self.config.max_action
            return diffusion.denoise(predict, self.schedule, x, noise[part], steps[part], stds, limit)

        start = run(x, first, REFERENCE + HEAD)[0] if first.any() else x
        x, samples, means = run(start, ~(first | last), HEAD)
        action = run(x, last, REFERENCE + HEAD)[0] if last.any() else x
        density = diffusion.log_density(samples, means, jnp.asarray(self.tuned_stds)[:, None, None])
        logp = diffusion.reduce_dims(density, jnp.ones((1, 1, 1), bool), self.config.logp_reduction)
        chain = jnp.swapaxes(samples, 0, 1)
        return {"action": action, "logp": logp.T, "readout": readout, "start": start, "chain": chain}

    def means(self, params: Params, inputs: Mapping[str, jax.Array]) -> Float[jax.Array, "B S E"]:
        """Means of all trained steps of stored chains, in one call of the head."""
        limit = self.config.max_action
        before = jnp.clip(inputs["chain"][:, :-1], -limit, limit)
        states = jnp.concatenate([inputs["start"][:, None], before], axis=1)
        step = jnp.asarray(self.tuned)[None]
        noise = self.predict(params, self.readout(params, inputs)[:, None], states, step)
        return self.schedule.mean(states, noise, step)

    def score(
        self, params: Params, inputs: Mapping[str, jax.Array], reference_means: Float[jax.Array, "B S E"] | None = None
    ) -> tuple[Float[jax.Array, "B S"], Float[jax.Array, "B S"] | None]:
        """Log-probability of stored chains, and the divergence from the policy that made ``reference_means``.

        Nats, over the dims of the env steps that were executed: a mean or a sum, as the config says.
        """
        means, stds = self.means(params, inputs), jnp.asarray(self.tuned_stds)[None, :, None]
        executed = jnp.arange(self.spec.chunk)[None] < inputs["executed"][:, None]
        mask = jnp.repeat(executed, self.spec.action_dim, axis=1)[:, None]
        how = self.config.logp_reduction
        logp = diffusion.reduce_dims(diffusion.log_density(inputs["chain"], means, stds), mask, how)
        if reference_means is None:
            return logp, None
        return logp, diffusion.reduce_dims(diffusion.divergence(means, reference_means, stds), mask, how)

    def imitation_loss(
        self,
        params: Params,
        inputs: Mapping[str, jax.Array],
        action: Float[jax.Array, "B H A"],
        mask: Bool[jax.Array, "B H A"],
        key: jax.Array,
        samples: int,
    ) -> Float[jax.Array, ""]:
        """Upstream's masked error of the predicted noise, with several draws of (step, noise) per trunk pass."""
        batch, _, action_dim = action.shape
        clean = jnp.clip(action.reshape(1, batch, -1), -self.config.max_action, self.config.max_action)
        step_key, noise_key = jax.random.split(key)
        step = jax.random.randint(step_key, (samples, batch), 0, self.config.diffusion_steps)
        noise = jax.random.normal(noise_key, (samples, batch, self.width))
        corrupted = self.schedule.corrupt(jnp.broadcast_to(clean, noise.shape), step, noise)
        predicted = self.predict(params, self.readout(params, inputs)[None], corrupted, step)
        return diffusion.masked_mse(predicted, noise, mask.reshape(1, batch, -1)) * action_dim

    def features(
        self, params: Params, inputs: Mapping[str, jax.Array], projection: Float[jax.Array, "F K"]
    ) -> Float[jax.Array, "N D"]:
        """Readout, mean image token of each camera, and every image token through a fixed random projection."""
        trunk = self.encode(params, inputs)
        images = [trunk.tokens[f"obs_{camera}"][:, -1] for camera in self.spec.cameras]
        compact = [(tokens @ projection).reshape(len(tokens), -1) for tokens in images]
        parts = [trunk.readout[:, -1].mean(-2), *(tokens.mean(1) for tokens in images), *compact]
        return jnp.concatenate(parts, axis=-1)


def with_reference(params: Params) -> dict[str, jax.Array]:
    """The current head becomes the frozen one."""
    own = {name: value for name, value in params.items() if not name.startswith(REFERENCE)}
    return own | {REFERENCE + name: value for name, value in own.items() if name.startswith(HEAD)}


def _subtree(params: Params, prefix: str) -> dict:
    """The nested parameters below a prefix, as flax wants them."""
    return unflatten_dict(
        {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}, sep="/"
    )
