"""Gaussian policy around a multilayer perceptron on the state, in JAX: for envs whose state says all that matters.

It sees ``obs.state`` only, normalised by demonstrations where there are some. The hidden layers are tanh's.
Axes: see types.py; E = H * A, S = 1.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from vla_rlaif.policies.gaussian_density import cloned, drawn, scored
from vla_rlaif.policies.specs import spec_to_json
from vla_rlaif.policy_config import MlpConfig
from vla_rlaif.types import Array, Decision, EnvSpec, Observation, Weights

Params = Mapping[str, jax.Array]
STATISTICS = frozenset({"state/mean", "state/std"})
_FAR = 5.0  # deviations: what a demonstration never showed must not saturate every unit
_FLOOR = 1e-3  # env units: 1 mm, of dims that hardly move


class MlpPolicy:
    """Starts with random hidden layers and the mean 0."""

    window = 1

    def __init__(
        self, config: MlpConfig, spec: EnvSpec, *, seed: int = 0, statistics: Mapping[str, np.ndarray] | None = None
    ):
        """``statistics`` are those of ``measured_state``; None leaves the state as it is."""
        self.config, self.spec = config, spec
        self._version = 0
        statistics = statistics or {"state/mean": np.zeros(spec.state_dim), "state/std": np.ones(spec.state_dim)}
        sizes = (spec.state_dim, *config.hidden, spec.chunk * spec.action_dim)
        rng, values = np.random.default_rng(seed), dict(statistics)
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            scale = 0.0 if i == len(config.hidden) else inputs**-0.5
            values |= {f"{i}/kernel": scale * rng.normal(size=(inputs, outputs)), f"{i}/bias": np.zeros(outputs)}
        self._params: dict[str, jax.Array] = {n: jnp.array(v, jnp.float32) for n, v in values.items()}

    @property
    def version(self) -> int:
        return self._version

    @property
    def params(self) -> Params:
        return self._params

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(self._params) - STATISTICS

    @property
    def imitable(self) -> frozenset[str]:
        return self.trainable

    def metadata(self) -> dict[str, Any]:
        """What a folder says of its weights; JSON."""
        return {"config": self.config.model_dump(mode="json"), "spec": spec_to_json(self.spec)}

    def load(self, weights: Weights, version: int) -> None:
        """Take new values by name. The statistics may be missing: they then stay as they are."""
        wanted = {name: value.shape for name, value in self._params.items()}
        got = {name: wanted[name] for name in STATISTICS} | {name: value.shape for name, value in weights.items()}
        if differ := sorted(name for name in wanted | got if wanted.get(name) != got.get(name)):
            raise ValueError(
                f"The weights do not fit policy.hidden {self.config.hidden}, {self.spec.state_dim} state dims and "
                f"chunks of {self.spec.chunk} x {self.spec.action_dim}: {', '.join(differ)} differ. Use the config "
                "that made them."
            )
        self._params = self._params | {name: jnp.array(value, jnp.float32) for name, value in weights.items()}
        self._version = version

    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        mean = np.asarray(self.means(self._params, {"state": obs.state}))[:, 0]
        sample = drawn(mean, seeds, noise_scale * self.config.std)
        executed = np.full(len(sample), self.spec.chunk)
        logp, _ = self.score(self._params, self.inputs(obs, {"sample": sample}, executed))
        action = np.clip(sample, -1.0, 1.0).reshape(-1, self.spec.chunk, self.spec.action_dim)
        return Decision(action=action, logp=np.asarray(logp), trace={"sample": sample})

    def features(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        """The normalised state, for reward heads."""
        return np.asarray(_normalised(self._params, jnp.asarray(obs.state)))

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        """What ``means`` and ``score`` read, leaves "B ..."."""
        return {"state": obs.state, "sample": trace["sample"], "executed": executed}

    def prepare(self, params: Params, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """There is nothing worth running ahead of ``means`` and ``score``."""
        return inputs

    def means(self, params: Params, inputs: Mapping[str, Array]) -> Float[jax.Array, "B 1 E"]:
        return _forward(dict(params), jnp.asarray(inputs["state"]))[:, None]

    def score(
        self,
        params: Params,
        inputs: Mapping[str, Array],
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
        inputs: Mapping[str, Array],
        action: Float[jax.Array, "B H A"],
        key: jax.Array,
        samples: int,
    ) -> Float[jax.Array, ""]:
        """Negative log-density of the demonstrated chunks but for its constant, nats. It needs no samples. Pure."""
        del key, samples
        return cloned(self.means(params, inputs), action, std=self.config.std)


def measured_state(state: Float[np.ndarray, "m P"]) -> dict[str, np.ndarray]:
    """The normalisation by states of demonstrations, as parameters of the policy."""
    std = np.maximum(state.std(0, dtype=np.float64), _FLOOR)
    return {"state/mean": state.mean(0, dtype=np.float64), "state/std": std}


def _normalised(params: Params, state: Float[jax.Array, "B P"]) -> Float[jax.Array, "B P"]:
    return jnp.clip((state - params["state/mean"]) / params["state/std"], -_FAR, _FAR)


@jax.jit
def _forward(params: Params, state: Float[jax.Array, "B P"]) -> Float[jax.Array, "B E"]:
    x, last = _normalised(params, state), (len(params) - len(STATISTICS)) // 2 - 1
    for i in range(last):
        x = jnp.tanh(x @ params[f"{i}/kernel"] + params[f"{i}/bias"])
    return x @ params[f"{last}/kernel"] + params[f"{last}/bias"]
