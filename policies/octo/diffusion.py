"""Octo's diffusion head: noise schedule, noise predictor, imitation loss, and the sampler seen as Gaussian steps.

A denoising step s takes x_{s+1} to y_s ~ N(mu_s(x_{s+1}), sigma_s^2), and x_s = clip(y_s). The clip belongs to the
transition, so the density of the pre-clip y_s is an exact Gaussian: that is what reinforcement learning needs.
Source: octo-models/octo DiffusionActionHead; DPPO (https://arxiv.org/abs/2409.00588) for the floor of the std.
Axes: E = H * A numbers of a chunk, K denoising steps, S those with a density that are trained. Actions are normalised.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

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
    """Learned frequencies of the denoising step."""

    width: int

    @nn.compact
    def __call__(self, step: Num[jax.Array, "*b 1"]) -> Float[jax.Array, "*b F"]:
        kernel = self.param("kernel", nn.initializers.normal(0.2), (self.width // 2, 1))
        angle = 2 * jnp.pi * step.astype(kernel.dtype) @ kernel.T
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


class TimeMlp(nn.Module):
    """Dense, swish, Dense."""

    width: int

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b F"]) -> Float[jax.Array, "*b F"]:
        hidden = nn.swish(nn.Dense(2 * self.width, kernel_init=XAVIER, name="Dense_0")(x))
        return nn.Dense(self.width, kernel_init=XAVIER, name="Dense_1")(hidden)


class ResidualBlock(nn.Module):
    """LayerNorm and a four times wider swish layer, around a residual."""

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b D"]:
        width = x.shape[-1]
        hidden = nn.Dense(4 * width, name="Dense_0")(nn.LayerNorm(epsilon=1e-6, name="LayerNorm_0")(x))
        return x + nn.Dense(width, name="Dense_1")(nn.swish(hidden))


class ReverseNetwork(nn.Module):
    """The residual MLP that predicts the noise."""

    hidden: int
    num_blocks: int
    out: int

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*b D"]) -> Float[jax.Array, "*b E"]:
        x = nn.Dense(self.hidden, kernel_init=XAVIER, name="Dense_0")(x)
        for i in range(self.num_blocks):
            x = ResidualBlock(name=f"MLPResNetBlock_{i}")(x)
        return nn.Dense(self.out, kernel_init=XAVIER, name="Dense_1")(nn.swish(x))


class DiffusionModel(nn.Module):
    """Noise in ``x``, given the readout and the denoising step."""

    width: int  # E
    hidden: int
    num_blocks: int
    time_dim: int

    @nn.compact
    def __call__(
        self, readout: Float[jax.Array, "*#b D"], x: Float[jax.Array, "*b E"], step: Num[jax.Array, "*#b"]
    ) -> Float[jax.Array, "*b E"]:
        time = FourierFeatures(self.time_dim, name="time_preprocess")(step[..., None])
        time = TimeMlp(self.time_dim, name="cond_encoder")(time)
        lead = x.shape[:-1]
        parts = [jnp.broadcast_to(part, (*lead, part.shape[-1])) for part in (time, readout)]
        network = ReverseNetwork(self.hidden, self.num_blocks, self.width, name="reverse_network")
        return network(jnp.concatenate([*parts, x], axis=-1))


class DiffusionHead(nn.Module):
    """Holds the predictor one level down, where upstream's checkpoints have it."""

    width: int
    hidden: int
    num_blocks: int
    time_dim: int

    @nn.compact
    def __call__(
        self, readout: Float[jax.Array, "*#b D"], x: Float[jax.Array, "*b E"], step: Num[jax.Array, "*#b"]
    ) -> Float[jax.Array, "*b E"]:
        model = DiffusionModel(self.width, self.hidden, self.num_blocks, self.time_dim, name="diffusion_model")
        return model(readout, x, step)


def masked_mse(
    predicted: Float[jax.Array, "*b E"], noise: Float[jax.Array, "*b E"], mask: Bool[jax.Array, "*#b #E"]
) -> Float[jax.Array, ""]:
    """Upstream's masked mean of the squared error (times A outside)."""
    mask = jnp.broadcast_to(mask, predicted.shape)
    return jnp.mean(jnp.square(predicted - noise) * mask) / jnp.maximum(jnp.mean(mask), 1e-5)


def denoise(
    predict: Predictor,
    schedule: Schedule,
    x: Float[jax.Array, "N E"],
    noise: Float[jax.Array, "K2 N E"],
    steps: Int[np.ndarray, " K2"],
    stds: Float[jax.Array, " K2"],
    limit: float,
) -> tuple[Float[jax.Array, "N E"], Float[jax.Array, "K2 N E"], Float[jax.Array, "K2 N E"]]:
    """Run ``steps``, given in acting order: final state, pre-clip samples and the means they came from."""

    def body(x: jax.Array, at: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        step, z, std = at
        step = jnp.broadcast_to(step, x.shape[:-1])
        mean = schedule.mean(x, predict(x, step), step)
        sample = mean + std * z
        return jnp.clip(sample, -limit, limit), (sample, mean)

    final, (samples, means) = jax.lax.scan(body, x, (jnp.asarray(steps), noise, stds))
    return final, samples, means


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
