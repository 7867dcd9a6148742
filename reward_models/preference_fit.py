"""Fits the ensemble of a preference reward.

Axes: E members, B pairs of a minibatch, K frames read, D features, R frames of clips.
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vla_rlaif.preferences.data import ClipFrames, PairData
from vla_rlaif.reward_models.bradley_terry import bradley_terry_loss, calibrate, generator, to_numpy
from vla_rlaif.reward_models.frame_heads import FrameFit, Layout
from vla_rlaif.reward_models.networks import Network

NUM_OFFSETS = 2**16  # of the noise


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How the heads are trained. The defaults are those of the feasibility run, plus the early stop."""

    num_steps: int = 150  # at most
    batch_size: int = 128  # pairs per member
    lr: float = 1e-3
    weight_decay: float = 1e-2
    noise: float = 0.1  # std of the noise on every standardised feature
    bootstrap: bool = False  # a resample per member: more disagreement, but fewer different pairs for each
    recent_share: float = 0.5  # of every minibatch comes from the newest pairs, so that the model follows the policy
    num_recent: int = 200  # pairs
    eval_every: int = 25  # steps between looks at the held-out pairs
    patience: int = 3  # looks without an improvement before it stops
    min_held_out: int = 30  # decided held-out pairs below which there is no early stop: too few to choose by
    frame_batch: int = 256  # frames per member, for the heads "progress" and "success"
    mistakes: float = 0.0  # share of the labels of pairs that is taken to be wrong

    def __post_init__(self) -> None:
        if not 0 <= self.mistakes < 0.5:
            raise ValueError(f"mistakes is the share of wrong labels, in [0, 0.5), got {self.mistakes}.")
        if not 0 <= self.recent_share <= 1:
            raise ValueError(f"recent_share is a share of a minibatch in [0, 1], got {self.recent_share}.")
        if min(self.num_steps, self.batch_size, self.num_recent, self.eval_every, self.patience) < 1:
            raise ValueError(
                f"num_steps, batch_size, num_recent, eval_every and patience must be positive, got {self}."
            )


def returns(network: Network, x: Float[Tensor, "E N K D"], live: Bool[Tensor, "E N K"]) -> Float[Tensor, "E N"]:
    """Each member's sum over the live frames of its Bradley-Terry head."""
    rewards = network(x.flatten(1, 2))[..., 0].reshape(live.shape)
    return torch.where(live, rewards, 0.0).sum(dim=-1)


def fit_network(
    network: Network,
    x: Float[Tensor, "N K D"],
    live: Bool[Tensor, "N K"],
    data: PairData,
    config: FitConfig,
    seed: int,
    *,
    layout: Layout,
    clips: ClipFrames | None,
    stop_on_frames: bool,
) -> int:
    """Train in place; returns the number of steps up to the weights that were kept. ``live`` are the frames that the
    Bradley-Terry head sums over; ``clips`` (scaled like ``x``) are for the other heads of ``layout``.

    With enough held-out pairs the weights of the best look at them are kept. A look is the cross-entropy after
    calibration, because the temperature repairs overconfidence and only the order is worth stopping for. With
    ``stop_on_frames`` the loss of the other heads on held-out frames is added to it: they learn longer, and where they
    are not what episodes are scored by, the Bradley-Terry head would be overfitted meanwhile.
    """
    num_members = network.num_members
    frames = None if clips is None else FrameFit(clips, layout, num_members, config.frame_batch, config.noise, seed)
    batches = _minibatches(np.flatnonzero(~data.held_out), num_members, config, seed)
    pairs, target = torch.from_numpy(data.pairs), torch.from_numpy(data.target.astype(np.float32))
    held = np.flatnonzero(data.held_out)
    stops_early = int((data.target[held] != 0.5).sum()) >= config.min_held_out
    optimiser = torch.optim.AdamW(network.parameters(), lr=config.lr, weight_decay=config.weight_decay, foreach=True)
    # Normal draws would take a third of the fit, so every step reads the same ones from another offset.
    num_noise = num_members * 2 * config.batch_size * x[0].numel()
    noise = torch.randn(num_noise + NUM_OFFSETS, generator=generator(seed + 1)).mul_(config.noise)
    offsets = np.random.default_rng(seed + 1).integers(0, NUM_OFFSETS, config.num_steps)
    best, best_step, best_weights = float("inf"), config.num_steps, None
    for step in range(config.num_steps):
        chosen = torch.from_numpy(batches[step])  # E B
        rows = pairs[chosen].flatten(1)  # E 2B, first and second in turn
        noisy = x[rows]
        noisy.add_(noise[offsets[step] :][: noisy.numel()].view_as(noisy))
        first, second = returns(network, noisy, live[rows]).unflatten(1, (-1, 2)).unbind(-1)
        loss = bradley_terry_loss(first, second, target[chosen], mistakes=config.mistakes) * num_members  # a mean each
        if frames is not None:
            loss = loss + frames.loss(network, step) * num_members
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        if stops_early and (step + 1) % config.eval_every == 0:
            value = _held_out_loss(network, x, live, data, held)
            if frames is not None and stop_on_frames:
                value += frames.held_out_loss(network)
            if value < best:
                best, best_step, best_weights = value, step + 1, copy.deepcopy(network.state_dict())
            elif step + 1 - best_step >= config.patience * config.eval_every:
                break
    if best_weights is not None:
        network.load_state_dict(best_weights)
    return best_step


def _minibatches(
    train: Int[np.ndarray, " M"], num_members: int, config: FitConfig, seed: int
) -> Int[np.ndarray, "steps E B"]:
    """Indices of the pairs of every step. Each resample stays sorted by age, so its tail is its newest pairs."""
    rng = np.random.default_rng(seed)
    num = len(train)
    order = np.arange(num)
    own = [np.sort(rng.integers(0, num, num)) if config.bootstrap else order for _ in range(num_members)]
    num_new = round(config.recent_share * config.batch_size)
    low = np.zeros(config.batch_size, np.int64)
    low[config.batch_size - num_new :] = max(0, num - config.num_recent)
    draws = rng.integers(low, num, size=(config.num_steps, num_members, config.batch_size))
    return train[np.stack([own[member][draws[:, member]] for member in range(num_members)], axis=1)]


def _held_out_loss(
    network: Network, x: Float[Tensor, "N K D"], live: Bool[Tensor, "N K"], data: PairData, held: Int[np.ndarray, " M"]
) -> float:
    episodes, index = np.unique(data.pairs[held], return_inverse=True)
    first, second = index.reshape(-1, 2).T
    num_members = network.num_members
    with torch.no_grad():
        value = returns(
            network, x[episodes].expand(num_members, -1, -1, -1), live[episodes].expand(num_members, -1, -1)
        )
    score = to_numpy(value)
    return calibrate(score[:, first] - score[:, second], data.target[held])[1]
