"""The success baseline: what GRPO gets when the simulator says whether the task is done."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float

from vla_rlaif.types import Episodes


class SuccessReward:
    """1 for a success, 0 for a failure, NaN for an invalid episode. Privileged: an audited run must not use it."""

    privileged: ClassVar[bool] = True

    @property
    def version(self) -> int:
        return 0

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        return np.where(episodes.valid, episodes.success.astype(np.float32), np.float32(np.nan))
