"""A reward model on several workers: episodes are judged in shards, in parallel; a fit is made by one for all.

Axes: N episodes, E members, M pairs, K terms, R frames; see preferences/data.py.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.dist.answers import WorkerError, answers, outcomes
from vla_rlaif.dist.cluster import Handle, WorkerGroup, split_rows
from vla_rlaif.dist.crew import Crew, CrewSettings
from vla_rlaif.dist.workers import RewardWorker
from vla_rlaif.preferences.data import ClipFrames, EpisodeFeatures, FitReport, PairData
from vla_rlaif.rollout import take
from vla_rlaif.types import Episodes, Weights


class RewardPool:
    """A RewardModel, a FittableReward if the workers' one is, and a TermScorer if they have terms. It keeps the state
    of the last fit, so that a worker that comes back judges as the others do; a shard of one that died is judged by
    another.

    Shards hold whole groups, so a reward function may compare the members of a group; one that looks at all episodes of
    a step needs a pool of one worker. A reward that raises ends the run: it is the user's.
    """

    def __init__(self, group: WorkerGroup[RewardWorker], settings: CrewSettings) -> None:
        self._crew = Crew(group, settings, bring_up=self._bring_up)
        self._state: Weights | None = None
        self._lock = threading.Lock()  # so that an older state never comes after a newer one
        self._version = answers([group.rank0(RewardWorker.version)], settings.work_s, "saying its version")[0]
        self.heads = answers([group.rank0(RewardWorker.heads)], settings.work_s, "saying its heads")[0]

    @property
    def version(self) -> int:
        return self._version

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        shards = self._shards(episodes)
        works = [partial(RewardWorker.score, episodes=take(episodes, rows)) for rows in shards]
        return _joined(shards, self._crew.all_of(works, "scoring"))

    def term_scores(self, episodes: Episodes, *, features: EpisodeFeatures | None = None) -> Float[np.ndarray, "K N"]:
        shards = self._shards(episodes)
        works = [
            partial(
                RewardWorker.term_scores,
                episodes=take(episodes, rows),
                features=None
                if features is None
                else EpisodeFeatures(values=features.values[rows], live=features.live[rows]),
            )
            for rows in shards
        ]
        found = self._crew.all_of(works, "scoring")
        return _joined(shards, [scores.T for scores in found]).T

    def progress(self, episodes: Episodes) -> Float[np.ndarray, "N F"]:
        """Of every frame; only if "progress" is among its heads."""
        shards = self._shards(episodes)
        works = [partial(RewardWorker.progress, episodes=take(episodes, rows)) for rows in shards]
        return _joined(shards, self._crew.all_of(works, "judging frames"))

    def features(self, episodes: Episodes) -> EpisodeFeatures:
        shards = self._shards(episodes)
        works = [partial(RewardWorker.features, episodes=take(episodes, rows)) for rows in shards]
        found = self._crew.all_of(works, "encoding episodes")
        return EpisodeFeatures(
            values=_joined(shards, [one.values for one in found]), live=_joined(shards, [one.live for one in found])
        )

    def success_of_frames(self, values: Float[np.ndarray, "R D"]) -> Float[np.ndarray, " R"]:
        """Of what is learned; only if "success" is among its heads."""
        return self._by_one(partial(RewardWorker.success_of_frames, values=values), "judging frames")

    def score_features(self, features: EpisodeFeatures) -> Float[np.ndarray, " N"]:
        return self._by_one(partial(RewardWorker.score_features, features=features), "scoring features")

    def member_logits(self, features: EpisodeFeatures) -> Float[np.ndarray, "E N"]:
        return self._by_one(partial(RewardWorker.member_logits, features=features), "scoring features")

    def fit(self, data: PairData, seed: int, clips: ClipFrames | None = None) -> FitReport:
        """By one worker, or after its death by another: equal data and seeds give equal weights."""
        key = f"fit {self._version + 1}, seed {seed}"
        work = partial(RewardWorker.fit, data=data, seed=seed, clips=clips, key=key)
        report, state = self._by_one(work, "fitting the reward")
        self.restore(state)
        return report

    def state(self) -> Weights:
        if self._state is None:
            self._state = self._by_one(RewardWorker.state, "saying the reward's state")
        return self._state

    def restore(self, state: Weights) -> None:
        with self._lock:
            self._state, self._version = state, int(state["version"])
            asked = self._crew.group.all(partial(RewardWorker.restore, state=state))
        for outcome in outcomes(asked, self._crew.settings.work_s, "taking the reward's state"):
            if isinstance(outcome, WorkerError):
                raise outcome  # the dead take it when they come back

    def _shards(self, episodes: Episodes) -> list[Int[np.ndarray, " n"]]:
        """Rows of whole groups, as many groups in one shard as in another."""
        ids, group = np.unique(episodes.starts.group, return_inverse=True)
        parts = split_rows(len(ids), len(self._crew.group.handles))
        return [np.flatnonzero((group >= part.start) & (group < part.stop)) for part in parts]

    def _by_one[T](self, work: Callable[[RewardWorker], T], doing: str) -> T:
        return self._crew.all_of([work], doing)[0]

    def _bring_up(self, handle: Handle[RewardWorker]) -> None:
        with self._lock:
            if self._state is None:
                return
            restored = handle.ask(partial(RewardWorker.restore, state=self._state))
        answers([restored], self._crew.settings.work_s, "taking the reward's state")


def _joined(shards: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts' rows in the order of the whole; ``shards``, row numbers, may differ in length."""
    rows = np.concatenate(shards)
    whole = np.concatenate(parts)
    return whole[np.argsort(rows, kind="stable")]
