"""Group-relative policy optimisation, written once for every array backend (array API only in `loss`).

Axes: N episodes, B decisions (flattened episodes x time), S stochastic sub-steps per decision.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from array_api_compat import array_namespace
from jaxtyping import Bool, Float, Int

from vla_rlaif.types import Array, Baseline, Targets

LOG_RATIO_LIMIT = 10.0  # exp(10) is far outside any clip range; beyond it only overflow waits


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Clipped surrogate with group-relative advantages (https://arxiv.org/abs/2402.03300)."""

    baseline: ClassVar[Baseline] = "acting"

    group_size: int
    clip_low: float = 0.2
    clip_high: float = 0.2  # > clip_low is DAPO's clip-higher
    kl_coef: float = 0.0
    scale_by_std: bool = True  # False is Dr. GRPO
    std_floor: float = 1e-2  # reward units: a group with less spread is dead (its differences are noise)
    min_valid_share: float = 0.5

    def advantages(
        self, reward: Float[np.ndarray, " N"], group: Int[np.ndarray, " N"]
    ) -> tuple[Float[np.ndarray, " N"], Mapping[str, float]]:
        """Centre (and scale) each reward within its group, found by id and not by row.

        NaN is an unscorable member: it votes in no mean or std and its advantage is 0. A group with too few scorable
        members, or without spread, is dead: all its advantages are exactly 0.

        Raises:
            ValueError: a group does not have ``group_size`` members.
        """
        ids, row, size = np.unique(group, return_inverse=True, return_counts=True)
        if (size != self.group_size).any():
            wrong = ids[size != self.group_size][0]
            raise ValueError(
                f"group {wrong} has {size[ids == wrong][0]} members, wanted {self.group_size}; "
                f"{len(reward)} episodes do not split into groups of {self.group_size}."
            )
        valid = np.isfinite(reward)
        count = np.bincount(row, valid, len(ids))
        enough = (count >= self.min_valid_share * self.group_size) & (count >= 2)
        value = np.where(valid, reward, 0.0)
        mean = np.bincount(row, value, len(ids)) / np.maximum(count, 1)
        centred = np.where(valid, value - mean[row], 0.0)
        std = np.sqrt(np.bincount(row, centred**2, len(ids)) / np.maximum(count, 1))
        live = enough & (std > self.std_floor)
        scale = np.where(live, std, 1.0) if self.scale_by_std else np.ones_like(std)
        stats = {
            "groups/total": float(len(ids)),
            "groups/live": float(live.sum()),
            "groups/zero_spread": float((enough & ~live).sum()),
            "groups/too_few_valid": float((~enough).sum()),
            "reward/std_in_group": float(std[enough].mean()) if enough.any() else float("nan"),
        }
        return np.where(live[row], centred / scale[row], 0.0), stats

    def loss(
        self, logp: Float[Array, "B S"], targets: Targets, kl: Float[Array, "B S"] | None = None
    ) -> tuple[Float[Array, ""], Mapping[str, Float[Array, ""]]]:
        """Loss to minimise and metrics; see ``clipped_surrogate``."""
        return clipped_surrogate(
            logp, targets, kl, clip_low=self.clip_low, clip_high=self.clip_high, kl_coef=self.kl_coef
        )


def clipped_surrogate(
    logp: Float[Array, "B S"],
    targets: Targets,
    kl: Float[Array, "B S"] | None,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float | Float[Array, ""],
) -> tuple[Float[Array, ""], Mapping[str, Float[Array, ""]]]:
    """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347) with a KL penalty, to minimise, and metrics: all sums
    over B divided by ``num_valid * S``, so they add up over shards.

    ``kl`` is the closed-form divergence to the reference of each sub-step, where the head has one.
    """
    xp = array_namespace(logp)
    mask = targets.mask[:, None]
    weight = xp.astype(mask, logp.dtype) / (targets.num_valid * logp.shape[1])
    acted = weight if targets.importance is None else weight * targets.importance
    advantage = targets.advantage[:, None]

    # Mask before exp: 0 * inf is nan, and nan gradients from padding would poison the step.
    log_ratio = xp.where(mask, logp - targets.logp_old, xp.zeros_like(logp))
    log_ratio = xp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = xp.exp(log_ratio)
    # min(r*A, clip(r)*A) only ever binds on the side the advantage pushes towards.
    up, down = xp.full_like(advantage, 1 + clip_high), xp.full_like(advantage, 1 - clip_low)
    bound = xp.where(advantage > 0, up, down)
    loss = -xp.sum(acted * xp.minimum(ratio * advantage, bound * advantage))
    rows = xp.astype(mask, logp.dtype)
    count = rows / (xp.maximum(xp.sum(rows), xp.ones_like(xp.sum(rows))) * logp.shape[1])
    metrics = {
        "policy_kl": xp.sum(count * (ratio - 1 - log_ratio)),  # k3, http://joschu.net/blog/kl-approx.html
        "clip_fraction": xp.sum(count * xp.astype(ratio * advantage > bound * advantage, logp.dtype)),
        "ratio_error": xp.max(xp.abs(ratio - 1)),
    }
    if targets.importance is not None:
        metrics["importance"] = xp.sum(count * targets.importance)
    if kl is not None:
        kl = xp.where(mask, kl, xp.zeros_like(kl))
        metrics["reference_kl"] = xp.sum(count * kl)
        loss = loss + kl_coef * xp.sum(weight * kl)
    return loss, metrics


def importance_weights(
    logp_old: Float[Array, "*b S"], logp_acted: Float[Array, "*b S"], *, cap: float
) -> Float[Array, "*b S"]:
    """What corrects the surrogate for decisions of older weights (decoupled PPO, https://arxiv.org/abs/2505.24298):
    the ratio of the proximal to the behaviour policy, truncated at ``cap``. NaN in ``logp_acted`` is a ratio of 1."""
    xp = array_namespace(logp_old)
    known = ~xp.isnan(logp_acted)
    log_ratio = xp.where(known, logp_old - logp_acted, xp.zeros_like(logp_old))
    return xp.clip(xp.exp(xp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), 0.0, cap)


def num_valid(
    normalizer: str,
    advantage: Float[np.ndarray, " N"],
    mask: Bool[np.ndarray, "N T"],
) -> float:
    """What the loss of one step is divided by. Episodes without an advantage (dead groups, unscorable members, a member
    exactly on its group's mean) are in no denominator, as they are in no batch.

    constant: live episodes x T, so that a long failure does not outweigh a short success (Dr. GRPO's argument).
    decisions: live decisions, the mean over decisions.
    """
    live = advantage != 0
    return float(live.sum() * mask.shape[1] if normalizer == "constant" else mask[live].sum())
