"""The reference on workers of its own: its means are computed beside the learner's work, and the learner's update needs
no second forward pass for the KL.

Axes: see types.py; D numbers of a mean.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.dist.cluster import WorkerGroup
from vla_rlaif.dist.crew import Crew, CrewSettings
from vla_rlaif.dist.workers import ReferenceWorker
from vla_rlaif.types import Observation


class ReferencePool:
    """A ReferenceModel. ``rows`` decisions, as many as a micro-batch has, go to one worker at a time; those of one that
    died go to another."""

    def __init__(self, group: WorkerGroup[ReferenceWorker], settings: CrewSettings, *, rows: int) -> None:
        self._crew = Crew(group, settings, bring_up=_is_built)
        self._rows = rows

    def means(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, "B S D"]:
        total = len(executed)
        parts = len(self._crew.group.handles)
        each = max(1, -(-total // (parts * self._rows))) * self._rows  # whole micro-batches but for the last worker
        works = [_work(obs, trace, executed, slice(first, first + each)) for first in range(0, max(total, 1), each)]
        return np.concatenate(self._crew.all_of(works, "computing the reference"))


def _work(
    obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"], rows: slice
) -> partial[Float[np.ndarray, "b S D"]]:
    part = Observation(
        images={camera: value[rows] for camera, value in obs.images.items()},
        state=obs.state[rows],
        instruction=obs.instruction[rows],
        frame_ok=None if obs.frame_ok is None else obs.frame_ok[rows],
    )
    return partial(
        ReferenceWorker.means, obs=part, trace={k: v[rows] for k, v in trace.items()}, executed=executed[rows]
    )


def _is_built(handle: object) -> None:
    """A new incarnation needs nothing more: the reference never changes."""
