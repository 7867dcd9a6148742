"""The reference's means of a torch policy, outside the learner: the start policy, which nothing changes.

Axes: see types.py; D numbers of a mean. Same calls as TorchLearner's, in micro-batches of the same number of rows.
"""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Int

from vla_rlaif.config import LearnerConfig
from vla_rlaif.learning import padded_rows
from vla_rlaif.torch_learner import TorchPolicy
from vla_rlaif.torch_parallel import Rank
from vla_rlaif.torch_training import on_device
from vla_rlaif.types import Observation


class TorchReference:
    """Uses the policy's module as it is, on the current GPU if there is one."""

    def __init__(self, policy: TorchPolicy, config: LearnerConfig):
        self._policy, self._device = policy, Rank.alone().device
        self._rows = config.minibatch // config.micro_batches
        policy.module.to(self._device).requires_grad_(False)

    @torch.no_grad()
    def means(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, "B S D"]:
        if not len(executed):
            return np.zeros((0, 0, 0), np.float32)
        inputs = self._policy.inputs(obs, trace, executed)
        found = []
        for index, num in padded_rows(len(executed), self._rows):
            x = self._policy.prepare(on_device({k: v[index] for k, v in inputs.items()}, self._device))
            found.append(self._policy.means(x)[:num].float().cpu().numpy())
        return np.concatenate(found)
