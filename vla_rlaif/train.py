"""The whole loop. Read this file first.

A policy acts in a vector of environments, a reward model judges the episodes, GRPO's credit (or another algorithm's)
turns judgements into what is learned (gather.py), a learner updates the weights, a sync hands them back; every few
steps fresh episodes are labelled and the reward model is fitted again. With ``loop.overlap`` the next steps are
gathered while the learner updates (pipeline.py).
Success is measured and never trained on (unless the reward says so); at every validation it is compared with the
reward (watch.py), which may be hacked.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from vla_rlaif.checkpoint import RunCheckpoints, save_policy
from vla_rlaif.checkpoint_writer import CheckpointWriter
from vla_rlaif.composite import CompositeReward
from vla_rlaif.config import LoopConfig, RunConfig
from vla_rlaif.evaluate import measured, play_all, play_held_out
from vla_rlaif.gather import Gathered, gather, learned_reward
from vla_rlaif.metrics import MetricsLog
from vla_rlaif.parts import Acting, Parts
from vla_rlaif.pipeline import Pipeline
from vla_rlaif.progress import Progress
from vla_rlaif.recording import Recording
from vla_rlaif.reward_config import CompositeRewardConfig
from vla_rlaif.rollout import Split, train_starts
from vla_rlaif.run_state import RunState, as_before, restore, save
from vla_rlaif.step_metrics import MeasuredRollouts, Saturation, diagnose, one_line
from vla_rlaif.timing import StepMeter, Timer
from vla_rlaif.watch import Watch

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
    recording, watch = Recording(run_dir / "episodes"), Watch(config, parts, run_dir, say)
    at_start: dict[str, float] = {}
    if resume and checkpoints.exists():
        state, acting = _go_on(config, parts, send, checkpoints, log, watch, say)
        recording.rewind(state.step)
    else:
        log.rewind(0)
        recording.rewind(0)
        state, acting = RunState(), send(0)
        say(f"labels: {_first_labels(config, parts)}")
        if watch.is_active:
            at_start = _validate(config, parts, state, run_dir, watch, {"reference_kl": 0.0}, None)
    minutes_before, end, warn = state.minutes, min(until or loop.steps, loop.steps), Saturation(say)
    if watch.is_over:
        return state
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
                metrics = {**at_start, **gathered.metrics, **parts.learner.update(gathered.batch, seed=step)}
                metrics |= parts.credit.learned(metrics, step)
            at_start = {}
            state.step, state.dead_steps = step + 1, 0 if metrics["groups/live"] else state.dead_steps + 1
            diagnose(state.dead_steps, metrics)
            warn(metrics)
            if gathered.recorded is not None:
                with timer.phase("record"):
                    recording.write(step, gathered.recorded)

            if state.step % loop.validate_every == 0 or state.step == loop.steps:
                pipeline.rest()
                with timer.phase("validate"):
                    metrics |= _validate(config, parts, state, run_dir, watch, metrics, gathered)
            state.minutes = minutes_before + (time.monotonic() - begun) / 60
            metrics |= {"minutes": state.minutes, "episodes/carried": float(pipeline.num_carried)}
            log.write(step, {**metrics, **timer.metrics(), **meter.metrics()})
            bar.update(state.step, one_line(metrics))
            writer.check()
            stopping = watch.is_over or (should_stop is not None and should_stop())
            if stopping or is_checkpoint_due(loop, state.step):
                save(writer, parts, state, gathered, pipeline.acting, watch.state())
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
    watch: Watch,
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
    watch.restore(saved.monitor)
    say(f"resuming at step {saved.state.step}")
    return saved.state, acting or send(saved.state.step)


def _first_labels(config: RunConfig, parts: Parts) -> str:
    """Label episodes of the start policy and fit the first reward model; standardise a composite's terms on them."""
    reward, size, said = learned_reward(config), config.algorithm.group_size, "none, the reward is not learned"
    num = reward.initial_episodes if parts.preferences is not None else 0
    if isinstance(config.reward, CompositeRewardConfig):
        num = max(num, config.reward.reference_episodes)
    if not num:
        return said
    starts = train_starts(config.seed, 0, num // size, size, Split.REWARD)
    episodes = play_all(parts.rollouts, starts, seed=config.seed)
    if parts.preferences is not None:
        ids = [f"start:{row}" for row in range(len(episodes.success))]
        metrics = parts.preferences.refresh(episodes, ids, -1, reward.initial_labels)
        said = ", ".join(f"{k} {v:.3g}" for k, v in metrics.items())
    if isinstance(parts.reward, CompositeReward):
        parts.reward.freeze(episodes)
    return said


def _validate(
    config: RunConfig,
    parts: Parts,
    state: RunState,
    run_dir: Path,
    watch: Watch,
    metrics: Mapping[str, float],
    gathered: Gathered | None,
) -> dict[str, float]:
    """Measure the averaged weights on the validation starts; the best so far are kept on disk, the start policy until
    another is as good. They act until the next publication. ``metrics`` and ``gathered`` are those of the step."""
    if state.step:  # before the first update they are what acts
        parts.sync.publish(averaged=True)
    played = play_held_out(parts.rollouts, split=Split.VALIDATION, episodes=config.loop.validation_episodes)
    result = measured(played, parts.rollouts.spec)
    is_first = state.best_step == 0 < state.step  # of those that were trained
    if result.success > state.best_success or (is_first and result.success == state.best_success):
        state.best_success, state.best_step = result.success, state.step
        save_policy(run_dir / "best", parts.metadata, parts.learner.weights(averaged=True), also=parts.export)
    if isinstance(parts.rollouts, MeasuredRollouts) and not state.step:
        parts.rollouts.diagnostics()  # of training only
    found = {"validation/success": result.success, "validation/low": result.low, "validation/high": result.high}
    as_judged = nullcontext()
    if parts.preferences is not None and gathered is not None:
        as_judged = parts.preferences.as_of(gathered.preferences)
    with as_judged:
        return found | watch.look(played, state.step, metrics)
