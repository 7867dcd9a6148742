"""What a person who watches a robot could see of its episodes: everything but what only a simulator knows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from vla_rlaif.types import Episodes


@dataclass(frozen=True, kw_only=True)
class SeenEpisodes:
    """``types.Episodes`` without success, truth, start seeds and the policy's own numbers. The fields that are here
    mean the same; one that is not is an AttributeError."""

    images: Mapping[str, UInt8[np.ndarray, "N F height width 3"]]
    state: Float[np.ndarray, "N F P"]
    instruction: tuple[str, ...]  # N
    action: Float[np.ndarray, "N T H A"]
    mask: Bool[np.ndarray, "N T"]
    executed: Int[np.ndarray, "N T"]
    valid: Bool[np.ndarray, " N"]
    group: Int[np.ndarray, " N"]  # those of equal number have the same start state

    @property
    def num_decisions(self) -> Int[np.ndarray, " N"]:
        return self.mask.sum(axis=1)


def seen(episodes: Episodes) -> SeenEpisodes:
    e = episodes
    return SeenEpisodes(
        images=e.images,
        state=e.state,
        instruction=e.instruction,
        action=e.action,
        mask=e.mask,
        executed=e.executed,
        valid=e.valid,
        group=e.starts.group,
    )
