"""The reference's means of a JAX policy, outside the learner: the start policy, which nothing changes.

Axes: see types.py; D numbers of a mean. Same calls as JaxLearner's, in micro-batches of the same number of rows.
"""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.config import LearnerConfig
from vla_rlaif.devices import Placement
from vla_rlaif.jax_learner import JaxPolicy
from vla_rlaif.learning import padded_rows
from vla_rlaif.types import Observation


class JaxReference:
    """Holds all parameters once, and no optimiser."""

    def __init__(self, policy: JaxPolicy, config: LearnerConfig):
        self._policy, self._placement = policy, Placement.of(None)
        self._rows = config.minibatch // config.micro_batches
        self._params = jax.device_put(dict(policy.params), self._placement.replicated)
        frozen = set(policy.params) - policy.trainable

        @jax.jit
        def means(params, inputs):
            # The barrier around the same part as in JaxLearner, so that both round alike.
            x = jax.lax.optimization_barrier(dict(policy.prepare({k: params[k] for k in frozen}, inputs)))
            return policy.means(params, x)

        self._means = means

    def means(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, "B S D"]:
        if not len(executed):
            return np.zeros((0, 0, 0), np.float32)
        inputs = self._policy.inputs(obs, trace, executed)
        found = []
        for index, num in padded_rows(len(executed), self._rows):
            rows = jax.device_put({k: v[index] for k, v in inputs.items()}, self._placement.rows)
            found.append(np.asarray(self._means(self._params, rows))[:num])
        return np.concatenate(found)
