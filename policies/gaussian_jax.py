"""Gaussian policy with a mean linear in the state, in JAX: the smallest policy that a JaxLearner can train.

Its parameters have the names and shapes of ``gaussian_torch.py``, and both draw the same noise.
Axes: see types.py; E = H * A, S = 1.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from vla_rlaif.policies.gaussian_density import cloned, drawn, scored
from vla_rlaif.policies.specs import spec_from_json, spec_to_json
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights

Params = Mapping[str, jax.Array]


class GaussianJax:
    """Acts on ``obs.state`` only. The mean starts at 0."""

    def __init__(self, config: GaussianConfig, spec: EnvSpec, *, seed: int = 0):
        del seed  # nothing is drawn: the mean starts at 0
        self.config, self.spec = config, spec
        self._version = 0
        width = spec.chunk * spec.action_dim
        self._params = {"weight": jnp.zeros((width, spec.state_dim)), "bias": jnp.zeros(width)}

    @classmethod
    def from_parts(cls, config: GaussianConfig, metadata: Mapping[str, Any], weights: Weights) -> "GaussianJax":
        policy = cls(config, spec_from_json(metadata["spec"]))
        policy.load(weights, 0)
        return policy

    window = 1

    @property
    def version(self) -> int:
        return self._version

    @property
    def params(self) -> Params:
        return self._params

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(self._params)

    @property
    def imitable(self) -> frozenset[str]:
        return frozenset(self._params)

    def metadata(self) -> dict[str, Any]:
        """All that ``from_parts`` needs besides the weights; JSON."""
        return {"config": self.config.model_dump(mode="json"), "spec": spec_to_json(self.spec)}

    def load(self, weights: Weights, version: int) -> None:
        for name, value in self._params.items():
            if name not in weights or weights[name].shape != value.shape:
                raise ValueError(f"The weights need {name!r} of shape {value.shape}.")
        self._params = {name: jnp.array(weights[name], jnp.float32) for name in self._params}
        self._version = version

    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        mean = np.asarray(self.means(self._params, {"state": jnp.asarray(obs.state)}))[:, 0]
        sample = drawn(mean, seeds, noise_scale * self.config.std)
        executed = np.full(len(sample), self.spec.chunk)
        logp, _ = self.score(self._params, self.inputs(obs, {"sample": sample}, executed))
        action = np.clip(sample, -1.0, 1.0).reshape(-1, self.spec.chunk, self.spec.action_dim)
        return Decision(action=action, logp=np.asarray(logp), trace={"sample": sample})

    def features(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        """What this policy sees: the state, for reward heads."""
        return obs.state.astype(np.float32)

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        """What ``means`` and ``score`` read, leaves "B ..."."""
        return {"state": obs.state, "sample": trace["sample"], "executed": executed}

    def prepare(
        self, params: Params, inputs: Mapping[str, jax.Array | np.ndarray]
    ) -> Mapping[str, jax.Array | np.ndarray]:
        """Nothing is frozen, so there is nothing to run ahead of ``means`` and ``score``."""
        return inputs

    def means(self, params: Params, inputs: Mapping[str, jax.Array | np.ndarray]) -> Float[jax.Array, "B 1 E"]:
        return (jnp.asarray(inputs["state"]) @ params["weight"].T + params["bias"])[:, None]

    def score(
        self,
        params: Params,
        inputs: Mapping[str, jax.Array | np.ndarray],
        reference_means: Float[jax.Array, "B 1 E"] | None = None,
    ) -> tuple[Float[jax.Array, "B 1"], Float[jax.Array, "B 1"] | None]:
        """Log-probability and divergence over the dims of the executed env steps, nats. Pure."""
        return scored(
            jnp.asarray(inputs["sample"]),
            self.means(params, inputs),
            reference_means,
            jnp.asarray(inputs["executed"]),
            std=self.config.std,
            action_dim=self.spec.action_dim,
        )

    def imitation_inputs(self, obs: Observation) -> dict[str, np.ndarray]:
        return {"state": obs.state}

    def imitation_loss(
        self,
        params: Params,
        inputs: Mapping[str, jax.Array | np.ndarray],
        action: Float[jax.Array, "B H A"],
        key: jax.Array,
        samples: int,
    ) -> Float[jax.Array, ""]:
        """Negative log-density of the demonstrated chunks but for its constant, nats. It needs no samples. Pure."""
        del key, samples
        return cloned(self.means(params, inputs), action, std=self.config.std)
