"""Supervised warm start of a JAX policy on demonstrations.

Axes: D samples, H chunk, A action dims, P proprioception dims, B minibatch.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from vla_rlaif.config import ImitateConfig
from vla_rlaif.jax_learner import Params
from vla_rlaif.types import Array, Observation, Weights


@runtime_checkable
class ImitablePolicy(Protocol):
    @property
    def params(self) -> Params: ...

    @property
    def imitable(self) -> frozenset[str]:
        """Names of the parameters to fit."""
        ...

    def imitation_inputs(self, obs: Observation) -> Mapping[str, np.ndarray]: ...

    def imitation_loss(
        self, params: Params, inputs: Mapping[str, Array], action: Float[Array, "B H A"], key: jax.Array, samples: int
    ) -> Float[Array, ""]: ...


def imitate(
    policy: ImitablePolicy,
    obs: Observation,
    action: Float[np.ndarray, "D H A"],
    config: ImitateConfig,
    *,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Weights:
    """Fit the policy's imitable parameters to the demonstrated chunks (AdamW, cosine schedule) and return them.

    ``on_step`` is called with (steps done, mean loss since the last call), every fiftieth step and at the end.
    """
    num = len(action)
    if num < config.batch:
        raise ValueError(
            f"{num} demonstrated steps are fewer than imitate.batch {config.batch}; collect more or lower it."
        )
    inputs = policy.imitation_inputs(obs)
    schedule = optax.cosine_decay_schedule(config.lr, config.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-4))

    @jax.jit
    def step(params, opt_state, average, x, a, key):
        value, grads = jax.value_and_grad(policy.imitation_loss)(params, x, a, key, config.samples)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, jax.tree.map(lambda m, p: 0.99 * m + 0.01 * p, average, params), value

    params: Params = {k: v for k, v in policy.params.items() if k in policy.imitable}
    opt_state, average = optimizer.init(params), params
    rng, key, losses = np.random.default_rng(seed), jax.random.key(seed), []
    for i in range(config.steps):
        rows = rng.integers(0, num, config.batch)
        x = {k: jnp.asarray(v[rows]) for k, v in inputs.items()}
        params, opt_state, average, value = step(
            params, opt_state, average, x, jnp.asarray(action[rows]), jax.random.fold_in(key, i)
        )
        losses.append(value)
        if (i + 1) % 50 == 0 or i + 1 == config.steps:
            on_step(i + 1, float(np.mean(losses)))
            losses = []
    # The average lags the last steps by about 100; with the cosine schedule those barely move.
    return {k: np.asarray(v) for k, v in average.items()}
