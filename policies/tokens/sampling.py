"""How transformers' generate chooses action tokens: among the allowed ids only, with noise of one seed a row.

Axes: see types.py; S tokens, D = 256 bins, V vocabulary.
"""

import numpy as np
import torch
from jaxtyping import Float, Int, UInt32
from torch import Tensor
from transformers import LogitsProcessor


def log_probs(logits: Float[Tensor, "*b D"], temperature: float) -> Float[Tensor, "*b D"]:
    """Over the allowed ids, nats, float32; the other ids are left out, so their probability is 0."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def gumbel_noise(seeds: UInt32[np.ndarray, " N"], num_tokens: int, num_bins: int) -> Float[np.ndarray, "N S D"]:
    """The largest of log-prob + noise is a sample (the Gumbel-max trick). Row i depends on ``seeds[i]`` only."""
    rows = [np.random.default_rng(int(seed)).gumbel(size=(num_tokens, num_bins)) for seed in seeds]
    return np.stack(rows).astype(np.float32)


class Chooser(LogitsProcessor):
    """Leaves one id a row possible, so that a greedy generate takes it, and remembers bins and log-probs."""

    def __init__(self, allowed: Int[Tensor, " D"], temperature: float, noise: Float[Tensor, "N S D"] | None):
        """``noise`` None: the most probable bin."""
        self._allowed, self._temperature, self._noise = allowed, temperature, noise
        self._bins: list[Tensor] = []
        self._logp: list[Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        logp = log_probs(scores[:, self._allowed], self._temperature)
        noisy = logp if self._noise is None else logp + self._noise[:, len(self._bins)]
        bins = noisy.argmax(dim=-1, keepdim=True)
        self._bins.append(bins)
        self._logp.append(logp.gather(1, bins))
        only = torch.full_like(scores, -torch.inf)
        return only.scatter_(1, self._allowed[bins], 0.0)  # pyright: ignore[reportReturnType]

    def result(self) -> tuple[Int[Tensor, "N S"], Float[Tensor, "N S"]]:
        return torch.cat(self._bins, dim=1), torch.cat(self._logp, dim=1)
