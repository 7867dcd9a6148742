"""Filtered behaviour cloning, written once for every array backend (array API only in `loss`).

Axes: N episodes, B decisions flattened, S stochastic sub-steps per decision.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from array_api_compat import array_namespace
from jaxtyping import Float

from vla_rlaif.types import Array, Baseline, Targets

LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True, kw_only=True)
class FilteredBC:
    """Imitate the best of the policy's own episodes: %BC of https://arxiv.org/abs/2106.01345, step by step.

    What is imitated is all that the policy drew, for a denoising policy its whole chain and not only the action: its
    likelihood is known, and it is the same for every kind of policy.
    """

    baseline: ClassVar[Baseline] = "acting"

    share: float = 0.25  # of the scorable episodes of a step
    threshold: float | None = None  # reward below which nothing is imitated
    kl_coef: float = 0.0

    def kept(self, reward: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """1 for the best ``share`` of the scorable episodes that reach the threshold, 0 for the others. At least one of
        those that reach it is kept; of equals the first."""
        scorable = np.isfinite(reward)
        num = max(1, round(self.share * int(scorable.sum())))
        best = np.argsort(np.where(scorable, -reward, np.inf), kind="stable")[:num]
        kept = np.zeros(len(reward))
        kept[best] = scorable[best] if self.threshold is None else reward[best] >= self.threshold
        return kept

    def loss(
        self, logp: Float[Array, "B S"], targets: Targets, kl: Float[Array, "B S"] | None = None
    ) -> tuple[Float[Array, ""], Mapping[str, Float[Array, ""]]]:
        """Negative log-likelihood, nats per sub-step, weighted by the advantage; a sum divided by ``num_valid * S``."""
        xp = array_namespace(logp)
        mask = targets.mask[:, None]
        weight = xp.astype(mask, logp.dtype) / (targets.num_valid * logp.shape[1])
        zeros = xp.zeros_like(logp)
        logp = xp.where(mask, logp, zeros)
        loss = -xp.sum(weight * targets.advantage[:, None] * logp)
        rows = xp.astype(mask, logp.dtype)
        count = rows / (xp.maximum(xp.sum(rows), xp.ones_like(xp.sum(rows))) * logp.shape[1])
        log_ratio = xp.clip(logp - xp.where(mask, targets.logp_old, zeros), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = xp.exp(log_ratio)
        metrics = {
            "policy_kl": xp.sum(count * (ratio - 1 - log_ratio)),
            "ratio_error": xp.max(xp.abs(ratio - 1)),
        }
        if kl is not None:
            kl = xp.where(mask, kl, zeros)
            metrics["reference_kl"] = xp.sum(count * kl)
            loss = loss + self.kl_coef * xp.sum(weight * kl)
        return loss, metrics
