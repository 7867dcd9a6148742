"""The whole loop. Read this file first.

A policy acts in a vector of environments, a reward model judges the episodes, GRPO turns judgements into advantages, a
learner updates the weights, a sync hands them back; every few steps fresh episodes are labelled and the reward model is
fitted again. Success is measured and never trained on (unless the reward says so).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from vla_rlaif.checkpoint import RunCheckpoints, save_policy
from vla_rlaif.config import RunConfig
from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.evaluate import evaluate
from vla_rlaif.grpo import num_valid
from vla_rlaif.interfaces import Algorithm, Learner, Policy, RewardModel, VectorEnv, WeightSync
from vla_rlaif.metrics import MetricsLog
from vla_rlaif.preferences.refresh import PreferenceLearner
from vla_rlaif.progress import Progress
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.rollout import Split, concatenate, make_batch, rollout, train_starts
from vla_rlaif.step_metrics import (
    CompileMeter,
    Saturation,
    Timer,
    diagnose,
    group_metrics,
    one_line,
    policy_metrics,
    reward_metrics,
    rollout_metrics,
)
from vla_rlaif.types import Batch, Episodes

Say = Callable[[str], None]


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
    export: Callable[[Path, Path], None] | None = None  # writes ``policy`` once more into its checkpoints, for LeRobot
    stored: EpisodeStore | None = None  # groups that others have played, taken before any is played here


@dataclass
class RunState:
    """What the loop carries from step to step, besides the learner and the reward model."""

    step: int = 0
    minutes: float = 0.0
    best_step: int = -1
    best_success: float = -1.0
    dead_steps: int = 0  # consecutive steps without a live group
    shards_read: Mapping[str, int] = field(default_factory=dict)  # of parts.stored, by worker


def train(
    config: RunConfig,
    parts: Parts,
    log: MetricsLog,
    run_dir: Path,
    *,
    resume: bool,
    say: Say,
    until: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunState:
    """Run to ``config.loop.steps`` (or ``until``), from the newest checkpoint if ``resume``. The best policy of the
    validation set is in ``run_dir/best``. ``should_stop`` is asked after every step: a run that must leave its machine
    checkpoints and returns."""
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

    warn = Saturation(say)
    with Progress(loop.steps, start=state.step) as bar:
        for step in range(state.step, min(until or loop.steps, loop.steps)):
            timer, compiled = Timer(parts.env), CompileMeter(parts.learner)
            batch, metrics = gather(config, parts, step, timer)
            with timer.phase("update"):
                metrics |= parts.learner.update(batch, seed=step)
            state.dead_steps = 0 if metrics["groups/live"] else state.dead_steps + 1
            diagnose(state.dead_steps, metrics)
            warn(metrics)

            publish(parts)
            state.step = step + 1
            if state.step % loop.validate_every == 0 or state.step == loop.steps:
                with timer.phase("validate"):
                    metrics |= _validate(config, parts, state, run_dir)
            state.minutes = minutes_before + (time.monotonic() - begun) / 60
            log.write(step, {"minutes": state.minutes, **metrics, **timer.metrics(), **compiled.metrics()})
            bar.update(state.step, one_line(metrics))
            stopping = should_stop()
            if state.step % loop.checkpoint_every == 0 or state.step == loop.steps or stopping:
                _save(checkpoints, parts, state)
            if stopping:
                break
    return state


def gather(config: RunConfig, parts: Parts, step: int, timer: Timer) -> tuple[Batch, dict[str, float]]:
    """Play groups, label some, score all, centre the scores; refill while too few groups are live (dynamic sampling).

    A refill adds groups and never throws away what the round before it brought.
    """
    loop, size = config.loop, config.algorithm.group_size
    num_groups, learned = config.env.num_envs // size, learned_reward(config)
    scores: list[Float[np.ndarray, " N"]] = []
    version = parts.learner.version
    with timer.phase("rollout"):
        rounds, metrics = take_stored(config, parts, num_groups)
    while True:
        if len(scores) == len(rounds):
            with timer.phase("rollout"):
                starts = train_starts(config.seed, step * (1 + loop.max_refills) + len(rounds), num_groups, size)
                rounds.append(rollout(parts.policy, parts.env, starts, seed=config.seed))
        with timer.phase("reward"):
            if parts.preferences is not None and len(rounds) == 1 and step and step % learned.refresh_every == 0:
                ids = [f"{step}:{row}" for row in range(len(rounds[0].success))]
                metrics |= parts.preferences.refresh(rounds[0], ids, step, learned.labels_per_refresh)
            scores.append(np.where(rounds[-1].valid, parts.reward.score(rounds[-1]), np.nan))
        episodes, reward = concatenate(rounds), np.concatenate(scores)
        advantage, groups = parts.algorithm.advantages(reward, episodes.starts.group)
        enough = groups["groups/live"] >= loop.min_live_share * num_groups
        if enough or len(rounds) > loop.max_refills or episodes.version != version:
            break  # stale groups are not topped up with fresh ones: a batch is of one version
    metrics |= rollout_metrics(episodes) | reward_metrics(reward, episodes) | {**groups}
    metrics |= group_metrics(episodes, advantage, size) | {"groups/refills": len(rounds) - 1.0}
    metrics |= policy_metrics(parts.policy)
    denominator = num_valid(config.algorithm.normalizer, advantage, episodes.mask)
    stale = episodes.version != version
    return make_batch(episodes, advantage, denominator, window=parts.policy.window, is_stale=stale), metrics


def take_stored(config: RunConfig, parts: Parts, num_groups: int) -> tuple[list[Episodes], dict[str, float]]:
    """Groups that others have played and that are fresh enough, if there are enough for a step."""
    if parts.stored is None:
        return [], {}
    version = parts.learner.version
    taken = parts.stored.take(
        num_groups=num_groups,
        group_size=config.algorithm.group_size,
        version=version,
        staleness=config.loop.staleness,
    )
    metrics = {"stored/evicted": float(taken.evicted), "stored/used": 0.0}
    if taken.episodes is None:
        return [], metrics
    age = float(version - taken.episodes.version)
    return [taken.episodes], metrics | {"stored/used": float(len(taken.episodes.success)), "stored/age": age}


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
    if result.success > state.best_success:
        state.best_success, state.best_step = result.success, state.step
        save_policy(run_dir / "best", parts.metadata, weights, also=parts.export)
    parts.sync.receive(parts.policy)
    return {"validation/success": result.success, "validation/low": result.low, "validation/high": result.high}


def _save(checkpoints: RunCheckpoints, parts: Parts, state: RunState) -> None:
    tensors = {f"learner/{k}": v for k, v in parts.learner.state().items()}
    if parts.preferences is not None:
        tensors |= {f"preferences/{k}": v for k, v in parts.preferences.state().items()}
    if parts.stored is not None:
        state.shards_read = parts.stored.read
    checkpoints.save(state.step, {k: v for k, v in vars(state).items() if k != "step"}, tensors)


def _restore(checkpoints: RunCheckpoints, parts: Parts, log: MetricsLog, say: Say) -> RunState:
    saved, tensors, problems = checkpoints.load_latest()
    for problem in problems:
        say(f"warning: {problem}; using the one before")
    part = lambda name: {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)}  # noqa: E731
    parts.learner.restore(part("learner/"))
    if parts.preferences is not None:
        parts.preferences.restore(part("preferences/"))
    if parts.stored is not None:
        parts.stored.read = dict(saved["shards_read"])
    log.rewind(saved["step"])
    say(f"resuming at step {saved['step']}")
    return RunState(**{k: saved[k] for k in vars(RunState())})
