"""Preference optimisation of whole trajectories, written once for every array backend (array API only).

Axes: M pairs, T decisions of an episode, B = M * 2 * T decisions flattened, S stochastic sub-steps per decision.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from array_api_compat import array_namespace
from jaxtyping import Float

from vla_rlaif.types import Array, Baseline, Targets


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimisation (https://arxiv.org/abs/2305.18290) with the log-probability of a trajectory, which
    is the sum over its decisions; with pairs that a reward ranks it is GRAPE's trajectory-wise preference optimisation
    (https://arxiv.org/abs/2411.19309).

    Rows come in units of 2 * T: the decisions of the first trajectory of a pair and then those of the second, padded to
    T with rows that are masked. ``targets.logp_old`` is the reference's, and ``targets.advantage`` of a row says how
    the pair was labelled, seen from its trajectory: 1 preferred, -1 not, 0 a tie, and what is between them is soft.
    """

    baseline: ClassVar[Baseline] = "reference"

    beta: float
    num_decisions: int  # T

    def loss(
        self, logp: Float[Array, "B S"], targets: Targets, kl: Float[Array, "B S"] | None = None
    ) -> tuple[Float[Array, ""], Mapping[str, Float[Array, ""]]]:
        """Cross-entropy of the labels, nats, summed over pairs and divided by ``num_valid``, the number of pairs."""
        xp = array_namespace(logp)
        shape = (-1, 2, self.num_decisions)
        mask = targets.mask[:, None]
        log_ratio = xp.where(mask, logp - targets.logp_old, xp.zeros_like(logp))
        of_trajectory = xp.sum(xp.reshape(xp.sum(log_ratio, axis=1), shape), axis=2)  # M 2
        margin = self.beta * (of_trajectory[:, 0] - of_trajectory[:, 1])
        label = xp.reshape(targets.advantage, shape)[:, 0, 0]
        live = xp.astype(xp.any(xp.reshape(targets.mask, (-1, 2 * self.num_decisions)), axis=1), logp.dtype)
        # -(p log sigmoid(m) + (1 - p) log sigmoid(-m)) = log(1 + exp(m)) - p m. Not with |m|: at 0, where every first
        # update of a run is, its gradient is another one in every backend.
        softplus = xp.logaddexp(xp.zeros_like(margin), margin)
        loss = xp.sum(live * (softplus - 0.5 * (1 + label) * margin)) / targets.num_valid

        one = xp.ones_like(xp.sum(live))
        decided = live * xp.astype(label != 0, logp.dtype)
        count = decided / xp.maximum(xp.sum(decided), one)
        is_first = label > 0
        better = xp.where(is_first, of_trajectory[:, 0], of_trajectory[:, 1])
        worse = xp.where(is_first, of_trajectory[:, 1], of_trajectory[:, 0])
        metrics = {
            "pair_accuracy": xp.sum(count * xp.astype(better > worse, logp.dtype)),
            "log_ratio_preferred": xp.sum(count * better),
            "log_ratio_rejected": xp.sum(count * worse),
        }
        if kl is not None:
            rows = xp.astype(mask, logp.dtype) / (xp.maximum(xp.sum(xp.astype(mask, logp.dtype)), one) * logp.shape[1])
            metrics["reference_kl"] = xp.sum(rows * xp.where(mask, kl, xp.zeros_like(kl)))
        return loss, metrics
