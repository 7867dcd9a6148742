"""ACT and diffusion policy as chains of Gaussian steps, the seam of ``denoisers.py``.

Axes: R rows, B decisions, H actions of the model's chunk, W = A action dims, K denoising steps.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from vla_rlaif.policies.lerobot.denoisers import Gaussian, autocast
from vla_rlaif.policies.lerobot.families import Batch, Condition
from vla_rlaif.policies.lerobot.network import Network

CHUNK, OBSERVED = "chunk", "observed"


@dataclass(frozen=True, kw_only=True)
class ActDenoiser:
    """One step: the chunk that ACT predicts, and noise of one spread around it. Without its VAE and its dropout, which
    LeRobot has in training only."""

    network: Network
    shape: tuple[int, int]
    std: float
    compute: torch.dtype
    num_steps: int = 1
    offset: int = 0

    def condition(self, batch: Batch) -> dict[str, torch.Tensor]:
        policy = self.network.policy
        images = [batch[key] for key in policy.config.image_features]
        with autocast(batch, self.compute):
            return {CHUNK: policy.model({**batch, OBS_IMAGES: images})[0].float()}

    def step(
        self,
        condition: Condition,
        x: Float[torch.Tensor, "R H W"],
        index: Int[torch.Tensor, " R"],
        noise: Float[torch.Tensor, " R"],
    ) -> Gaussian:
        return condition[CHUNK], (noise * self.std)[:, None, None]

    def loss(
        self,
        batch: Batch,
        action: Float[torch.Tensor, "B H W"],
        mask: Bool[torch.Tensor, "B H W"],
        generator: torch.Generator,
        samples: int,
    ) -> Float[torch.Tensor, ""]:
        """Mean absolute error. It needs no samples."""
        with autocast(batch, self.compute):
            padded = ~mask[:, :, 0]
            return self.network.policy({**batch, ACTION: action, "action_is_pad": padded})[0].float()

    def features(self, batch: Batch) -> Float[torch.Tensor, "R F"]:
        raise ValueError("ACT has no features for a reward head; use reward.encoder pretrained or cnn.")


@dataclass(frozen=True, kw_only=True)
class DiffusionDenoiser:
    """The posterior of every denoising step. Without noise it is DDIM (https://arxiv.org/abs/2010.02502), with all of
    it DDPM; its spread is at least ``std_floor`` then (https://arxiv.org/abs/2409.00588)."""

    network: Network
    shape: tuple[int, int]
    num_steps: int
    offset: int  # where in the chunk the action after the newest frame is
    std_floor: float
    compute: torch.dtype

    def condition(self, batch: Batch) -> dict[str, torch.Tensor]:
        policy = self.network.policy
        frames = _windowed(batch)
        images = torch.stack([frames[key] for key in policy.config.image_features], dim=-4)
        with autocast(batch, self.compute):  # upstream has no public name for it
            return {OBSERVED: policy.diffusion._prepare_global_conditioning({**frames, OBS_IMAGES: images}).float()}

    def step(
        self,
        condition: Condition,
        x: Float[torch.Tensor, "R H W"],
        index: Int[torch.Tensor, " R"],
        noise: Float[torch.Tensor, " R"],
    ) -> Gaussian:
        diffusion = self.network.policy.diffusion
        scheduler = diffusion.noise_scheduler
        scheduler.set_timesteps(self.num_steps)
        time = scheduler.timesteps.to(x.device)[index]
        with autocast(condition, self.compute):
            output = diffusion.unet(x, time, global_cond=condition[OBSERVED]).float()
        kept = scheduler.alphas_cumprod.to(x.device)
        before = time - scheduler.config.num_train_timesteps // self.num_steps
        now = kept[time][:, None, None]
        after = torch.where(before >= 0, kept[before.clamp(min=0)], 1.0)[:, None, None]
        is_noise = scheduler.config.prediction_type == "epsilon"
        clean = (x - (1 - now).sqrt() * output) / now.sqrt() if is_noise else output
        expected_noise = output if is_noise else (x - now.sqrt() * clean) / (1 - now).sqrt()
        if scheduler.config.clip_sample:
            clean = clean.clamp(-scheduler.config.clip_sample_range, scheduler.config.clip_sample_range)
        posterior = ((1 - after) / (1 - now) * (1 - now / after)).clamp(min=0).sqrt()
        scale = noise[:, None, None]
        mean = after.sqrt() * clean + (1 - after - (scale * posterior) ** 2).clamp(min=0).sqrt() * expected_noise
        return mean, scale * posterior.clamp(min=self.std_floor)

    def loss(
        self,
        batch: Batch,
        action: Float[torch.Tensor, "B H W"],
        mask: Bool[torch.Tensor, "B H W"],
        generator: torch.Generator,
        samples: int,
    ) -> Float[torch.Tensor, ""]:
        """Squared errors of what the network predicts, ``samples`` draws of time and noise for each frame."""
        diffusion = self.network.policy.diffusion
        scheduler = diffusion.noise_scheduler
        shape = (samples * len(action), *action.shape[1:])
        noise = torch.randn(shape, generator=generator, device=generator.device).to(action.device)
        high = scheduler.config.num_train_timesteps
        time = torch.randint(0, high, shape[:1], generator=generator, device=generator.device).to(action.device)
        clean, observed = action.repeat(samples, 1, 1), self.condition(batch)[OBSERVED].repeat(samples, 1)
        with autocast(batch, self.compute):
            output = diffusion.unet(scheduler.add_noise(clean, noise, time), time, global_cond=observed).float()
        target = noise if scheduler.config.prediction_type == "epsilon" else clean
        errors = torch.square(output - target).unflatten(0, (samples, len(action)))
        return torch.where(mask, errors, 0.0).sum() / (samples * mask.sum())

    def features(self, batch: Batch) -> Float[torch.Tensor, "R F"]:
        return self.condition(batch)[OBSERVED]


def _windowed(batch: Batch) -> dict[str, torch.Tensor]:
    """With the axis of frames that the model wants, also where it sees one only."""
    if batch[OBS_STATE].ndim == 3:
        return dict(batch)
    return {name: value[:, None] for name, value in batch.items()}
