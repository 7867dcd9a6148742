"""The heads that read single frames: how far the task is (10 bins, decoded by expectation), and whether it is done.

They share the layers of the Bradley-Terry head and learn beside it, from clips whose outcome is known.
Axes: E members, R frames, O outputs of the network, B frames of a minibatch, C clips.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, softmax

from vla_rlaif.preferences.data import ClipFrames
from vla_rlaif.reward_models.bradley_terry import generator
from vla_rlaif.reward_models.networks import Network

NUM_BINS = 10
CENTERS = torch.linspace(0, 1, NUM_BINS)
SHARE_OF_SUCCESSES = 0.25  # of every minibatch: ends of clips that succeeded, which are few among frames that do not
Head = Literal["return", "progress", "success"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which output of the network is whose. The Bradley-Terry head is always there, and first."""

    heads: tuple[Head, ...] = ("return",)

    @property
    def num_outputs(self) -> int:
        return 1 + NUM_BINS * ("progress" in self.heads) + ("success" in self.heads)

    def bins(self, outputs: Float[Tensor, "*batch O"]) -> Float[Tensor, "*batch bins"]:
        return outputs[..., 1 : 1 + NUM_BINS]

    def progress(self, outputs: Float[Tensor, "*batch O"]) -> Float[Tensor, "*batch"]:
        """The expectation over the bins, in [0, 1]."""
        return softmax(self.bins(outputs), dim=-1) @ CENTERS

    def success(self, outputs: Float[Tensor, "*batch O"]) -> Float[Tensor, "*batch"]:
        """The logit that the task is done."""
        return outputs[..., -1]


def two_hot(progress: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch bins"]:
    """The distribution over the two nearest bins whose expectation is ``progress``."""
    return (1 - (progress[..., None] - CENTERS).abs() * (NUM_BINS - 1)).clamp(min=0)


class FrameFit:
    """Minibatches of frames, and their loss. With ``bootstrap`` off every member sees all clips, in its own order."""

    def __init__(
        self, clips: ClipFrames, layout: Layout, num_members: int, batch: int, noise: float, seed: int
    ) -> None:
        self._layout, self._num_members, self._batch, self._noise = layout, num_members, batch, noise
        self._values = torch.from_numpy(clips.values)
        self._progress = torch.from_numpy(clips.progress.astype(np.float32))
        self._success = torch.from_numpy(clips.success.astype(np.float32))
        self._held = torch.from_numpy(np.flatnonzero(clips.held_out))
        done = ~clips.held_out & (np.nan_to_num(clips.success) > 0.5)
        self._done, self._rest = np.flatnonzero(done), np.flatnonzero(~clips.held_out & ~done)
        self._rng = np.random.default_rng((seed, 2))
        self._generator = generator(seed + 2)

    def loss(self, network: Network, step: int) -> Float[Tensor, ""]:
        """Mean over members and frames, nats: cross-entropies of progress and of success."""
        rows = torch.from_numpy(self._rows())
        x = self._values[rows]
        x = x + self._noise * torch.randn(x.shape, generator=self._generator)
        return self._loss(network(x), rows)

    def held_out_loss(self, network: Network) -> float:
        """Of the members' mean outputs; 0 without held-out frames."""
        if not len(self._held):
            return 0.0
        with torch.no_grad():
            x = self._values[self._held].expand(self._num_members, -1, -1)
            return float(self._loss(network(x), self._held.expand(self._num_members, -1)))

    def _rows(self) -> Int[np.ndarray, "E B"]:
        num_done = round(SHARE_OF_SUCCESSES * self._batch) if len(self._done) else 0
        if not len(self._rest):
            num_done = self._batch
        done = self._rng.choice(self._done, (self._num_members, num_done)) if num_done else None
        rest = self._batch - num_done
        others = self._rng.choice(self._rest, (self._num_members, rest)) if rest else None
        return np.concatenate([part for part in (done, others) if part is not None], axis=1)

    def _loss(self, outputs: Float[Tensor, "E B O"], rows: Int[Tensor, "E B"]) -> Float[Tensor, ""]:
        total = outputs.new_zeros(())
        if "progress" in self._layout.heads:
            target = self._progress[rows]
            known = ~target.isnan()
            entropy = -(two_hot(target.nan_to_num()) * log_softmax(self._layout.bins(outputs), dim=-1)).sum(dim=-1)
            total = total + torch.where(known, entropy, 0.0).sum() / known.sum().clamp(min=1)
        if "success" in self._layout.heads:
            target = self._success[rows]
            known = ~target.isnan()
            entropy = binary_cross_entropy_with_logits(
                self._layout.success(outputs), target.nan_to_num(), reduction="none"
            )
            total = total + torch.where(known, entropy, 0.0).sum() / known.sum().clamp(min=1)
        return total


def share_above(p: Float[np.ndarray, " C"], threshold: float) -> float:
    """NaN without clips or threshold."""
    return float((p > threshold).mean()) if len(p) and not np.isnan(threshold) else float("nan")
