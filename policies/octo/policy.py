"""Octo as a policy: the host's edge of ``network.py``. Knows the environment's spec, nothing of rewards or optimisers.

``construct.py`` makes them. Axes: see types.py; T window, E numbers that the head predicts, n readout tokens, D width.
"""

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from vla_rlaif.policies.octo import chain
from vla_rlaif.policies.octo.language import Language
from vla_rlaif.policies.octo.lora import PREFIX as LORA
from vla_rlaif.policies.octo.network import HEAD, REFERENCE, TABLE, OctoNetwork, Params, with_reference
from vla_rlaif.policies.octo.statistics import Statistics
from vla_rlaif.policies.rows import distinct_rows
from vla_rlaif.tune_config import HeadTuning, LoraTuning
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights

FEATURE_BATCH = 64  # rows per call when computing features; the last call is padded
FEATURE_WIDTH = 16  # of a projected image token
SATURATION = 0.98  # of max_action: a coordinate beyond it counts as clipped

# Compiled once for each network and batch size, whatever the number of policies.
_readout = jax.jit(OctoNetwork.readout, static_argnums=0)
_sample = jax.jit(chain.sample, static_argnums=0)
_sample_ddim = jax.jit(chain.sample_ddim, static_argnums=0)
_features = jax.jit(OctoNetwork.features, static_argnums=0)


class OctoPolicy:
    """Acts, and scores its own actions again under other parameters.

    ``params`` holds trunk, head and language table, a frozen copy of the head (``reference/...``) for the denoising
    steps that are not trained (take it with ``freeze_reference`` once the start weights are in), low-rank adapters
    (``lora/...``) if they are tuned, and what the folder it came from has beyond the network.
    """

    def __init__(
        self,
        network: OctoNetwork,
        spec: EnvSpec,
        *,
        language: Language,
        statistics: Statistics,
        params: Weights,
        origin: Mapping[str, Any],
    ):
        """``origin`` is JSON that is stored with the policy: where it came from, the config that made it."""
        self.network, self.spec, self.language, self.origin = network, spec, language, origin
        self._statistics, self._version = statistics, 0
        self._clipped = np.zeros(2, np.int64)  # coordinates at the bound, coordinates in all
        self._params: dict[str, jax.Array] = jax.device_put(dict(params))
        if not any(name.startswith(REFERENCE) for name in params):
            self.freeze_reference()
        width = network.model.token_embedding_size
        key = jax.random.key(0)  # part of the definition of the features, not of a run
        self._projection = width**-0.5 * jax.random.normal(key, (width, FEATURE_WIDTH))
        self._own = frozenset(network.shapes())

    @property
    def version(self) -> int:
        return self._version

    @property
    def window(self) -> int:
        return self.network.settings.window

    @property
    def params(self) -> dict[str, jax.Array]:
        return self._params

    @property
    def statistics(self) -> Statistics:
        return self._statistics

    def with_statistics(self, statistics: Statistics) -> "OctoPolicy":
        """The same policy (parameters are shared until one of the two loads others) under another normalisation."""
        other = copy.copy(self)
        other._statistics = statistics
        return other

    def metadata(self) -> dict[str, Any]:
        """All that ``construct.from_parts`` needs besides the weights; JSON."""
        return {**self.origin, "language": self.language.to_json(), "statistics": self._statistics.to_lists()}

    @property
    def trainable(self) -> frozenset[str]:
        """What reinforcement learning changes."""
        head = frozenset(name for name in self._own if name.startswith(HEAD))
        if isinstance(self.network.settings.tune, HeadTuning):
            return head
        if isinstance(self.network.settings.tune, LoraTuning):
            return head | {name for name in self._params if name.startswith(LORA)}
        return self._own

    @property
    def imitable(self) -> frozenset[str]:
        """What imitation changes: the whole network, and words that it learns."""
        return self._own | {TABLE} if self.language.learned else self._own

    def load(self, weights: Weights, version: int) -> None:
        """Take new values by name; parameters that are not named keep theirs. The arrays are copied."""
        for name, value in weights.items():
            if name not in self._params or self._params[name].shape != value.shape:
                have = self._params[name].shape if name in self._params else "no such parameter"
                raise ValueError(f"Cannot load {name!r} of shape {value.shape}: the policy has {have}.")
        copies = {name: np.array(value, np.float32) for name, value in weights.items()}  # jnp.array compiles per shape
        self._params = self._params | jax.device_put(copies)
        self._version = version

    def freeze_reference(self) -> None:
        """Let the current head be the frozen one."""
        self._params = with_reference(self._params)

    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        """Choose a chunk. ``noise_scale`` multiplies the noise of the steps; the start is always the seed's.

        With 0 and ``ddim_steps`` the chunk comes from the deterministic few-step sampler: it has no density, so its
        log-probabilities are NaN and its trace is empty.
        """
        readout = self._shared_readout(self.imitation_inputs(obs))
        if noise_scale == 0 and self.network.settings.ddim_steps is not None:
            action = np.asarray(_sample_ddim(self.network, self._params, readout, jnp.asarray(seeds)))
            none = np.full((len(seeds), len(self.network.tuned)), np.nan, np.float32)
            return Decision(action=self._executable(action), logp=none, trace={})
        out = _sample(self.network, self._params, readout, jnp.asarray(seeds), jnp.float32(noise_scale))
        host = {name: np.asarray(value) for name, value in out.items()}
        trace = {"start": host["start"], "chain": host["chain"], "readout": np.asarray(readout)}
        return Decision(action=self._executable(host["action"]), logp=host["logp"], trace=trace)

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        """What ``means`` and ``score`` read, leaves "B ...". Without images if only the head is trained."""
        stored = {"start": trace["start"], "chain": trace["chain"], "executed": executed}
        if isinstance(self.network.settings.tune, HeadTuning):
            return stored | {"readout": trace["readout"]}
        return stored | self.imitation_inputs(obs)

    def prepare(self, params: Params, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The inputs after everything that no trained parameter touches. Pure."""
        return self.network.prepare(params, _on_device(inputs))

    def means(self, params: Params, inputs: Mapping[str, jax.Array | np.ndarray]) -> Float[jax.Array, "B S E"]:
        """Means of the trained denoising steps. Pure."""
        return chain.means(self.network, params, _on_device(inputs))

    def score(
        self,
        params: Params,
        inputs: Mapping[str, jax.Array | np.ndarray],
        reference_means: Float[jax.Array, "B S E"] | None = None,
    ) -> tuple[Float[jax.Array, "B S"], Float[jax.Array, "B S"] | None]:
        """Log-probabilities, and divergences if there is a reference; nats. Pure."""
        return chain.score(self.network, params, _on_device(inputs), reference_means)

    def imitation_inputs(self, obs: Observation) -> dict[str, np.ndarray]:
        """What the trunk reads, leaves "B ..." or, with a window, "B T ..."."""
        images = {f"image/{camera}": obs.images[camera] for _, camera, _ in self.network.body.cameras}
        state = self._statistics.normalise_state(obs.state)
        frames = {} if obs.frame_ok is None else {"frame_ok": obs.frame_ok}
        return images | frames | {"ids": self.language.encode(obs.instruction), "state": state}

    def imitation_loss(
        self,
        params: Params,
        inputs: Mapping[str, jax.Array | np.ndarray],
        action: Float[jax.Array | np.ndarray, "B H A"],
        key: jax.Array,
        samples: int = 4,
        mask: Bool[jax.Array | np.ndarray, "B H A"] | None = None,
    ) -> Float[jax.Array, ""]:
        """Diffusion loss of demonstrated chunks in env units; ``mask`` is False for padding. Pure."""
        action = self._statistics.normalise_action(jnp.asarray(action))
        mask = jnp.ones(action.shape, bool) if mask is None else jnp.asarray(mask)
        return self.network.imitation_loss(params, _on_device(inputs), action, mask, key, samples)

    def features(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        """Features of frames for reward heads: readout, image tokens in compact form, normalised proprioception."""
        inputs = self.imitation_inputs(obs)
        parts = []
        for at in range(0, len(obs.state), FEATURE_BATCH):
            rows = {name: value[at : at + FEATURE_BATCH] for name, value in inputs.items()}
            num = len(rows["state"])
            padded = {name: np.resize(value, (FEATURE_BATCH, *value.shape[1:])) for name, value in rows.items()}
            parts.append(np.asarray(_features(self.network, self._params, padded, self._projection))[:num])
        return np.concatenate([np.concatenate(parts), inputs["state"]], axis=1)

    def _shared_readout(self, inputs: Mapping[str, np.ndarray]) -> jax.Array:
        """One trunk pass for rows that see the same: the members of a group do, before their first action."""
        small = {name: value for name, value in inputs.items() if not name.startswith("image/")}
        num = len(inputs["state"])
        if len(distinct_rows(small)[0]) > num // 2:  # spares comparing the images
            return _readout(self.network, self._params, inputs)
        rows, inverse = distinct_rows(inputs)
        if len(rows) > num // 2:
            return _readout(self.network, self._params, inputs)
        size = 1 << (len(rows) - 1).bit_length()  # few static shapes, whatever the number of groups
        rows = np.resize(rows, size)
        return _readout(self.network, self._params, {k: v[rows] for k, v in inputs.items()})[inverse]

    def _executable(self, action: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N H A"]:
        """The steps that are executed, in env units."""
        head, body = self.network.head_spec, self.network.body
        chunk = action.reshape(len(action), head.action_horizon, head.action_dim)[:, : body.chunk, : body.action_dim]
        self._clipped += (np.abs(chunk) >= SATURATION * head.max_action).sum(), chunk.size
        return self._statistics.unnormalise_action(chunk)

    def diagnostics(self) -> dict[str, float]:
        """Since the last call: the share of acted coordinates at the bound of the denoising states. A head that was
        fine-tuned badly is stuck there (octo-models/octo issues 43 and 105)."""
        clipped, total = self._clipped
        self._clipped = np.zeros(2, np.int64)
        return {"policy/saturated_share": float(clipped / total) if total else float("nan")}


def _on_device(inputs: Mapping[str, jax.Array | np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in inputs.items()}
