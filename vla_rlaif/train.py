"""The whole loop. Read this file first.

A policy acts in a vector of environments, a reward model judges the episodes, GRPO turns judgements into advantages, a
learner updates the weights, a sync hands them back; every few steps fresh episodes are labelled and the reward model is
fitted again. Success is measured and never trained on (unless the reward says so).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vla_rlaif.checkpoint import RunCheckpoints, save_policy
from vla_rlaif.config import PreferenceRewardConfig, RunConfig
from vla_rlaif.evaluate import evaluate
from vla_rlaif.grpo import num_valid
from vla_rlaif.interfaces import Algorithm, Learner, Policy, RewardModel, VectorEnv, WeightSync
from vla_rlaif.metrics import MetricsLog
from vla_rlaif.preferences.refresh import PreferenceLearner
from vla_rlaif.progress import Progress
from vla_rlaif.rollout import Split, make_batch, rollout, train_starts
from vla_rlaif.types import Episodes

Say = Callable[[str], None]


@runtime_checkable
class TimedEnv(Protocol):
    """An env that knows how its time was spent: cumulative wall seconds of "physics" and "render"."""

    @property
    def seconds(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All that a run is made of; build.py chooses the classes."""

    env: VectorEnv
    policy: Policy
    learner: Learner
    sync: WeightSync
    reward: RewardModel
    algorithm: Algorithm
    preferences: PreferenceLearner | None  # None: the reward is not learned from labels
    metadata: Mapping[str, Any]  # of the policy, for its checkpoints


@dataclass
class RunState:
    """What the loop carries from step to step, besides the learner and the reward model."""

    step: int = 0
    minutes: float = 0.0
    best_step: int = -1
    best_success: float = -1.0
    dead_steps: int = 0  # consecutive steps without a live group


def train(
    config: RunConfig, parts: Parts, log: MetricsLog, run_dir: Path, *, resume: bool, say: Say, until: int | None = None
) -> RunState:
    """Run to ``config.loop.steps`` (or ``until``), from the newest checkpoint if ``resume``. The best policy of the
    validation set is in ``run_dir/best``."""
    loop, checkpoints = config.loop, RunCheckpoints(run_dir / "checkpoints", config.loop.keep_checkpoints)
    begun = time.monotonic()
    if resume and checkpoints.exists():
        state = _restore(checkpoints, parts, log, say)
    else:
        state = RunState()
        log.rewind(0)
        say(f"labels: {_first_labels(config, parts)}")
    minutes_before = state.minutes
    publish(parts)
    num_groups = config.env.num_envs // config.algorithm.group_size
    learned = learned_reward(config)

    with Progress(loop.steps, start=state.step) as bar:
        for step in range(state.step, min(until or loop.steps, loop.steps)):
            timer = Timer(parts.env)
            starts = train_starts(config.seed, step, num_groups, config.algorithm.group_size)
            episodes = rollout(parts.policy, parts.env, starts, seed=config.seed)
            metrics = timer.lap("rollout") | _rollout_metrics(episodes)

            if parts.preferences is not None and step and step % learned.refresh_every == 0:
                ids = [f"{step}:{row}" for row in range(len(episodes.success))]
                metrics |= parts.preferences.refresh(episodes, ids, step, learned.labels_per_refresh)
            reward = np.where(episodes.valid, parts.reward.score(episodes), np.nan)
            metrics |= timer.lap("reward") | _reward_metrics(reward, episodes)

            advantage, groups = parts.algorithm.advantages(reward, episodes.starts.group)
            metrics |= {**groups} | _group_metrics(episodes, advantage, config.algorithm.group_size)
            batch = make_batch(episodes, advantage, num_valid(config.algorithm.normalizer, advantage, episodes.mask))
            metrics |= {**parts.learner.update(batch, seed=step)} | timer.lap("update")
            state.dead_steps = 0 if groups["groups/live"] else state.dead_steps + 1
            _diagnose(state.dead_steps, metrics)

            publish(parts)
            state.step = step + 1
            if state.step % loop.validate_every == 0 or state.step == loop.steps:
                metrics |= _validate(config, parts, state, run_dir) | timer.lap("validate")
            state.minutes = minutes_before + (time.monotonic() - begun) / 60
            log.write(step, {"minutes": state.minutes, **metrics})
            bar.update(state.step, _line(metrics))
            if state.step % loop.checkpoint_every == 0 or state.step == loop.steps:
                _save(checkpoints, parts, state)
    return state


def publish(parts: Parts) -> None:
    """The learner's weights, to the policy that acts."""
    parts.sync.send(parts.learner.weights(), parts.learner.version)
    parts.sync.receive(parts.policy)


def learned_reward(config: RunConfig) -> PreferenceRewardConfig:
    """The reward section where it is learned from labels; its defaults, which nobody reads, elsewhere."""
    return config.reward if isinstance(config.reward, PreferenceRewardConfig) else PreferenceRewardConfig()


def _first_labels(config: RunConfig, parts: Parts) -> str:
    """Label episodes of the start policy and fit the first reward model."""
    if parts.preferences is None:
        return "none, the reward is not learned"
    reward, size = learned_reward(config), config.algorithm.group_size
    starts = train_starts(config.seed, 0, reward.initial_episodes // size, size, Split.REWARD)
    episodes = rollout(parts.policy, parts.env, starts, seed=config.seed)
    ids = [f"start:{row}" for row in range(len(episodes.success))]
    metrics = parts.preferences.refresh(episodes, ids, -1, reward.initial_labels)
    return ", ".join(f"{k} {v:.3g}" for k, v in metrics.items())


def _validate(config: RunConfig, parts: Parts, state: RunState, run_dir: Path) -> dict[str, float]:
    """Measure the averaged weights on the validation starts; the best so far are kept on disk."""
    weights = parts.learner.weights(averaged=True)
    parts.policy.load(weights, parts.learner.version)
    result = evaluate(parts.policy, parts.env, split=Split.VALIDATION, episodes=config.loop.validation_episodes)
    parts.sync.receive(parts.policy)
    if result.success > state.best_success:
        state.best_success, state.best_step = result.success, state.step
        save_policy(run_dir / "best", parts.metadata, weights)
    return {"validation/success": result.success, "validation/low": result.low, "validation/high": result.high}


def _save(checkpoints: RunCheckpoints, parts: Parts, state: RunState) -> None:
    tensors = {f"learner/{k}": v for k, v in parts.learner.state().items()}
    if parts.preferences is not None:
        tensors |= {f"preferences/{k}": v for k, v in parts.preferences.state().items()}
    checkpoints.save(state.step, {k: v for k, v in vars(state).items() if k != "step"}, tensors)


def _restore(checkpoints: RunCheckpoints, parts: Parts, log: MetricsLog, say: Say) -> RunState:
    saved, tensors, problems = checkpoints.load_latest()
    for problem in problems:
        say(f"warning: {problem}; using the one before")
    part = lambda name: {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)}  # noqa: E731
    parts.learner.restore(part("learner/"))
    if parts.preferences is not None:
        parts.preferences.restore(part("preferences/"))
    log.rewind(saved["step"])
    say(f"resuming at step {saved['step']}")
    return RunState(**{k: saved[k] for k in vars(RunState())})


def _line(metrics: Mapping[str, float]) -> str:
    shown = {
        "success": "rollout/success",
        "reward": "reward/mean",
        "KL": "reference_kl",
        "validated": "validation/success",
    }
    return ", ".join(f"{name} {metrics[key]:.3f}" for name, key in shown.items() if key in metrics)


def _rollout_metrics(e: Episodes) -> dict[str, float]:
    return {
        "rollout/success": float(e.success.mean()),
        "rollout/truth": float(e.truth.mean()),
        "rollout/env_steps": float(e.executed.sum()),
        "rollout/decisions": float(e.mask.sum()),
        "rollout/version": float(e.version),
    }


def _reward_metrics(reward: np.ndarray, e: Episodes) -> dict[str, float]:
    scored = np.isfinite(reward)
    known, success = reward[scored], e.success[scored]
    spread = len(known) and known.std() > 0 and success.std() > 0
    return {
        "reward/mean": float(known.mean()) if len(known) else float("nan"),
        "reward/unscorable": float((~scored).sum()),
        "reward/success_correlation": float(np.corrcoef(known, success)[0, 1]) if spread else float("nan"),
    }


def _group_metrics(e: Episodes, advantage: np.ndarray, group_size: int) -> dict[str, float]:
    """Every episode ends in exactly one of trained, failed, evicted."""
    won = np.bincount(np.unique(e.starts.group, return_inverse=True)[1], e.success)
    trained = advantage != 0
    return {
        "groups/all_fail": float((won == 0).sum()),
        "groups/all_success": float((won == group_size).sum()),
        "episodes/trained": float(trained.sum()),
        "episodes/failed": float((~e.valid).sum()),
        "episodes/evicted": float((~trained & e.valid).sum()),  # their group has no spread, or they sit on its mean
    }


def _diagnose(dead_steps: int, metrics: Mapping[str, float]) -> None:
    if dead_steps < 3:
        return
    if (
        metrics["reward/unscorable"]
        == metrics["episodes/trained"] + metrics["episodes/failed"] + metrics["episodes/evicted"]
    ):
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


class Timer:
    """Wall seconds of the phases of one step; the rollout is split into what the env and the rest took."""

    def __init__(self, env: VectorEnv) -> None:
        self._last = time.perf_counter()
        self._env = env
        self._env_seconds = self._split()

    def lap(self, phase: str) -> dict[str, float]:
        now = time.perf_counter()
        self._last, seconds = now, now - self._last
        laps = {f"time/{phase}_s": seconds}
        if phase == "rollout" and self._env_seconds:
            split = {k: v - self._env_seconds[k] for k, v in self._split().items()}
            laps |= {f"time/{k}_s": v for k, v in split.items()} | {"time/policy_s": seconds - sum(split.values())}
        return laps

    def _split(self) -> dict[str, float]:
        return dict(self._env.seconds) if isinstance(self._env, TimedEnv) else {}
