"""Flow policies as Markov chains: one denoising step as a Gaussian. Pure functions of tensors, of no model.

Time runs from 1 (noise) to 0 (action): x_t = t * noise + (1 - t) * action, and the velocity is noise - action, as in
LeRobot and openpi. A chain of K steps visits the times 1, 1 - 1/K, ..., 1/K.

Axes: K denoising steps, R rows (decisions, or decisions x steps), H actions in a chunk, W action dims of the model.
Sources: Flow-GRPO (https://arxiv.org/abs/2505.05470), pi_RL (https://arxiv.org/abs/2510.25889).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class SdeSteps:
    """The K steps of Flow-SDE at one noise level: the same marginals as the ODE's, with a density.

    The drift gets the score of the marginal besides the velocity, which for x_t = t * noise + (1 - t) * action is
    -(expected noise) / t. At noise 0 this is Euler's method to the last bit.
    """

    time: tuple[float, ...]  # where step k starts
    correction: tuple[float, ...]  # share of the expected noise that step k takes away beyond the velocity
    std: tuple[float, ...]  # of step k

    @classmethod
    def of(cls, num_steps: int, noise: float) -> "SdeSteps":
        """``noise`` scales s_t = noise * sqrt(t / (1 - t)); at t = 1 the 1 - t is that of the next time."""
        duration = 1 / num_steps
        time = tuple(1.0 + step * (-1.0 / num_steps) for step in range(num_steps))
        scale = [noise * math.sqrt(t / max(1 - t, duration)) for t in time]
        return cls(
            time=time,
            correction=tuple(s * s * duration / (2 * t) for s, t in zip(scale, time, strict=True)),
            std=tuple(s * math.sqrt(duration) for s in scale),
        )


def step_mean(
    x: Float[torch.Tensor, "R H W"],
    velocity: Float[torch.Tensor, "R H W"],
    *,
    duration: float,
    time: Float[torch.Tensor, "R 1 1"],
    correction: Float[torch.Tensor, "R 1 1"],
) -> Float[torch.Tensor, "R H W"]:
    """Where one step of ``duration`` leads on average; with ``correction`` 0 it is Euler's step as LeRobot takes it."""
    expected_noise = x + (1 - time) * velocity
    return x - duration * velocity - correction * expected_noise


def log_density(
    sample: Float[torch.Tensor, "*b H W"], mean: Float[torch.Tensor, "*b H W"], std: Float[torch.Tensor, "*#b #H #W"]
) -> Float[torch.Tensor, "*b H W"]:
    """Of each number under N(mean, std), in nats."""
    return -0.5 * torch.square((sample - mean) / std) - torch.log(std) - 0.5 * math.log(2 * math.pi)


def divergence(
    mean: Float[torch.Tensor, "*b H W"],
    std: Float[torch.Tensor, "*#b #H #W"],
    reference_mean: Float[torch.Tensor, "*b H W"],
    reference_std: Float[torch.Tensor, "*#b #H #W"],
) -> Float[torch.Tensor, "*b H W"]:
    """KL(N(mean, std) || N(reference)) of each number, in nats."""
    ratio = std / reference_std
    shift = (mean - reference_mean) / reference_std
    return 0.5 * (torch.square(ratio) + torch.square(shift) - 1) - torch.log(ratio)


def reduce_dims(
    values: Float[torch.Tensor, "*b H W"], mask: Bool[torch.Tensor, "*#b #H #W"], how: Reduction
) -> Float[torch.Tensor, "*b"]:
    """Sum or mean over the numbers that count."""
    total = torch.where(mask, values, 0.0).sum((-2, -1))
    if how == "sum":
        return total
    return total / torch.broadcast_to(mask, values.shape).sum((-2, -1)).clamp(min=1)


def counted(
    executed: Int[torch.Tensor, " B"], *, chunk: int, width: int, dims: int, offset: int = 0
) -> Bool[torch.Tensor, "B chunk width"]:
    """Numbers of a chunk whose density counts: env steps that ran, the first ``dims`` of the model's action dims.

    ``offset`` is where in the chunk the first env step is."""
    step = torch.arange(chunk, device=executed.device) - offset
    steps = (step >= 0) & (step < executed[:, None])
    wanted = torch.arange(width, device=executed.device) < dims
    return steps[:, :, None] & wanted
