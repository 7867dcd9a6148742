"""Octo's diffusion head: noise schedule, noise predictor, imitation loss, and the sampler seen as Gaussian steps.

A denoising step s takes x_{s+1} to y_s ~ N(mu_s(x_{s+1}), sigma_s^2), and x_s = clip(y_s). The clip belongs to the
transition, so the density of the pre-clip y_s is an exact Gaussian: that is what reinforcement learning needs.
Source: octo-models/octo DiffusionActionHead; DPPO (https://arxiv.org/abs/2409.00588) for the floor of the std.
Axes: E = H * A numbers of a chunk, K denoising steps, S those with a density that are trained. Actions are normalised.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num, Shaped

from vla_rlaif.policies.octo.map_head import MAPHead, pooled
from vla_rlaif.policies.octo.spec import DiffusionSpec

XAVIER = nn.initializers.xavier_uniform()
Predictor = Callable[[jax.Array, Int[jax.Array, "..."]], jax.Array]  # (x [*b E], step [*b]) -> noise [*b E]


@dataclass(frozen=True)
class Schedule:
    """The cosine schedule (https://arxiv.org/abs/2102.09672), one entry for each denoising step."""

    betas: Float[np.ndarray, " K"]
    alphas: Float[np.ndarray, " K"]
    alpha_hats: Float[np.ndarray, " K"]
    clip_prediction: float | None = None  # bound of the implied clean action; None is upstream

    @classmethod
    def cosine(cls, num_steps: int, clip_prediction: float | None = None) -> "Schedule":
        time = np.linspace(0.0, 1.0, num_steps + 1)
        survival = np.cos((time + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.clip(1.0 - survival[1:] / survival[:-1], 0.0, 0.999)
        tables = (betas, 1.0 - betas, np.cumprod(1.0 - betas))
        betas, alphas, alpha_hats = (table.astype(np.float32) for table in tables)
        return cls(betas, alphas, alpha_hats, clip_prediction)

    def stds(self, floor: float) -> Float[np.ndarray, " K"]:
        """Std of every step: sqrt(beta), at least ``floor``; step 0 has no noise of its own."""
        natural = np.sqrt(self.betas)
        natural[0] = 0.0
        return np.maximum(natural, np.float32(floor))

    def corrupt(
        self, clean: Float[jax.Array, "*b E"], step: Int[jax.Array, "*#b"], noise: Float[jax.Array, "*b E"]
    ) -> Float[jax.Array, "*b E"]:
        """The forward process: what a clean action looks like after ``step``."""
        kept = jnp.asarray(self.alpha_hats)[step][..., None]
        return jnp.sqrt(kept) * clean + jnp.sqrt(1.0 - kept) * noise

    def mean(
        self, x: Float[jax.Array, "*b E"], noise: Float[jax.Array, "*b E"], step: Int[jax.Array, "*#b"]
    ) -> Float[jax.Array, "*b E"]:
        """Mean of the next state, given the predicted noise.

        Upstream does not clip the implied clean action. Its first step multiplies an error of the noise by 31.6, which
        a briefly trained head does not recover from; with a bound that step is harmless.
        """
        alpha = jnp.asarray(self.alphas)[step][..., None]
        kept = jnp.asarray(self.alpha_hats)[step][..., None]
        if self.clip_prediction is None:
            return (x - (1.0 - alpha) / jnp.sqrt(1.0 - kept) * noise) / jnp.sqrt(alpha)
        clean = (x - jnp.sqrt(1.0 - kept) * noise) / jnp.sqrt(kept)
        clean = jnp.clip(clean, -self.clip_prediction, self.clip_prediction)
        kept_before = kept / alpha
        from_clean = jnp.sqrt(kept_before) * (1.0 - alpha) / (1.0 - kept)
        return from_clean * clean + jnp.sqrt(alpha) * (1.0 - kept_before) / (1.0 - kept) * x


class FourierFeatures(nn.Module):
    """Learned frequencies of the denoising step, always in float32: the angles are large."""

    width: int

    @nn.compact
    def __call__(self, step: Num[jax.Array, "*b 1"]) -> Float[jax.Array, "*b F"]:
        kernel = self.param("kernel", nn.initializers.normal(0.2), (self.width // 2, 1))
        angle = 2 * jnp.pi * step.astype(kernel.dtype) @ kernel.T
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


class TimeMlp(nn.Module):
    """Dense, swish, Dense."""

    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b F"]) -> Float[jax.Array, "*b F"]:
        hidden = nn.swish(nn.Dense(2 * self.width, kernel_init=XAVIER, dtype=self.dtype, name="Dense_0")(x))
        return nn.Dense(self.width, kernel_init=XAVIER, dtype=self.dtype, name="Dense_1")(hidden)


class ResidualBlock(nn.Module):
    """A four times wider swish layer around a residual, behind a LayerNorm if there is one."""

    use_layer_norm: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b D"]:
        width, hidden = x.shape[-1], x
        if self.use_layer_norm:
            hidden = nn.LayerNorm(epsilon=1e-6, dtype=self.dtype, name="LayerNorm_0")(x)
        hidden = nn.swish(nn.Dense(4 * width, dtype=self.dtype, name="Dense_0")(hidden))
        return x + nn.Dense(width, dtype=self.dtype, name="Dense_1")(hidden)


class ReverseNetwork(nn.Module):
    """The residual MLP that predicts the noise."""

    spec: DiffusionSpec
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b E"]:
        spec, width = self.spec, self.spec.action_horizon * self.spec.action_dim
        x = nn.Dense(spec.hidden_dim, kernel_init=XAVIER, dtype=self.dtype, name="Dense_0")(x)
        for i in range(spec.num_blocks):
            x = ResidualBlock(spec.use_layer_norm, self.dtype, name=f"MLPResNetBlock_{i}")(x)
        return nn.Dense(width, kernel_init=XAVIER, dtype=self.dtype, name="Dense_1")(nn.swish(x))


class DiffusionModel(nn.Module):
    """Noise in ``x``, given the embedding and the denoising step."""

    spec: DiffusionSpec
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, embedding: Float[jax.Array, "*#b D"], x: Float[jax.Array, "*b E"], step: Num[jax.Array, "*#b"]
    ) -> Float[jax.Array, "*b E"]:
        time = FourierFeatures(self.spec.time_dim, name="time_preprocess")(step[..., None])
        time = TimeMlp(self.spec.time_dim, self.dtype, name="cond_encoder")(time)
        lead = x.shape[:-1]
        parts = [jnp.broadcast_to(part, (*lead, part.shape[-1])) for part in (time, embedding, x)]
        joined = jnp.concatenate([part.astype(self.dtype) for part in parts], axis=-1)
        return ReverseNetwork(self.spec, self.dtype, name="reverse_network")(joined).astype(x.dtype)


class DiffusionHead(nn.Module):
    """The official head: ``embed`` once for a readout, then one call for each denoising step.

    Initialise with ``head.init(key, tokens, x, step, method="init_all")``. The spec's dropout is never applied.
    """

    spec: DiffusionSpec
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.map_head = MAPHead(dtype=self.dtype) if self.spec.use_map else None
        self.diffusion_model = DiffusionModel(self.spec, self.dtype)

    def embed(
        self, tokens: Float[jax.Array, "*b n D"], mask: Bool[jax.Array, "*b n"] | None = None
    ) -> Float[jax.Array, "*b D"]:
        """What the noise is predicted from; ``mask`` counts with attention pooling only."""
        return pooled(tokens, mask, self.map_head)

    def __call__(
        self, embedding: Float[jax.Array, "*#b D"], x: Float[jax.Array, "*b E"], step: Num[jax.Array, "*#b"]
    ) -> Float[jax.Array, "*b E"]:
        """The noise in ``x``, in the dtype of ``x``."""
        return self.diffusion_model(embedding, x, step)

    def init_all(
        self, tokens: Float[jax.Array, "*b n D"], x: Float[jax.Array, "*b E"], step: Num[jax.Array, "*#b"]
    ) -> Float[jax.Array, "*b E"]:
        """Both methods in turn, so that ``init`` meets every parameter."""
        return self(self.embed(tokens), x, step)


def masked_mean(x: Shaped[jax.Array, "*b"], mask: Bool[jax.Array, "*#b"]) -> Float[jax.Array, ""]:
    """Mean over the entries where ``mask`` is True; 0 where it never is, as upstream."""
    mask = jnp.broadcast_to(mask, x.shape)
    return jnp.mean(x * mask) / jnp.maximum(jnp.mean(mask), 1e-5)


def masked_mse(
    predicted: Float[jax.Array, "*b E"], noise: Float[jax.Array, "*b E"], mask: Bool[jax.Array, "*#b #E"]
) -> Float[jax.Array, ""]:
    """Upstream's masked mean of the squared error (times A outside)."""
    return masked_mean(jnp.square(predicted - noise), mask)


def next_state(
    sample: Float[jax.Array, "*b E"], live: Bool[jax.Array | np.ndarray, " E"], limit: float
) -> Float[jax.Array, "*b E"]:
    """What the next denoising step starts from: the clip belongs to the transition, dead dims hold noise as it is."""
    return jnp.where(live, jnp.clip(sample, -limit, limit), sample)


def denoise(
    predict: Predictor,
    schedule: Schedule,
    x: Float[jax.Array, "N E"],
    noise: Float[jax.Array, "K2 N E"],
    steps: Int[np.ndarray, " K2"],
    stds: Float[jax.Array, " K2"],
    limit: float,
    live: Bool[jax.Array | np.ndarray, " E"],
) -> tuple[Float[jax.Array, "N E"], Float[jax.Array, "K2 N E"], Float[jax.Array, "K2 N E"]]:
    """Run ``steps``, given in acting order: final state, pre-clip samples and the means they came from.

    Dims that are not ``live`` (the head has them, the robot does not) become the noise that the head saw there in
    training, sqrt(1 - alpha_hat) z, whatever was predicted. ``next_state`` of a stored sample is the state it led to.
    """
    levels = jnp.sqrt(1.0 - jnp.asarray(schedule.alpha_hats)[steps])

    def body(x: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        step, z, std, level = at
        step = jnp.broadcast_to(step, x.shape[:-1])
        mean = schedule.mean(x, predict(x, step), step)
        sample = jnp.where(live, mean + std * z, level * z)
        return next_state(sample, live, limit), (sample, mean)

    final, (samples, means) = jax.lax.scan(body, x, (jnp.asarray(steps), noise, stds, levels))
    return final, samples, means


def ddim_steps(num_steps: int, num: int) -> Int[np.ndarray, " num"]:
    """``num`` of the denoising steps in acting order: the first two, then evenly spaced down to the last.

    After the first step almost nothing of the clean action is left (alpha_hat 6e-6 of 20 steps), so what it implies is
    the error of the predicted noise times 400. The next step must be the second, which gives that little weight.
    """
    if not 3 <= num <= num_steps:
        raise ValueError(f"got {num} DDIM steps, wanted 3 to {num_steps}, the steps of the head.")
    even = np.floor(np.linspace(num_steps - 2, 0, num - 1) + 0.5)
    return np.append(num_steps - 1, even).astype(np.int32)


def ddim(
    predict: Predictor,
    schedule: Schedule,
    x: Float[jax.Array, "N E"],
    steps: Int[np.ndarray, " num"],
    limit: float,
    live: Bool[jax.Array | np.ndarray, " E"],
) -> Float[jax.Array, "N E"]:
    """The clean action that noise ``x`` leads to without any further noise, in a few ``steps`` (see ``ddim_steps``).

    DDIM with eta 0 (https://arxiv.org/abs/2010.02502, eq. 12). The implied clean action is bounded by ``limit``, where
    training data ends, and by the schedule's own bound; the predicted noise is made to agree with it. Dims that are not
    ``live`` hold ``x`` at the noise level of the step they enter.
    """
    bound = limit if schedule.clip_prediction is None else min(limit, schedule.clip_prediction)
    kept = jnp.asarray(schedule.alpha_hats)[steps]
    start, after = x, jnp.append(kept[1:], jnp.ones((), kept.dtype))

    def body(x: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        step, kept, after = at
        noise = predict(x, jnp.broadcast_to(step, x.shape[:-1]))
        clean = jnp.clip((x - jnp.sqrt(1.0 - kept) * noise) / jnp.sqrt(kept), -bound, bound)
        noise = (x - jnp.sqrt(kept) * clean) / jnp.sqrt(1.0 - kept)
        x = jnp.sqrt(after) * clean + jnp.sqrt(1.0 - after) * noise
        return jnp.where(live, x, jnp.sqrt(1.0 - after) * start), None

    return jax.lax.scan(body, x, (jnp.asarray(steps), kept, after))[0]


def reduce_dims(
    values: Float[jax.Array, "*b E"], mask: Bool[jax.Array, "*#b #E"], how: Literal["mean", "sum"]
) -> Float[jax.Array, "*b"]:
    """Over the dims that were executed; 0 where none was."""
    total = jnp.sum(jnp.where(mask, values, 0.0), axis=-1)
    if how == "sum":
        return total
    return total / jnp.maximum(jnp.sum(jnp.broadcast_to(mask, values.shape), axis=-1), 1)


def log_density(
    sample: Float[jax.Array, "*b E"], mean: Float[jax.Array, "*b E"], std: Float[jax.Array, "*#b #E"]
) -> Float[jax.Array, "*b E"]:
    """Of a normal distribution, dim by dim, nats."""
    return -0.5 * jnp.square((sample - mean) / std) - jnp.log(std) - 0.5 * math.log(2 * math.pi)


def divergence(
    mean: Float[jax.Array, "*b E"], other: Float[jax.Array, "*b E"], std: Float[jax.Array, "*#b #E"]
) -> Float[jax.Array, "*b E"]:
    """KL divergence of two normals of equal std, dim by dim, nats."""
    return 0.5 * jnp.square((mean - other) / std)
