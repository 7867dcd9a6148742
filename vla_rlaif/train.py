"""The whole loop. Read this file first.

A policy acts in a vector of environments, a reward model judges the episodes, GRPO turns judgements into advantages
(gather.py), a learner updates the weights, a sync hands them back; every few steps fresh episodes are labelled and the
reward model is fitted again. With ``loop.overlap`` the next steps are gathered while the learner updates (pipeline.py).
Success is measured and never trained on (unless the reward says so).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from vla_rlaif.checkpoint import RunCheckpoints, save_policy
from vla_rlaif.checkpoint_writer import CheckpointWriter
from vla_rlaif.config import LoopConfig, RunConfig
from vla_rlaif.evaluate import evaluate, play_all
from vla_rlaif.gather import gather, learned_reward
from vla_rlaif.metrics import MetricsLog
from vla_rlaif.parts import Acting, Parts
from vla_rlaif.pipeline import Pipeline
from vla_rlaif.progress import Progress
from vla_rlaif.rollout import Split, train_starts
from vla_rlaif.run_state import RunState, as_before, restore, save
from vla_rlaif.step_metrics import Saturation, diagnose, one_line
from vla_rlaif.timing import StepMeter, Timer

Say = Callable[[str], None]


def train(
    config: RunConfig,
    parts: Parts,
    log: MetricsLog,
    run_dir: Path,
    *,
    resume: bool,
    say: Say,
    until: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> RunState:
    """Run to ``config.loop.steps`` (or ``until``), from the newest checkpoint if ``resume``. The best policy of the
    validation set is in ``run_dir/best``. ``should_stop`` is asked after every step: a run that must leave its machine
    checkpoints and returns."""
    loop, begun, meter = config.loop, time.monotonic(), StepMeter(parts.rollouts, parts.learner)
    send = partial(publish, config, parts, meter, should_stop is not None)
    checkpoints = RunCheckpoints(run_dir / "checkpoints", loop.keep_checkpoints)
    if resume and checkpoints.exists():
        state, acting = _go_on(config, parts, send, checkpoints, log, say)
    else:
        log.rewind(0)
        state, acting = RunState(), send(0)
        say(f"labels: {_first_labels(config, parts)}")
    minutes_before, end, warn = state.minutes, min(until or loop.steps, loop.steps), Saturation(say)
    pipeline = Pipeline(
        partial(gather, config, parts, meter.idle),
        send,
        end=end,
        ahead=steps_ahead(config),
        acting=acting,
        timeout_s=loop.timeout_s,
    )
    meter.metrics()  # it counts from here
    writer, bar = CheckpointWriter(checkpoints, timeout_s=loop.timeout_s), Progress(loop.steps, start=state.step)
    with pipeline, writer, bar:
        for step in range(state.step, end):
            gathered, timer = pipeline.take(step), Timer(parts.rollouts, meter.idle)
            with timer.phase("update"):
                metrics = {**gathered.metrics, **parts.learner.update(gathered.batch, seed=step)}
            state.step, state.dead_steps = step + 1, 0 if metrics["groups/live"] else state.dead_steps + 1
            diagnose(state.dead_steps, metrics)
            warn(metrics)

            if state.step % loop.validate_every == 0 or state.step == loop.steps:
                pipeline.rest()
                with timer.phase("validate"):
                    metrics |= _validate(config, parts, state, run_dir)
            state.minutes = minutes_before + (time.monotonic() - begun) / 60
            metrics |= {"minutes": state.minutes, "episodes/carried": float(pipeline.num_carried)}
            log.write(step, {**metrics, **timer.metrics(), **meter.metrics()})
            bar.update(state.step, one_line(metrics))
            writer.check()
            stopping = should_stop is not None and should_stop()
            if stopping or is_checkpoint_due(loop, state.step):
                save(writer, parts, state, gathered, pipeline.acting)
            if stopping:
                break
    return state


def publish(config: RunConfig, parts: Parts, meter: StepMeter, may_stop: bool, step: int) -> Acting:
    """The learner's weights, to those who act; ``step`` updates have made them. A copy is kept if a checkpoint comes
    while they act; if the run ``may_stop``, that may be after any step."""
    begun, result = time.perf_counter(), parts.sync.publish()
    meter.published(result, time.perf_counter() - begun)
    until_next = range(step + 1, step + 1 + steps_ahead(config))
    keep = any(may_stop or is_checkpoint_due(config.loop, done) for done in until_next)
    trained = parts.learner.trained(averaged=False) if keep else None
    return Acting(step=step, version=result.version, trained=trained)


def steps_ahead(config: RunConfig) -> int:
    """How many updates may follow before the next publication."""
    return config.loop.staleness if config.loop.overlap else 0


def is_checkpoint_due(loop: LoopConfig, done: int) -> bool:
    return done % loop.checkpoint_every == 0 or done == loop.steps


def _go_on(
    config: RunConfig,
    parts: Parts,
    send: Callable[[int], Acting],
    checkpoints: RunCheckpoints,
    log: MetricsLog,
    say: Say,
) -> tuple[RunState, Acting]:
    """From the newest checkpoint. The step after it is played with the weights that it was played with before."""
    saved = restore(checkpoints, parts)
    for problem in saved.problems:
        say(f"warning: {problem}; using the one before")
    acting = None
    if saved.acting is not None and steps_ahead(config):
        parts.learner.restore(as_before(saved.learner, saved.acting))
        acting = replace(send(saved.acting.step), trained=saved.acting.trained)
    parts.learner.restore(saved.learner)
    log.rewind(saved.state.step)
    say(f"resuming at step {saved.state.step}")
    return saved.state, acting or send(saved.state.step)


def _first_labels(config: RunConfig, parts: Parts) -> str:
    """Label episodes of the start policy and fit the first reward model."""
    if parts.preferences is None:
        return "none, the reward is not learned"
    reward, size = learned_reward(config), config.algorithm.group_size
    starts = train_starts(config.seed, 0, reward.initial_episodes // size, size, Split.REWARD)
    episodes = play_all(parts.rollouts, starts, seed=config.seed)
    ids = [f"start:{row}" for row in range(len(episodes.success))]
    metrics = parts.preferences.refresh(episodes, ids, -1, reward.initial_labels)
    return ", ".join(f"{k} {v:.3g}" for k, v in metrics.items())


def _validate(config: RunConfig, parts: Parts, state: RunState, run_dir: Path) -> dict[str, float]:
    """Measure the averaged weights on the validation starts; the best so far are kept on disk. They act until the next
    publication."""
    parts.sync.publish(averaged=True)
    result = evaluate(parts.rollouts, split=Split.VALIDATION, episodes=config.loop.validation_episodes)
    if result.success > state.best_success:
        state.best_success, state.best_step = result.success, state.step
        save_policy(run_dir / "best", parts.metadata, parts.learner.weights(averaged=True), also=parts.export)
    return {"validation/success": result.success, "validation/low": result.low, "validation/high": result.high}
