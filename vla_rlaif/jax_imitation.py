"""Supervised warm start of a JAX policy on demonstrations, data parallel over the local devices.

Axes: D samples, H chunk, A action dims, P proprioception dims, B rows of a micro-batch.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from vla_rlaif.devices import Placement, to_host
from vla_rlaif.jax_learner import JaxImitable, adamw, gradient_adder
from vla_rlaif.learning import fitted_names
from vla_rlaif.types import Array, Observation, Weights
from vla_rlaif.warm_start_config import ImitateConfig


def imitate(
    policy: JaxImitable,
    obs: Observation,
    action: Float[np.ndarray, "D H A"],
    config: ImitateConfig,
    *,
    seed: int,
    on_start: Callable[[int, int], None] = lambda trained, frozen: None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Weights:
    """Fit the policy's imitable parameters, without ``config.frozen``, to the demonstrated chunks and return them.

    AdamW with a cosine schedule. ``on_start`` is called with the sizes of all parameters that are fitted and of all
    that are not; ``on_step`` with (steps done, mean loss since the last call), every fiftieth step and at the end.

    Raises:
        ValueError: too few demonstrations, rows that do not split over the devices, or a ``frozen`` that is no use.
    """
    num = len(action)
    if num < config.batch:
        raise ValueError(
            f"{num} demonstrated steps are fewer than imitate.batch {config.batch}; collect more or lower it."
        )
    placement = Placement.of(config.devices)
    placement.micro_rows(config.batch, config.micro_batches, "imitate.batch")
    names = fitted_names(policy.params, policy.imitable, config.frozen)
    params = placement.copies({k: policy.params[k] for k in names})
    frozen = jax.device_put({k: v for k, v in policy.params.items() if k not in params}, placement.replicated)
    on_start(num_numbers(params), num_numbers(frozen))

    add, apply, zeros, init = _compiled(policy, config, placement)
    opt_state, average, losses = init(params), placement.copies(params), []
    inputs = policy.imitation_inputs(obs)
    rng, key = np.random.default_rng(seed), jax.device_put(jax.random.key(seed), placement.replicated)
    for i in range(config.steps):
        grads = zeros(params)
        for m, rows in enumerate(np.split(rng.integers(0, num, config.batch), config.micro_batches)):
            x, a = jax.device_put(({k: v[rows] for k, v in inputs.items()}, action[rows]), placement.rows)
            draw = np.int32(i * config.micro_batches + m)  # each micro-batch of the run has its own random numbers
            grads, (value, _) = add(params, grads, frozen, x, a, key, draw)
            losses.append(value)
        params, opt_state, average = apply(params, opt_state, average, grads)
        if (i + 1) % 50 == 0 or i + 1 == config.steps:
            on_step(i + 1, float(np.mean(jax.device_get(losses))))
            losses = []
    # The average lags the last steps by about 100; with the cosine schedule those barely move.
    return to_host(average)


def _compiled(policy: JaxImitable, config: ImitateConfig, placement: Placement) -> tuple[Callable, ...]:
    """Functions: add a micro-batch's gradient, do one step, make an empty gradient, make the optimiser's state. The
    first two overwrite what they are given."""
    replicated = placement.replicated
    lr = optax.warmup_cosine_decay_schedule(0.0, config.lr, config.warmup, config.steps)
    optimizer = adamw(lr, max_grad_norm=1.0, weight_decay=config.weight_decay)

    def loss(params, frozen, x, a, key, draw):
        here = jax.random.fold_in(key, draw)
        return policy.imitation_loss({**frozen, **params}, x, a, here, config.samples), ()

    @partial(jax.jit, donate_argnums=(0, 1, 2), out_shardings=replicated)
    def apply(params, opt_state, average, grads):
        grads = jax.tree.map(lambda g: g / config.micro_batches, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, jax.tree.map(lambda m, p: 0.99 * m + 0.01 * p, average, params)

    zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=replicated)
    return gradient_adder(loss, replicated), apply, zeros, jax.jit(optimizer.init, out_shardings=replicated)


def num_numbers(values: Mapping[str, Array]) -> int:
    return sum(v.size for v in values.values())
