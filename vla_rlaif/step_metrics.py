"""The numbers of one training step: what was played, how it was scored, what became of the groups.

Axes: N episodes.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from vla_rlaif.interfaces import Learner
from vla_rlaif.types import Episodes


@runtime_checkable
class TimedEnv(Protocol):
    """An env that knows how its time was spent: cumulative wall seconds of "physics" and "render"."""

    @property
    def seconds(self) -> Mapping[str, float]: ...


@runtime_checkable
class WatchedEnv(Protocol):
    """An env whose parts may fail: how many have so far, by kind."""

    @property
    def faults(self) -> Mapping[str, int]: ...


@runtime_checkable
class MeasuredRollouts(Protocol):
    """Rollouts that know how their time was spent and what failed. Each of the three may be empty."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Cumulative wall seconds of "physics" and "render"; of workers that play side by side, their mean."""
        ...

    @property
    def faults(self) -> Mapping[str, int]:
        """Members, workers and the like that have failed so far, by kind."""
        ...

    def diagnostics(self) -> Mapping[str, float]:
        """Metrics of the policy since the last call."""
        ...


@runtime_checkable
class CompilingLearner(Protocol):
    """A learner on a backend that compiles: how often its process has done so."""

    @property
    def compilations(self) -> int: ...


class CompileMeter:
    """XLA compilations of one step. More than 0 after the first steps: some shape varies, and time is lost on it."""

    def __init__(self, learner: Learner):
        self._learner = learner if isinstance(learner, CompilingLearner) else None
        self._before = self._learner.compilations if self._learner else 0

    def metrics(self) -> dict[str, float]:
        return {"jax/compilations": float(self._learner.compilations - self._before)} if self._learner else {}


def one_line(metrics: Mapping[str, float]) -> str:
    shown = {
        "success": "rollout/success",
        "reward": "reward/mean",
        "KL": "reference_kl",
        "validated": "validation/success",
    }
    return ", ".join(f"{name} {metrics[key]:.3f}" for name, key in shown.items() if key in metrics)


def rollout_metrics(e: Episodes) -> dict[str, float]:
    return {
        "rollout/success": float(e.success.mean()),
        "rollout/truth": float(e.truth.mean()),
        "rollout/env_steps": float(e.executed.sum()),
        "rollout/decisions": float(e.mask.sum()),
        "rollout/version": float(e.version),
    }


def reward_metrics(reward: np.ndarray, e: Episodes) -> dict[str, float]:
    scored = np.isfinite(reward)
    known, success = reward[scored], e.success[scored]
    spread = len(known) and known.std() > 0 and success.std() > 0
    return {
        "reward/mean": float(known.mean()) if len(known) else float("nan"),
        "reward/unscorable": float((~scored).sum()),
        "reward/success_correlation": float(np.corrcoef(known, success)[0, 1]) if spread else float("nan"),
    }


def group_metrics(e: Episodes, advantage: np.ndarray, group_size: int, *, lost: int, evicted: int) -> dict[str, float]:
    """Every episode ends in exactly one of trained, failed, evicted. ``lost`` and ``evicted`` groups are not in ``e``:
    their worker died, or their weights were too old."""
    won = np.bincount(np.unique(e.starts.group, return_inverse=True)[1], e.success)
    trained = advantage != 0
    idle = ~trained & e.valid  # their group has no spread, or they sit on its mean
    return {
        "groups/all_fail": float((won == 0).sum()),
        "groups/all_success": float((won == group_size).sum()),
        "groups/lost": float(lost),
        "groups/evicted": float(evicted),
        "episodes/judged": float(len(e.valid)),
        "episodes/ordered": float(len(e.valid) + group_size * (lost + evicted)),
        "episodes/trained": float(trained.sum()),
        "episodes/failed": float((~e.valid).sum() + group_size * lost),
        "episodes/evicted": float(idle.sum() + group_size * evicted),
    }


@runtime_checkable
class DiagnosedPolicy(Protocol):
    """A policy that knows something about how it acted."""

    def diagnostics(self) -> Mapping[str, float]:
        """Metrics since the last call."""
        ...


def policy_metrics(policy: object) -> dict[str, float]:
    return {**policy.diagnostics()} if isinstance(policy, DiagnosedPolicy) else {}


class Saturation:
    """Says, once, that the head is stuck at the bound of its actions: such a policy learns nothing any more."""

    LIMIT = 0.5  # share of the acted coordinates

    def __init__(self, say: Callable[[str], None]):
        self._say, self._is_said = say, False

    def __call__(self, metrics: Mapping[str, float]) -> None:
        share = metrics.get("policy/saturated_share", 0.0)
        if share > self.LIMIT and not self._is_said:
            self._is_said = True
            self._say(
                f"caution: {share:.0%} of the acted coordinates sit at the bound of the denoising states. The start "
                "policy is not fitted to these actions: check the statistics, imitate longer, or set clip_prediction."
            )


def diagnose(dead_steps: int, metrics: Mapping[str, float]) -> None:
    if dead_steps < 3:
        return
    if metrics["reward/unscorable"] == metrics["episodes/judged"]:
        cause = "the reward model scores no episode (all NaN); check it on one episode"
    elif metrics["groups/all_success"] == metrics["groups/total"]:
        cause = "every episode succeeds; the task is solved, or too easy to learn more from"
    elif metrics["groups/all_fail"] == metrics["groups/total"]:
        cause = "every episode fails; start from a better policy, a denser reward or an easier task"
    else:
        cause = "no group has spread in its rewards; the reward may be constant, or algorithm.std_floor too high"
    raise ValueError(
        f"three steps in a row had no group to learn from: {cause}. The run can be resumed after the change."
    )
