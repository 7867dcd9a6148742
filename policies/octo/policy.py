"""Octo as a policy: the host's edge of ``network.py``. Knows the environment's spec, nothing of rewards or optimisers.

Axes: see types.py; E = H * A, D token width.
"""

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from vla_rlaif.config import OctoConfig
from vla_rlaif.policies.octo.initial import initial_params
from vla_rlaif.policies.octo.language import Vocabulary
from vla_rlaif.policies.octo.network import HEAD, REFERENCE, WORDS, OctoNetwork, Params, with_reference
from vla_rlaif.policies.octo.statistics import Statistics
from vla_rlaif.policies.specs import spec_from_json, spec_to_json
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights

FEATURE_BATCH = 64  # rows per call when computing features; the last call is padded
FEATURE_WIDTH = 16  # of a projected image token
RL_ONLY = ("tuned_steps", "std_floor", "tune", "logp_reduction")  # may differ from the checkpoint's

# Compiled once for each network and batch size, whatever the number of policies.
_act = jax.jit(OctoNetwork.act, static_argnums=0)
_features = jax.jit(OctoNetwork.features, static_argnums=0)


class OctoPolicy:
    """Acts, and scores its own actions again under other parameters.

    ``params`` holds a frozen copy of the head (``reference/...``) for the denoising steps that are not trained; take it
    with ``freeze_reference`` once the start weights are in.
    """

    def __init__(self, config: OctoConfig, spec: EnvSpec, *, seed: int = 0):
        self._build(config, spec, Vocabulary.of(spec.instructions, config.language_tokens))
        self._statistics = Statistics.identity(spec.action_dim, spec.state_dim)
        initial = initial_params(self.network.shapes(), seed)
        self._params = with_reference(jax.device_put(initial))

    def _build(self, config: OctoConfig, spec: EnvSpec, vocabulary: Vocabulary) -> None:
        self.config, self.spec, self.vocabulary = config, spec, vocabulary
        self.network = OctoNetwork(config, spec, vocabulary.size)
        self._version = 0
        self._params: dict[str, jax.Array] = {}
        key = jax.random.key(0)  # part of the definition of the features, not of a run
        scale = config.token_dim**-0.5
        self._projection = scale * jax.random.normal(key, (config.token_dim, FEATURE_WIDTH))

    @classmethod
    def from_parts(cls, config: OctoConfig, metadata: Mapping[str, Any], weights: Weights) -> "OctoPolicy":
        """Rebuild a stored policy. ``config`` may choose other reinforcement-learning settings, not other sizes."""
        for name, value in config.model_dump(mode="json").items():
            if name not in RL_ONLY and metadata["config"][name] != value:
                raise ValueError(f"{name} is {value}, but the stored policy has {metadata['config'][name]}.")
        spec = spec_from_json(metadata["spec"])
        policy = cls.__new__(cls)
        policy._build(config, spec, Vocabulary(metadata["vocabulary"], config.language_tokens))
        policy._statistics = Statistics.from_lists(metadata["statistics"])
        shapes = policy.network.shapes()
        missing = sorted(shapes.keys() - weights.keys())
        if missing:
            raise ValueError(f"The weights lack {len(missing)} parameters, the first is {missing[0]!r}.")
        empty = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        policy._params = with_reference(jax.device_put(empty))
        policy.load(weights, 0)
        if not any(name.startswith(REFERENCE) for name in weights):
            policy.freeze_reference()
        return policy

    @property
    def version(self) -> int:
        return self._version

    @property
    def params(self) -> Mapping[str, jax.Array]:
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
        """All that ``from_parts`` needs besides the weights; JSON."""
        return {
            "config": self.config.model_dump(mode="json"),
            "spec": spec_to_json(self.spec),
            "vocabulary": list(self.vocabulary.words),
            "statistics": self._statistics.to_lists(),
        }

    @property
    def trainable(self) -> frozenset[str]:
        """What reinforcement learning changes."""
        if self.config.tune == "head":
            return frozenset(name for name in self._params if name.startswith(HEAD))
        return self.imitable - {WORDS}

    @property
    def imitable(self) -> frozenset[str]:
        """What imitation changes: everything but the frozen head."""
        return frozenset(name for name in self._params if not name.startswith(REFERENCE))

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
        """Choose a chunk. ``noise_scale`` multiplies the noise of the steps; the start is always the seed's."""
        inputs = self.imitation_inputs(obs)
        out = _act(self.network, self._params, inputs, jnp.asarray(seeds), jnp.float32(noise_scale))
        host = {name: np.asarray(value) for name, value in out.items()}
        action = host["action"].reshape(-1, self.spec.chunk, self.spec.action_dim)
        trace = {name: host[name] for name in ("readout", "start", "chain")}
        return Decision(action=self._statistics.unnormalise_action(action), logp=host["logp"], trace=trace)

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        """What ``means`` and ``score`` read, leaves "B ...". Without images if only the head is trained."""
        stored = {"start": trace["start"], "chain": trace["chain"], "executed": executed}
        if self.config.tune == "head":
            return stored | {"readout": trace["readout"]}
        return stored | self.imitation_inputs(obs)

    def means(self, params: Params, inputs: Mapping[str, jax.Array | np.ndarray]) -> Float[jax.Array, "B S E"]:
        """Means of the trained denoising steps. Pure."""
        return self.network.means(params, _on_device(inputs))

    def score(
        self,
        params: Params,
        inputs: Mapping[str, jax.Array | np.ndarray],
        reference_means: Float[jax.Array, "B S E"] | None = None,
    ) -> tuple[Float[jax.Array, "B S"], Float[jax.Array, "B S"] | None]:
        """Log-probabilities, and divergences if there is a reference; nats. Pure."""
        return self.network.score(params, _on_device(inputs), reference_means)

    def imitation_inputs(self, obs: Observation) -> dict[str, np.ndarray]:
        """What the trunk reads, leaves "B ..."."""
        images = {f"image/{camera}": obs.images[camera] for camera in self.spec.cameras}
        state = self._statistics.normalise_state(obs.state)
        return images | {"ids": self.vocabulary.encode(obs.instruction), "state": state}

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


def _on_device(inputs: Mapping[str, jax.Array | np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in inputs.items()}
