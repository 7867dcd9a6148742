"""A LeRobot policy as a chain of Gaussian steps: what ``policy.py`` samples, and scores again under other parameters.

Axes: R rows (decisions, or decisions x steps), B decisions, H actions of the model's chunk, W action dims of the model,
A of them real.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from lerobot.utils.constants import OBS_LANGUAGE_TOKENS
from torch.utils.checkpoint import checkpoint

from vla_rlaif.policies import flow
from vla_rlaif.policies.lerobot.families import MASK, Batch, Condition, FlowFamily
from vla_rlaif.policies.lerobot.network import Network

FEATURE_WIDTH = 16  # of a projected image token
Gaussian = tuple[torch.Tensor, torch.Tensor]  # mean "R H W", std that broadcasts to it


@runtime_checkable
class Denoiser(Protocol):
    """Knows a LeRobot class; knows nothing of seeds, environments or normalisation."""

    @property
    def num_steps(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int]:
        """H, W of the chain's states."""
        ...

    @property
    def offset(self) -> int:
        """Where in a chunk of H the first action is that may be executed."""
        ...

    def condition(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Everything about the observation that the steps read, computed once a decision; leaves "R ..."."""
        ...

    def step(
        self,
        condition: Condition,
        x: Float[torch.Tensor, "R H W"],
        index: Int[torch.Tensor, " R"],
        noise: Float[torch.Tensor, " R"],
    ) -> Gaussian:
        """The distribution of the next state. ``noise`` multiplies the spread: 1 when learning, 0 is deterministic."""
        ...

    def loss(
        self,
        batch: Batch,
        action: Float[torch.Tensor, "B H W"],
        mask: Bool[torch.Tensor, "B H W"],
        generator: torch.Generator,
        samples: int,
    ) -> Float[torch.Tensor, ""]:
        """LeRobot's loss of normalised demonstrated chunks, over the numbers of ``mask``."""
        ...

    def features(self, batch: Batch) -> Float[torch.Tensor, "R F"]:
        """What the policy makes of its observation, for reward heads."""
        ...


@dataclass(frozen=True, kw_only=True)
class FlowDenoiser:
    """pi0, pi05 and SmolVLA. With a noise head its spread is that of the head (Flow-Noise), else that of Flow-SDE."""

    network: Network
    family: FlowFamily
    num_steps: int
    shape: tuple[int, int]
    noise: float  # of Flow-SDE
    compute: torch.dtype
    checkpointing: bool  # run every pass again in the backward pass instead of keeping its activations
    compiled: bool
    time_law: tuple[float, ...]  # training times: Beta(first, 1) x second + third
    offset: int = 0

    def condition(self, batch: Batch) -> dict[str, torch.Tensor]:
        with autocast(batch, self.compute):
            if not self.checkpointing or not torch.is_grad_enabled():
                return self.family.condition(self.network.policy, batch)
            return _again(self.family.condition, self.network.policy, batch)

    def velocity(
        self, condition: Condition, x: Float[torch.Tensor, "R H W"], time: Float[torch.Tensor, " R"]
    ) -> Float[torch.Tensor, "R H W"]:
        run = _compiled_velocity(self.family) if self.compiled else self.family.velocity
        with autocast(condition, self.compute):
            if not self.checkpointing or not torch.is_grad_enabled():
                return run(self.network.policy, condition, x, time).float()
            return _again(run, self.network.policy, condition, x, time).float()

    def step(
        self,
        condition: Condition,
        x: Float[torch.Tensor, "R H W"],
        index: Int[torch.Tensor, " R"],
        noise: Float[torch.Tensor, " R"],
    ) -> Gaussian:
        sde = flow.SdeSteps.of(self.num_steps, self.noise)
        table = lambda values: torch.tensor(values, dtype=torch.float32, device=x.device)[index]  # noqa: E731
        time, correction, std = table(sde.time), table(sde.correction), table(sde.std)
        velocity, scale = self.velocity(condition, x, time), noise[:, None, None]
        head = self.network.noise
        if head is not None:
            correction = torch.zeros_like(correction)
        mean = flow.step_mean(
            x,
            velocity,
            duration=1 / self.num_steps,
            time=time[:, None, None],
            correction=correction[:, None, None] * scale**2,
        )
        return mean, scale * (std[:, None, None] if head is None else head(x, velocity, time))

    def loss(
        self,
        batch: Batch,
        action: Float[torch.Tensor, "B H W"],
        mask: Bool[torch.Tensor, "B H W"],
        generator: torch.Generator,
        samples: int,
    ) -> Float[torch.Tensor, ""]:
        """Flow matching: one prefix pass, ``samples`` draws of time and noise."""
        num, shape = len(action), (samples * len(action), *action.shape[1:])
        noise = torch.randn(shape, generator=generator, device=generator.device).to(action.device)
        uniform = torch.rand(shape[:1], generator=generator, device=generator.device).to(action.device)
        alpha, scale, offset = self.time_law
        time = uniform ** (1 / alpha) * scale + offset  # Beta(alpha, 1) by inversion
        losses = self.losses(self.condition(batch), action, noise, time, samples)
        losses = losses.reshape(samples, num, *action.shape[1:])
        return torch.where(mask, losses, 0.0).sum() / (samples * mask.sum())

    def losses(
        self,
        condition: Condition,
        action: Float[torch.Tensor, "B H W"],
        noise: Float[torch.Tensor, "R H W"],
        time: Float[torch.Tensor, " R"],
        samples: int,
    ) -> Float[torch.Tensor, "R H W"]:
        """Squared errors of the velocity, R = samples x B."""
        action = action.repeat(samples, 1, 1)
        at = time[:, None, None]
        rows = {name: value.repeat(samples, *[1] * (value.ndim - 1)) for name, value in condition.items()}
        velocity = self.velocity(rows, at * noise + (1 - at) * action, time)
        return torch.square(noise - action - velocity)

    def features(self, batch: Batch) -> Float[torch.Tensor, "R F"]:
        """Of the prefix's last layer: every image token in compact form, and the mean over all tokens."""
        condition = self.condition(batch)
        last = max(int(name.removeprefix("value/")) for name in condition if name.startswith("value/"))
        tokens = condition[f"value/{last}"].transpose(1, 2).flatten(2).float() * condition[MASK][:, :, None]
        num_images = tokens.shape[1] - batch[OBS_LANGUAGE_TOKENS].shape[1] - self.family.tail
        generator = torch.Generator().manual_seed(0)  # part of the definition of the features, not of a run
        width = tokens.shape[2]
        projection = torch.randn(width, FEATURE_WIDTH, generator=generator).to(tokens.device) / width**0.5
        compact = (tokens[:, :num_images] @ projection).flatten(1)
        return torch.cat([compact, tokens.sum(1) / condition[MASK].sum(1, keepdim=True)], dim=1)


def repeat_rows(condition: Condition, times: int) -> dict[str, torch.Tensor]:
    """Every row ``times`` times in a row."""
    return {name: value.repeat_interleave(times, dim=0) for name, value in condition.items()}


@cache
def _compiled_velocity(family: FlowFamily) -> Callable[..., torch.Tensor]:
    return torch.compile(family.velocity)


def _again(run: Callable[..., Any], *args: object) -> Any:
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def autocast(values: Mapping[str, torch.Tensor], compute: torch.dtype) -> torch.autocast:
    device = next(iter(values.values())).device.type
    return torch.autocast(device, compute, enabled=compute != torch.float32)
