"""Proximal policy optimisation with a critic, written once for every array backend (array API only).

Axes: N episodes, T decisions, B decisions flattened, S stochastic sub-steps per decision.
Source: https://arxiv.org/abs/1707.06347; advantages https://arxiv.org/abs/1506.02438.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from array_api_compat import array_namespace
from jaxtyping import Bool, Float

from vla_rlaif.grpo import clipped_surrogate
from vla_rlaif.types import Array, Baseline, Targets

KL_BAND, KL_STEP = 1.5, 2.0  # of the adaptive penalty, section 4 of the paper


@dataclass(frozen=True, kw_only=True)
class PPO:
    """Clipped surrogate, clipped value loss, entropy bonus and an adaptive KL penalty.

    The policy and the critic share no parameter, so the joint loss is minimised by minimising its two parts apart:
    ``loss`` by the learner, ``value_coef`` times ``value_loss`` by the critic.
    """

    baseline: ClassVar[Baseline] = "acting"

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0  # at the start; ``adapted`` says how it goes on
    kl_target: float | None = None  # nats per sub-step; None: the coefficient stays
    gamma: float = 1.0  # discount of one decision
    lam: float = 0.95
    value_clip: float | None = 0.2  # reward units
    value_coef: float = 0.5  # c1
    entropy_coef: float = 0.0  # c2

    def loss(
        self, logp: Float[Array, "B S"], targets: Targets, kl: Float[Array, "B S"] | None = None
    ) -> tuple[Float[Array, ""], Mapping[str, Float[Array, ""]]]:
        """The policy's part of the joint loss. ``targets.kl_coef`` takes the place of ``kl_coef``, where there is one.

        The bonus is the entropy's unbiased estimate from the actions that were played: ratio times -log p under the
        weights that acted, whose gradient there is the entropy's. Of a Gaussian with a fixed std that gradient is zero
        but for noise.
        """
        xp = array_namespace(logp)
        kl_coef = self.kl_coef if targets.kl_coef is None else targets.kl_coef
        loss, metrics = clipped_surrogate(
            logp, targets, kl, clip_low=self.clip_low, clip_high=self.clip_high, kl_coef=kl_coef
        )
        mask = targets.mask[:, None]
        zeros = xp.zeros_like(logp)
        old = xp.where(mask, targets.logp_old, zeros)
        rows = xp.astype(mask, logp.dtype)
        count = rows / (xp.maximum(xp.sum(rows), xp.ones_like(xp.sum(rows))) * logp.shape[1])
        metrics = {**metrics, "entropy": -xp.sum(count * xp.where(mask, logp, zeros))}
        if self.entropy_coef:
            ratio = xp.exp(xp.clip(xp.where(mask, logp, zeros) - old, -10.0, 10.0))
            weight = rows / (targets.num_valid * logp.shape[1])
            loss = loss + self.entropy_coef * xp.sum(weight * ratio * old)
        return loss, metrics

    def value_loss(
        self,
        value: Float[Array, " B"],
        value_old: Float[Array, " B"],
        returns: Float[Array, " B"],
        mask: Bool[Array, " B"],
        num_valid: float,
    ) -> Float[Array, ""]:
        """Half the squared error; of the value and the value moved by ``value_clip`` at most, the worse one counts.

        The sum is divided by ``num_valid``, so it adds up over micro-batches. ``value_old`` is what the critic said
        when the advantages were made.
        """
        xp = array_namespace(value)
        error = xp.square(value - returns)
        if self.value_clip is not None:
            held = value_old + xp.clip(value - value_old, -self.value_clip, self.value_clip)
            error = xp.maximum(error, xp.square(held - returns))
        return 0.5 * xp.sum(xp.where(mask, error, xp.zeros_like(error))) / num_valid

    def joint_loss(
        self,
        logp: Float[Array, "B S"],
        targets: Targets,
        value: Float[Array, " B"],
        value_old: Float[Array, " B"],
        returns: Float[Array, " B"],
        kl: Float[Array, "B S"] | None = None,
    ) -> Float[Array, ""]:
        """Equation 9 of the paper, to be minimised, with the KL penalty: policy + c1 value - c2 entropy."""
        assert isinstance(targets.num_valid, float)
        policy, _ = self.loss(logp, targets, kl)
        return policy + self.value_coef * self.value_loss(value, value_old, returns, targets.mask, targets.num_valid)

    def adapted(self, kl_coef: float, measured: float) -> float:
        """The coefficient of the next step. Twice as much where the measured KL was above 1.5 times its target, half as
        much where it was below the target over 1.5.

        The paper measures the KL to the policy before the update; here it is the one that the penalty is on, to the
        start policy, as for language models (https://arxiv.org/abs/1909.08593).
        """
        if self.kl_target is None:
            return kl_coef
        if measured > KL_BAND * self.kl_target:
            return kl_coef * KL_STEP
        return kl_coef / KL_STEP if measured < self.kl_target / KL_BAND else kl_coef


def gae(
    reward: Float[Array, "N T"], value: Float[Array, "N T"], mask: Bool[Array, "N T"], *, gamma: float, lam: float
) -> Float[Array, "N T"]:
    """Generalised advantages; 0 where ``mask`` is False.

    An episode's end has the value 0, the step limit too: that limit is part of the task, the critic is told how much
    time is left, and the reward of an episode is for all of it.
    """
    xp = array_namespace(reward)
    zero = xp.zeros_like(reward[:, 0])
    live = xp.astype(mask, reward.dtype)
    after, advantage, columns = zero, zero, []
    for t in range(reward.shape[1] - 1, -1, -1):
        delta = reward[:, t] + gamma * after - value[:, t]
        advantage = live[:, t] * (delta + gamma * lam * advantage)
        after = live[:, t] * value[:, t]
        columns.append(advantage)
    return xp.stack(columns[::-1], axis=1)


def whitened(advantage: Float[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N T"]:
    """Mean 0 and standard deviation 1 over the decisions of ``mask``, 0 elsewhere; all 0 where they have no spread."""
    xp = array_namespace(advantage)
    live = xp.astype(mask, advantage.dtype)
    count = xp.maximum(xp.sum(live), xp.ones_like(xp.sum(live)))
    centred = live * (advantage - xp.sum(live * advantage) / count)
    std = xp.sqrt(xp.sum(xp.square(centred)) / count)
    return xp.where(std > 1e-8, centred / xp.maximum(std, xp.full_like(std, 1e-8)), xp.zeros_like(centred))
