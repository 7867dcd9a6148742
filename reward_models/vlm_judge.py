"""A vision-language model's rating of each episode as its reward, without anything learned in between."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float

from vla_rlaif.preferences.rubric import Rater
from vla_rlaif.types import Episodes


class VLMJudgeReward:
    """The expected rating on a rubric of 1 to 5, as (s - 1) / 4 in [0, 1]. NaN for an invalid episode or answer.

    It sees frames and the instruction only. Every episode is a question to the model, so a run asks as many as it
    plays; what was asked before comes from the cache.
    """

    privileged: ClassVar[bool] = False

    def __init__(self, rater: Rater) -> None:
        self.rater = rater

    @property
    def version(self) -> int:
        return 0

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        return self.rater.scores(episodes).astype(np.float32)
