"""The denoising chain as a policy: sampled, and scored again under other parameters. Pure functions of a network.

Axes: N rows acting, B decisions being learned from, S trained of K denoising steps, E = H * A numbers that the head
predicts, n readout tokens, D their width. Source: DPPO (https://arxiv.org/abs/2409.00588).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from vla_rlaif.policies.octo import diffusion
from vla_rlaif.policies.octo.network import HEAD, REFERENCE, OctoNetwork, Params


def sample(
    network: OctoNetwork,
    params: Params,
    readout: Float[jax.Array, "N n D"],
    seeds: UInt32[jax.Array, " N"],
    noise_scale: Float[jax.Array, ""],
) -> dict[str, jax.Array]:
    """Denoise from N(0, 1): the final ``action`` [N, E], ``logp`` [N, S] of the whole chain, and the trace."""
    steps = np.arange(network.head_spec.diffusion_steps - 1, -1, -1)
    x, noise = _noise(network, seeds)
    first, last = steps > network.tuned[0], steps < network.tuned[-1]

    def run(x: jax.Array, part: Bool[np.ndarray, " K"], prefix: str) -> tuple[jax.Array, jax.Array, jax.Array]:
        condition = network.condition(params, readout, prefix)

        def predict(x: jax.Array, step: jax.Array) -> jax.Array:
            return network.predict(params, condition, x, step, prefix)

        stds, limit = noise_scale * jnp.asarray(network.stds[steps[part]]), network.head_spec.max_action
        return diffusion.denoise(predict, network.schedule, x, noise[part], steps[part], stds, limit, network.live)

    start = run(x, first, REFERENCE + HEAD)[0] if first.any() else x
    x, samples, means = run(start, ~(first | last), HEAD)
    action = run(x, last, REFERENCE + HEAD)[0] if last.any() else x
    density = diffusion.log_density(samples, means, jnp.asarray(network.tuned_stds)[:, None, None])
    executed = jnp.full(len(seeds), network.body.chunk)
    logp = diffusion.reduce_dims(density, _scored(network, executed)[None], network.settings.logp_reduction)
    return {"action": action, "logp": logp.T, "start": start, "chain": jnp.swapaxes(samples, 0, 1)}


def sample_ddim(
    network: OctoNetwork, params: Params, readout: Float[jax.Array, "N n D"], seeds: UInt32[jax.Array, " N"]
) -> Float[jax.Array, "N E"]:
    """The action by few deterministic steps of the trained head (https://arxiv.org/abs/2010.02502)."""
    assert network.settings.ddim_steps is not None
    condition = network.condition(params, readout)

    def predict(x: jax.Array, step: jax.Array) -> jax.Array:
        return network.predict(params, condition, x, step)

    steps = diffusion.ddim_steps(network.head_spec.diffusion_steps, network.settings.ddim_steps)
    x, _ = _noise(network, seeds)
    return diffusion.ddim(predict, network.schedule, x, steps, network.head_spec.max_action, network.live)


def means(network: OctoNetwork, params: Params, inputs: Mapping[str, jax.Array]) -> Float[jax.Array, "B S E"]:
    """Means of all trained steps of stored chains, in one call of the head."""
    before = diffusion.next_state(inputs["chain"][:, :-1], network.live, network.head_spec.max_action)
    states = jnp.concatenate([inputs["start"][:, None], before], axis=1)
    step = jnp.asarray(network.tuned)[None]
    condition = network.condition(params, network.readout(params, inputs))
    noise = network.predict(params, condition[:, None], states, step)
    return network.schedule.mean(states, noise, step)


def score(
    network: OctoNetwork,
    params: Params,
    inputs: Mapping[str, jax.Array],
    reference_means: Float[jax.Array, "B S E"] | None = None,
) -> tuple[Float[jax.Array, "B S"], Float[jax.Array, "B S"] | None]:
    """Log-probability of stored chains, and the divergence from the policy that made ``reference_means``.

    Nats, over the dims of the env steps that were executed: a mean or a sum, as the settings say.
    """
    mean, std = means(network, params, inputs), jnp.asarray(network.tuned_stds)[None, :, None]
    mask, how = _scored(network, inputs["executed"])[:, None], network.settings.logp_reduction
    logp = diffusion.reduce_dims(diffusion.log_density(inputs["chain"], mean, std), mask, how)
    if reference_means is None:
        return logp, None
    return logp, diffusion.reduce_dims(diffusion.divergence(mean, reference_means, std), mask, how)


def _noise(
    network: OctoNetwork, seeds: UInt32[jax.Array, " N"]
) -> tuple[Float[jax.Array, "N E"], Float[jax.Array, "K N E"]]:
    """Start and noise of every step: one stream a row, from its seed alone."""
    shape = (network.head_spec.diffusion_steps + 1, network.width)
    rows = jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), shape))(seeds)
    return rows[:, 0], jnp.moveaxis(rows[:, 1:], 1, 0)


def _scored(network: OctoNetwork, executed: Int[jax.Array, " B"]) -> Bool[jax.Array, "B E"]:
    """The numbers that reached the simulator: executed env steps, dims that the env has."""
    steps = jnp.arange(network.head_spec.action_horizon)[None] < executed[:, None]
    return jnp.repeat(steps, network.head_spec.action_dim, axis=1) & jnp.asarray(network.live)
