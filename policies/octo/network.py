"""Pure functions of Octo's parameters: encode, read out, predict, imitate. All can be jitted and differentiated.

``chain.py`` makes a policy of them. Axes: B rows, T window, S trained of K denoising steps, E = H * A numbers that the
head predicts, n readout tokens, D token width. Actions are normalised; parameters are flat, by '/'-joined name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Bool, Float, Int

from vla_rlaif.policies.octo import diffusion, lora
from vla_rlaif.policies.octo.diffusion import DiffusionHead, Schedule
from vla_rlaif.policies.octo.embodiment import Embodiment
from vla_rlaif.policies.octo.forward import subtree
from vla_rlaif.policies.octo.images import resize_frames
from vla_rlaif.policies.octo.model import LANGUAGE, Inputs, Layout, OctoTokens, Tokens, attention_mask
from vla_rlaif.policies.octo.spec import DiffusionSpec, ImageSpec, ModelSpec
from vla_rlaif.policies.octo.transformer import BlockTransformer
from vla_rlaif.policy_config import OctoSettings
from vla_rlaif.tune_config import FullTuning, LoraTuning

Params = Mapping[str, jax.Array]
HEAD = "heads_action/"
TRUNK = "octo_transformer/"
BLOCKS = "octo_transformer/BlockTransformer_0/"
REFERENCE = "reference/"  # the frozen copy of the head
TABLE = "language/table"  # what ``ids`` of the inputs index: features of words, or of whole sentences
PROPRIO = "proprio"


@dataclass(frozen=True)
class OctoNetwork:
    """A model for one environment, with the denoising steps split into frozen and trained ones.

    A step that has no density (step 0 with ``std_floor`` 0) or that is not among the last ``tuned_steps`` runs on the
    frozen head, so the action is a fixed function of the samples that are scored. Equal networks hash alike: policies
    of one process share their compiled functions.
    """

    model: ModelSpec
    settings: OctoSettings
    body: Embodiment

    def __post_init__(self) -> None:
        self.body.fits(self.head_spec)
        if self.settings.window > self.model.max_horizon:
            raise ValueError(
                f"a window of {self.settings.window} frames; the model has positions for {self.model.max_horizon}."
            )
        if self.settings.tuned_steps > self.head_spec.diffusion_steps:
            raise ValueError(
                f"tuned_steps {self.settings.tuned_steps} exceeds the {self.head_spec.diffusion_steps} steps of the "
                "head."
            )
        if not self.tuned.size:
            raise ValueError("tuned_steps 1 with std_floor 0 leaves no denoising step with a density: raise either.")

    @property
    def head_spec(self) -> DiffusionSpec:
        head = self.model.head
        if not isinstance(head, DiffusionSpec):
            raise ValueError(
                f"{head.NAME} has no log-probabilities to learn from; use policy.new_head: true for a diffusion head."
            )
        return head

    @property
    def width(self) -> int:
        """E, the numbers that the head predicts."""
        return self.head_spec.action_horizon * self.head_spec.action_dim

    @cached_property
    def live(self) -> Bool[np.ndarray, " E"]:
        """False for the action dims that the env does not have."""
        dims = np.arange(self.head_spec.action_dim) < self.body.action_dim
        return np.tile(dims, self.head_spec.action_horizon)

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.cosine(self.head_spec.diffusion_steps, self.settings.clip_prediction)

    @cached_property
    def stds(self) -> Float[np.ndarray, " K"]:
        return self.schedule.stds(self.settings.std_floor)

    @cached_property
    def tuned(self) -> Int[np.ndarray, " S"]:
        """The trained denoising steps, in acting order."""
        return np.array([s for s in range(self.settings.tuned_steps - 1, -1, -1) if self.stds[s] > 0], np.int32)

    @cached_property
    def tuned_stds(self) -> Float[np.ndarray, " S"]:
        return self.stds[self.tuned]

    @property
    def dtype(self) -> Any:
        """Of the trunk. float32 is float64 where JAX is told to use that (``jax_enable_x64``): tests do."""
        return jnp.bfloat16 if self.settings.compute == "bfloat16" else jnp.result_type(float)

    @property
    def tokens(self) -> OctoTokens:
        return OctoTokens(self.model, self.dtype)

    @property
    def blocks(self) -> BlockTransformer:
        sizes = self.model.transformer
        return BlockTransformer(sizes.num_layers, sizes.num_attention_heads, sizes.mlp_dim, self.dtype)

    @property
    def head(self) -> DiffusionHead:
        return DiffusionHead(self.head_spec, jnp.result_type(float))

    @property
    def first_tuned_block(self) -> int:
        """Blocks below it, and the tokens, are the same for actor and reference. -1: nothing is."""
        tune, num = self.settings.tune, self.model.transformer.num_layers
        if isinstance(tune, LoraTuning):
            return num - (tune.blocks or num)
        return -1 if isinstance(tune, FullTuning) else num

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter of trunk and head, by name; neither language table nor frozen head nor adapters."""
        return jax.eval_shape(self.flax_init, jax.random.key(0))

    def flax_init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Parameters drawn by flax's initialisers; ``initial.py`` draws the same distributions faster."""
        keys = jax.random.split(key, 3)
        tokens, params = self.tokens.init_with_output(keys[0], self._model_inputs(self._example(), None))
        mask = attention_mask(self.model, tokens.layout, None)
        tree: dict[str, Any] = {
            TRUNK[:-1]: {**params["params"], "BlockTransformer_0": self.blocks.init(keys[1], tokens.x, mask)["params"]},
            HEAD[:-1]: self.head.init(keys[2], *self._head_example(), method="init_all")["params"],
        }
        return flatten_dict(tree, sep="/")  # pyright: ignore[reportReturnType]

    def encode(self, params: Params, inputs: Mapping[str, jax.Array]) -> Tokens:
        """The token sequence of a window. ``inputs`` has ``image/<camera>``, ``ids``, ``state`` and ``frame_ok``."""
        variables = {"params": subtree(params, TRUNK)}
        return self.tokens.apply(variables, self._model_inputs(inputs, params[TABLE]))  # pyright: ignore

    def prepare(self, params: Params, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The inputs after all that no trained parameter touches: once for actor, reference and every epoch."""
        first, kept = self.first_tuned_block, {k: v for k, v in inputs.items() if k in TRACE}
        if first < 0 or "readout" in inputs:
            return dict(inputs)
        if first == self.model.transformer.num_layers:
            return kept | {"readout": self.readout(params, inputs)}
        tokens = self.encode(params, inputs)
        hidden = self._run(params, tokens.x, tokens.key_ok, tokens.layout, (0, first), None)
        key_ok = {} if tokens.key_ok is None else {"key_ok": tokens.key_ok}
        return kept | {"hidden": hidden} | key_ok

    def readout(self, params: Params, inputs: Mapping[str, jax.Array]) -> Float[jax.Array, "B n D"]:
        """The tokens that the head reads, of the last frame: stored with the inputs, or from the trunk."""
        if "readout" in inputs:
            return inputs["readout"]
        whole = self.adapted(params)
        if "hidden" in inputs:
            tokens = Tokens(inputs["hidden"], inputs.get("key_ok"), self.layout)
            return self._finish(whole, tokens, self.first_tuned_block)
        return self._finish(whole, self.encode(whole, inputs), 0)

    def condition(
        self, params: Params, readout: Float[jax.Array, "B n D"], prefix: str = HEAD
    ) -> Float[jax.Array, "B D"]:
        """What a head is conditioned on: the mean of the readout tokens, or what its attention makes of them."""
        return self._apply_head(params, prefix, readout, method="embed")

    def adapted(self, params: Params) -> Params:
        """The parameters with low-rank adapters, if there are any, added in."""
        tune = self.settings.tune
        return lora.merged(params, tune.alpha / tune.rank) if isinstance(tune, LoraTuning) else params

    @cached_property
    def layout(self) -> Layout:
        """Of the sequence that acting and learning see."""
        found = []

        def trace(params: Params, inputs: Mapping[str, jax.Array]) -> jax.Array:
            found.append(self.encode(params, inputs).layout)
            return inputs["state"]

        table = {TABLE: jax.ShapeDtypeStruct((1, *self.body.language), jnp.float32)}
        jax.eval_shape(trace, self.shapes() | table, self._example())
        return found[0]

    def predict(
        self,
        params: Params,
        condition: Float[jax.Array, "*#b D"],
        x: Float[jax.Array, "*b E"],
        step: Int[jax.Array, "*#b"],
        prefix: str = HEAD,
    ) -> Float[jax.Array, "*b E"]:
        """The noise in ``x``."""
        return self._apply_head(params, prefix, condition, x, step)

    def imitation_loss(
        self,
        params: Params,
        inputs: Mapping[str, jax.Array],
        action: Float[jax.Array, "B H A"],
        mask: Bool[jax.Array, "B H A"],
        key: jax.Array,
        samples: int,
    ) -> Float[jax.Array, ""]:
        """Upstream's masked error of the predicted noise, with several draws of (step, noise) per trunk pass.

        Upstream averages over all positions of the window; here it is the last one, the only one that acts.
        """
        head, (batch, horizon, dims) = self.head_spec, action.shape
        room = ((0, 0), (0, head.action_horizon - horizon), (0, head.action_dim - dims))
        action, mask = jnp.pad(action, room), jnp.pad(mask, room)
        clean = jnp.clip(action.reshape(1, batch, -1), -head.max_action, head.max_action)
        step_key, noise_key = jax.random.split(key)
        step = jax.random.randint(step_key, (samples, batch), 0, head.diffusion_steps)
        noise = jax.random.normal(noise_key, (samples, batch, self.width))
        corrupted = self.schedule.corrupt(jnp.broadcast_to(clean, noise.shape), step, noise)
        condition = self.condition(params, self.readout(params, inputs))
        predicted = self.predict(params, condition[None], corrupted, step)
        return diffusion.masked_mse(predicted, noise, mask.reshape(1, batch, -1)) * head.action_dim

    def features(
        self, params: Params, inputs: Mapping[str, jax.Array], projection: Float[jax.Array, "F K"]
    ) -> Float[jax.Array, "N D"]:
        """Readout, mean image token of each camera, and every image token through a fixed random projection."""
        whole = self.adapted(params)
        tokens = self.encode(whole, inputs)
        pictures = {f"obs_{name}" for name, spec in self.model.observation_tokenizers if isinstance(spec, ImageSpec)}
        names = [span.name for span in tokens.layout.step if span.name in pictures]
        images = [tokens.group(name)[:, -1].astype(jnp.float32) for name in names]
        compact = [(group @ projection).reshape(len(group), -1) for group in images]
        readout = self._finish(whole, tokens, 0).mean(1)
        return jnp.concatenate([readout, *(group.mean(1) for group in images), *compact], axis=-1)

    def _finish(self, params: Params, tokens: Tokens, first: int) -> Float[jax.Array, "B n D"]:
        """The readout of the last frame, through the blocks from ``first`` on; float32."""
        rows = tokens.layout.positions(self.head_spec.readout_key)[-1]
        blocks = first, self.model.transformer.num_layers
        return self._run(params, tokens.x, tokens.key_ok, tokens.layout, blocks, rows).astype(jnp.result_type(float))

    def _run(
        self,
        params: Params,
        x: Float[jax.Array, "B L D"],
        key_ok: Bool[jax.Array, "B L"] | None,
        layout: Layout,
        blocks: tuple[int, int],
        rows: Int[np.ndarray, " R"] | None,
    ) -> Float[jax.Array, "B R D"]:
        variables = {"params": subtree(params, BLOCKS)}
        mask = attention_mask(self.model, layout, key_ok)
        where = None if rows is None else rows.tolist()
        return self.blocks.apply(variables, x, mask, where, blocks)  # pyright: ignore[reportReturnType]

    def _apply_head(self, params: Params, prefix: str, *args: Any, method: str | None = None) -> Any:
        return self.head.apply({"params": subtree(params, prefix)}, *args, method=method)

    def _model_inputs(self, inputs: Mapping[str, jax.Array], table: jax.Array | None) -> Inputs:
        """Upstream's keys and sizes; a missing window axis is added."""
        observation = {}
        for key, camera, pixels in self.body.cameras:
            frames = inputs[f"image/{camera}"]
            frames = frames if frames.ndim == 5 else frames[:, None]
            observation[key] = resize_frames(frames, (pixels, pixels))
        state = inputs["state"]
        observation[PROPRIO] = state if state.ndim == 3 else state[:, None]
        language = jnp.zeros((len(state), *self.body.language)) if table is None else table[inputs["ids"]]
        return Inputs(observation, {LANGUAGE: language}, frame_ok=inputs.get("frame_ok"))

    def _example(self) -> dict[str, jax.Array]:
        """One row of zeros, shaped like what acting sees."""
        window = self.settings.window
        images = {f"image/{c}": jnp.zeros((1, window, s, s, 3), jnp.uint8) for _, c, s in self.body.cameras}
        frames = {"frame_ok": jnp.ones((1, window), bool)} if window > 1 else {}
        return images | frames | {"state": jnp.zeros((1, window, self.body.state_dim)), "ids": jnp.zeros(1, jnp.int32)}

    def _head_example(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        width, num = self.model.token_embedding_size, dict(self.model.readouts)["action"]
        return jnp.zeros((1, num, width)), jnp.zeros((1, self.width)), jnp.zeros(1, jnp.int32)


TRACE = ("start", "chain", "executed")  # what scoring reads besides the trunk's inputs


def with_reference(params: Params) -> dict[str, jax.Array]:
    """The current head becomes the frozen one."""
    own = {name: value for name, value in params.items() if not name.startswith(REFERENCE)}
    return own | {REFERENCE + name: value for name, value in own.items() if name.startswith(HEAD)}
