"""What a rollout, a reward and a reference worker do. Plain classes: they know no Ray, no learner and not each other.

Axes: see types.py; D numbers of a mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.composite import Terms
from vla_rlaif.dist.manifest import Layout
from vla_rlaif.dist.once import Once
from vla_rlaif.dist.staging import Receiver
from vla_rlaif.interfaces import FrameReward, Policy, ReferenceModel, RewardModel, VectorEnv
from vla_rlaif.preferences.data import ClipFrames, EpisodeFeatures, FitReport, PairData
from vla_rlaif.preferences.refresh import FittableReward
from vla_rlaif.reward_judged import EndJudge
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.types import EnvSpec, Episodes, Observation, Starts, Weights


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """What a rollout worker plays on."""

    spec: EnvSpec
    num_envs: int
    window: int  # of the policy
    timed: tuple[str, ...]  # parts of the env
    watched: tuple[str, ...]  # kinds of faults of the env


@dataclass(frozen=True, kw_only=True)
class PlayedPart:
    """What one worker has played, and how its time was spent meanwhile."""

    worker: str
    episodes: Episodes
    seconds: Mapping[str, float]  # wall, by part of the env
    faults: Mapping[str, int]  # of parts of the env, by kind
    diagnostics: Mapping[str, float]  # of the policy


class RolloutWorker:
    """Plays episodes with the weights that it holds. New ones take effect between two calls of ``play``."""

    def __init__(
        self, name: str, policy: Policy, env: VectorEnv, *, act_batch: int | None, layout: Layout | None = None
    ) -> None:
        """``layout``: of the policy's weights; those of another model are then refused before they are sent."""
        self._name, self._policy = name, policy
        self._rollouts = LocalRollouts(policy, env, act_batch=act_batch)
        self.receiver = Receiver(policy.load, expected=layout)

    def spec(self) -> RolloutSpec:
        return RolloutSpec(
            spec=self._rollouts.spec,
            num_envs=self._rollouts.num_envs,
            window=self._rollouts.window,
            timed=tuple(self._rollouts.seconds),
            watched=tuple(self._rollouts.faults),
        )

    def play(self, starts: Starts, *, seed: int, noise_scale: float) -> PlayedPart:
        self.receiver.adopt()
        seconds, faults = dict(self._rollouts.seconds), dict(self._rollouts.faults)
        episodes = self._rollouts.play(starts, seed=seed, noise_scale=noise_scale).episodes
        assert episodes is not None, "nothing is lost in one process"
        return PlayedPart(
            worker=self._name,
            episodes=episodes,
            seconds={part: s - seconds[part] for part, s in self._rollouts.seconds.items()},
            faults={kind: n - faults[kind] for kind, n in self._rollouts.faults.items()},
            diagnostics=self._rollouts.diagnostics(),
        )

    def load(self, weights: Weights, version: int) -> None:
        """Act with these, which no learner has sent."""
        self.receiver.adopt()
        self._policy.load(weights, version)


class RewardWorker:
    """Judges episodes. Scoring is pure; only ``fit`` and ``restore`` change a reward that can be fitted. Of a composite
    it has the terms: their sum is made by the run."""

    def __init__(self, reward: RewardModel | Terms) -> None:
        self._reward, self._once = reward, Once()

    def version(self) -> int:
        return self._reward.version

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        assert not isinstance(self._reward, Terms), "terms are scored one by one"
        return self._reward.score(episodes)

    def term_scores(self, episodes: Episodes, *, features: EpisodeFeatures | None) -> Float[np.ndarray, "K N"]:
        assert isinstance(self._reward, Terms), f"{type(self._reward).__name__} has no terms"
        known = None if features is None else EpisodeFeatures(**_copied(vars(features)))
        return self._reward.term_scores(episodes, features=known)

    def heads(self) -> tuple[str, ...]:
        """What it has to say of single frames."""
        return self._reward.heads if isinstance(self._reward, FrameReward) else ()

    def progress(self, episodes: Episodes) -> Float[np.ndarray, "N F"]:
        assert isinstance(self._reward, FrameReward), f"{type(self._reward).__name__} has no heads"
        return self._reward.progress(episodes)

    def features(self, episodes: Episodes) -> EpisodeFeatures:
        return self._fittable.features(episodes)

    def success_of_frames(self, values: Float[np.ndarray, "R D"]) -> Float[np.ndarray, " R"]:
        fitted = self._fittable
        assert isinstance(fitted, EndJudge), f"{type(fitted).__name__} judges no frames"
        return fitted.success_of_frames(np.array(values))

    def score_features(self, features: EpisodeFeatures) -> Float[np.ndarray, " N"]:
        return self._fittable.score_features(EpisodeFeatures(**_copied(vars(features))))

    def member_logits(self, features: EpisodeFeatures) -> Float[np.ndarray, "E N"]:
        return self._fittable.member_logits(EpisodeFeatures(**_copied(vars(features))))

    def fit(self, data: PairData, seed: int, *, clips: ClipFrames | None, key: str) -> tuple[FitReport, Weights]:
        """The report, and the state after the fit, for the other workers."""
        mine = PairData(**_copied(vars(data)))
        known = None if clips is None else ClipFrames(**_copied(vars(clips)))
        return self._once(key, lambda: (self._fittable.fit(mine, seed, known), self._fittable.state()))

    def state(self) -> Weights:
        return self._fittable.state()

    def restore(self, state: Weights) -> None:
        self._fittable.restore(state)

    @property
    def _fittable(self) -> FittableReward:
        found = self._reward.learned if isinstance(self._reward, Terms) else self._reward
        assert isinstance(found, FittableReward), f"{type(found).__name__} is not learned from labels"
        return found


class ReferenceWorker:
    """Holds the start policy, which never changes: all that it does is pure, and it receives no weights."""

    def __init__(self, reference: ReferenceModel) -> None:
        self._reference = reference

    def means(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, "B S D"]:
        return self._reference.means(obs, trace, executed)


def _copied(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What comes from another process may be read-only, which torch warns about."""
    return {name: np.array(value) for name, value in arrays.items()}
