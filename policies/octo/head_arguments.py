"""What callers of ``OctoModel`` may ask of which action head, and what is checked in the answer.

Axes: B batch, T window, H actions of a chunk, A dims, K denoising steps, E = H * dims of the head, *s the sample shape.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from vla_rlaif.policies.octo.action_stats import ActionStatistics
from vla_rlaif.policies.octo.forward import Draws
from vla_rlaif.policies.octo.spec import DiffusionSpec, DiscreteSpec, HeadSpec

SATURATION = 0.98  # of max_action: a number beyond it counts as stuck at the bound
Noise = tuple[Float[np.ndarray | jax.Array, "*s B E"], Float[np.ndarray | jax.Array, "K *s B E"]]


def check_sampling(
    head: HeadSpec, *, argmax: bool, temperature: float, rng: jax.Array | None, noise: Noise | None
) -> None:
    """Raises ValueError for an argument that means nothing to the head, or one that it lacks."""
    is_discrete, is_diffusion = isinstance(head, DiscreteSpec), isinstance(head, DiffusionSpec)
    if (argmax or temperature != 1.0) and not is_discrete:
        raise ValueError(f"argmax {argmax}, temperature {temperature}: {head.NAME} has neither; leave them out.")
    if noise is not None and (rng is not None or not is_diffusion):
        raise ValueError(f"noise is for a diffusion head and in place of rng; the head is {head.NAME}.")
    if rng is None and noise is None and (is_diffusion or (is_discrete and not argmax)):
        raise ValueError(f"{head.NAME} samples: give rng=jax.random.key(n), another one for every call.")


def checked_noise(head: DiffusionSpec, noise: Noise, lead: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """On the device. ``lead``: sample shape and batch."""
    shape = (*lead, head.action_horizon * head.action_dim)
    want, got = (shape, (head.diffusion_steps, *shape)), (noise[0].shape, noise[1].shape)
    if got != want:
        raise ValueError(f"noise has shapes {got[0]} and {got[1]}, wanted {want[0]} and {want[1]}.")
    return jnp.asarray(noise[0]), jnp.asarray(noise[1])


def action_statistics(
    statistics: ActionStatistics | Mapping[str, Any] | None, head: HeadSpec
) -> ActionStatistics | None:
    """A mapping is the ``action`` entry of a dataset, and its normalisation is by mean and std."""
    if statistics is not None and not isinstance(statistics, ActionStatistics):
        statistics = ActionStatistics.from_official(statistics)
    if statistics is not None and len(statistics.mean) > head.action_dim:
        raise ValueError(f"the statistics have {len(statistics.mean)} action dims, the head has {head.action_dim}.")
    return statistics


def warn_if_stuck(action: Float[np.ndarray, "*s B H A"], limit: float) -> None:
    """If most of the numbers are where the sampler clips: nothing that was learned looks like that."""
    share = float((np.abs(action) >= SATURATION * limit).mean())
    if share > 0.5:
        warnings.warn(
            f"{share:.0%} of the predicted numbers are at the bound of {limit:g}: the head is untrained, or was "
            "trained on actions of another scale. Check the statistics that normalised them.",
            skip_file_prefixes=(str(Path(__file__).parent),),
        )


def checked_actions(
    head: HeadSpec, batch: Mapping[str, Any], size: tuple[int, int]
) -> tuple[Float[jax.Array, "B T H A"], Bool[jax.Array, "B T H A"]]:
    """Normalised actions, and which of them count: all, unless the batch says otherwise. ``size``: batch and window."""
    shape = (*size, head.action_horizon, head.action_dim)
    action, ok = np.asarray(batch["action"]), np.asarray(batch.get("action_pad_mask", np.ones(shape, bool)))
    for name, value, kind in (("action", action, np.floating), ("action_pad_mask", ok, np.bool_)):
        if value.shape != shape or not np.issubdtype(value.dtype, kind):
            raise ValueError(
                f"{name} is {value.dtype} {list(value.shape)}, wanted {'floats' if name == 'action' else 'booleans'} "
                f"{list(shape)}: batch, window, chunk, dims."
            )
    return jnp.asarray(action, jnp.float32), jnp.asarray(ok)


def check_draws(head: DiffusionSpec, rng: jax.Array | None, draws: Draws | None, size: tuple[int, int]) -> None:
    """Raises ValueError unless exactly one is given, and fits. ``size``: batch and window."""
    if (rng is None) == (draws is None):
        raise ValueError("the loss of a diffusion head is random: give rng, another key for every call, or draws.")
    if draws is None:
        return
    want = (len(draws.time), *size)
    shapes, wanted = (draws.time.shape, draws.noise.shape), (want, (*want, head.action_horizon * head.action_dim))
    if shapes != wanted:
        raise ValueError(f"draws have shapes {shapes[0]} and {shapes[1]}, wanted {wanted[0]} and {wanted[1]}.")
