"""The oracle baseline: what an algorithm gets when the simulator's dense truth is its reward."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float

from vla_rlaif.types import Episodes


class OracleReward:
    """``Episodes.truth``, progress plus 1 on success; NaN for an invalid episode. Privileged: an audited run must not
    use it."""

    privileged: ClassVar[bool] = True

    @property
    def version(self) -> int:
        return 0

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        return np.where(episodes.valid, episodes.truth.astype(np.float32), np.float32(np.nan))
