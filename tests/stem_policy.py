"""A small JAX policy with a frozen stem below a trained body: for the tests of what trains JAX policies.

Axes: B decisions, X numbers of an input, E numbers of a chunk; S = 2 Gaussians a decision.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.types import Batch, Observation

X, WIDTH, E, S = 5, 8, 3, 2
STD = 0.3


class StemPolicy:
    """Its means are a layer, a normalisation and a layer on top of the stem.

    ``on_prepare`` is called whenever the stem runs (not when it is traced); ``noise`` scales the random part of the
    imitation loss.
    """

    def __init__(self, *, noise: float = 1.0, on_prepare: Callable[[], None] | None = None):
        rng = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / math.sqrt(shape[0]), jnp.float32)  # noqa: E731
        self.noise, self.on_prepare = noise, on_prepare
        self.params = {
            "stem/kernel": draw(X, WIDTH),
            "body/kernel": draw(WIDTH, WIDTH),
            "body/bias": draw(WIDTH),
            "head/kernel": draw(WIDTH, S * E),
        }
        self.trainable = frozenset({"body/kernel", "body/bias", "head/kernel"})
        self.imitable = frozenset(self.params)

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        return {"x": obs.state, "sample": trace["sample"]}

    def prepare(self, params: Mapping[str, jax.Array], inputs: Mapping[str, Any]) -> dict[str, Any]:
        assert set(params) == set(self.params) - self.trainable
        if self.on_prepare is not None:
            jax.debug.callback(self.on_prepare)
        return {"features": jnp.tanh(inputs["x"] @ params["stem/kernel"]), "sample": inputs["sample"]}

    def means(self, params: Mapping[str, jax.Array], inputs: Mapping[str, Any]) -> Float[jax.Array, "B 2 E"]:
        hidden = jax.nn.swish(inputs["features"] @ params["body/kernel"] + params["body/bias"])
        mean = jnp.mean(hidden, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(hidden), axis=-1, keepdims=True) - jnp.square(mean)
        normal = (hidden - mean) * jax.lax.rsqrt(variance + 1e-6)
        return (jax.nn.swish(normal) @ params["head/kernel"]).reshape(-1, S, E)

    def score(
        self, params: Mapping[str, jax.Array], inputs: Mapping[str, Any], reference: Float[jax.Array, "B 2 E"] | None
    ) -> tuple[Float[jax.Array, "B 2"], Float[jax.Array, "B 2"] | None]:
        means = self.means(params, inputs)
        logp = jnp.mean(-0.5 * jnp.square((inputs["sample"] - means) / STD), axis=-1)
        return logp, None if reference is None else jnp.mean(0.5 * jnp.square((means - reference) / STD), axis=-1)

    def imitation_inputs(self, obs: Observation) -> dict[str, np.ndarray]:
        return {"x": obs.state}

    def imitation_loss(
        self, params: Mapping[str, jax.Array], inputs: Mapping[str, Any], action: Any, key: jax.Array, samples: int
    ) -> Float[jax.Array, ""]:
        features = {"features": jnp.tanh(inputs["x"] @ params["stem/kernel"])}
        target = action[None] + self.noise * jax.random.normal(key, (samples, *action.shape))
        return jnp.mean(jnp.square(self.means(params, features) - target))


def observations(num: int, seed: int) -> Observation:
    state = np.random.default_rng(seed).normal(size=(num, X)).astype(np.float32)
    return Observation(images={}, state=state, instruction=("",) * num)


def make_batch(num: int, seed: int) -> Batch:
    rng = np.random.default_rng((seed, 1))
    return Batch(
        obs=observations(num, seed),
        trace={"sample": rng.normal(size=(num, S, E)).astype(np.float32)},
        executed=np.ones(num, np.int64),
        advantage=rng.normal(size=num).astype(np.float32),
        mask=rng.random(num) < 0.9,
        num_valid=float(num),
    )
