"""What one step learns from: groups are played, some of them labelled, all scored, and the scores credited.

Axes: N episodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from vla_rlaif.composite import CompositeReward
from vla_rlaif.config import RunConfig
from vla_rlaif.parts import Acting, Parts
from vla_rlaif.recording import Recorded, choose
from vla_rlaif.reward_config import PreferenceRewardConfig, learned_part
from vla_rlaif.rollout import concatenate, train_starts
from vla_rlaif.step_metrics import MeasuredRollouts, group_metrics, reward_metrics, rollout_metrics
from vla_rlaif.timing import IdleMeter, Timer
from vla_rlaif.types import Batch, Episodes, Starts, Weights

ATTEMPTS = 3  # at playing a round that is lost as a whole


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """One step's decisions, and what a checkpoint after this step must know of the judges and the episode store: both
    may be steps further when the learner comes to it."""

    batch: Batch
    metrics: Mapping[str, float]
    preferences: Weights
    shards_read: Mapping[str, int]
    recorded: Recorded | None

    @property
    def num_episodes(self) -> int:
        return int(self.metrics["episodes/ordered"])


@dataclass
class Fate:
    """Groups of a step that are not in its batch."""

    lost: int = 0  # with the worker that played them
    evicted: int = 0  # too old


def gather(config: RunConfig, parts: Parts, idle: IdleMeter, step: int, acting: Acting) -> Gathered:
    """Play groups, label some, score all, credit decisions; refill while too few groups are live (dynamic sampling).

    A refill adds groups and never throws away what the round before it brought. ``acting`` may be older than the
    weights that will be trained: by ``step - acting.step`` updates.

    Raises RuntimeError if nothing comes back from the rollouts.
    """
    loop, size, timer, fate = config.loop, config.algorithm.group_size, Timer(parts.rollouts, idle), Fate()
    num_groups, learned = config.env.num_envs // size, learned_reward(config)
    scores: list[Float[np.ndarray, " N"]] = []
    with timer.phase("rollout"):
        rounds, metrics = take_stored(config, parts, num_groups, step, acting, fate)
    while True:
        if len(scores) == len(rounds):
            with timer.phase("rollout"):
                starts = train_starts(config.seed, step * (1 + loop.max_refills) + len(rounds), num_groups, size)
                oldest = rounds[0].version if rounds else acting.version + (step - acting.step) - loop.staleness
                rounds.append(play(parts, starts, config.seed, oldest, fate, size))
        with timer.phase("reward"):
            if parts.preferences is not None and len(rounds) == 1 and step and step % learned.refresh_every == 0:
                ids = [f"{step}:{row}" for row in range(len(rounds[0].success))]
                metrics |= parts.preferences.refresh(rounds[0], ids, step, learned.labels_per_refresh)
            scores.append(np.where(rounds[-1].valid, parts.reward.score(rounds[-1]), np.nan))
        episodes, reward = concatenate(rounds), np.concatenate(scores)
        is_stale = step > acting.step or episodes.version != acting.version
        credited = parts.credit.assign(episodes, reward, step=step, window=parts.rollouts.window, is_stale=is_stale)
        enough = credited.metrics["groups/live"] >= loop.min_live_share * num_groups
        if enough or len(rounds) > loop.max_refills or episodes.version != acting.version:
            break  # stale groups are not topped up with fresh ones: a batch is of one version
    batch = credited.batch
    if parts.reference is not None:
        with timer.phase("reference"):
            batch = replace(batch, reference=parts.reference.means(batch.obs, batch.trace, batch.executed))
    metrics |= rollout_metrics(episodes) | reward_metrics(reward, episodes) | {**credited.metrics}
    metrics |= group_metrics(episodes, credited.advantage, size, lost=fate.lost, evicted=fate.evicted)
    metrics |= {"groups/refills": len(rounds) - 1.0, "reward/version": float(parts.reward.version)}
    if isinstance(parts.reward, CompositeReward):
        metrics |= parts.reward.diagnostics()
    if isinstance(parts.rollouts, MeasuredRollouts):
        metrics |= parts.rollouts.diagnostics()
    recorded = choose(
        config.record,
        seed=config.seed,
        step=step,
        episodes=episodes,
        reward=reward,
        advantage=credited.advantage,
        judge=parts.reward,
    )
    return Gathered(
        batch=batch,
        metrics=metrics | timer.metrics(),
        preferences={} if parts.preferences is None else parts.preferences.state(),
        shards_read={} if parts.stored is None else dict(parts.stored.read),
        recorded=recorded,
    )


def play(parts: Parts, starts: Starts, seed: int, oldest: int, fate: Fate, group_size: int) -> Episodes:
    """One round. What is lost as a whole, or older than version ``oldest``, is counted and played again: from the same
    starts, so that the step is what it would have been."""
    for _ in range(ATTEMPTS):
        played = parts.rollouts.play(starts, seed=seed)
        fate.lost += played.lost_groups
        if played.episodes is None:
            continue
        if played.episodes.version >= oldest:
            return played.episodes
        fate.evicted += len(played.episodes.success) // group_size
    raise RuntimeError(
        f"{ATTEMPTS} rounds of rollouts in a row brought nothing that can be trained on: in this step {fate.lost} "
        f"groups were lost with their workers and {fate.evicted} were played with weights before version {oldest}."
    )


def take_stored(
    config: RunConfig, parts: Parts, num_groups: int, step: int, acting: Acting, fate: Fate
) -> tuple[list[Episodes], dict[str, float]]:
    """Groups that others have played and that are fresh enough when they are trained on, if there are enough."""
    if parts.stored is None:
        return [], {}
    size, ahead = config.algorithm.group_size, step - acting.step
    staleness = config.loop.staleness - ahead
    taken = parts.stored.take(num_groups=num_groups, group_size=size, version=acting.version, staleness=staleness)
    fate.evicted += taken.evicted // size
    metrics = {"stored/evicted": float(taken.evicted), "stored/used": 0.0}
    if taken.episodes is None:
        return [], metrics
    age = float(acting.version + ahead - taken.episodes.version)
    return [taken.episodes], metrics | {"stored/used": float(len(taken.episodes.success)), "stored/age": age}


def learned_reward(config: RunConfig) -> PreferenceRewardConfig:
    """The reward section where it is learned from labels; its defaults, which nobody reads, elsewhere."""
    return learned_part(config.reward) or PreferenceRewardConfig()
