"""A run from start to finish: start policy, success before, the training loop, success after, report.

runs/<name>/  config.yaml  manifest.json  start/ best/ checkpoints/  preferences.sqlite
              before.npz  metrics.jsonl  episodes/  clips.npz  result.json  report.html
              reward_card.json  reward_card.html (of a learned reward)
"""

import io
import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vla_rlaif.algorithm_checks import cautions
from vla_rlaif.algorithm_config import PPOConfig
from vla_rlaif.build import build_env, build_parts
from vla_rlaif.build_labeller import check_judge
from vla_rlaif.build_reward import check_reward
from vla_rlaif.checkpoint import RunCheckpoints, load_policy, write_whole
from vla_rlaif.cluster_config import LocalClusterConfig
from vla_rlaif.config import RunConfig
from vla_rlaif.doctor import require
from vla_rlaif.evaluate import Evaluation, evaluate
from vla_rlaif.interfaces import Rollouts, VectorEnv
from vla_rlaif.lerobot_config import LeRobotSettings
from vla_rlaif.manifest import config_text, continued, differences, manifest, read_manifest, versions
from vla_rlaif.metric_sinks import check_logging, open_log
from vla_rlaif.report import write_report
from vla_rlaif.reward_config import LeRobotRewardConfig, learned_part, parts_of
from vla_rlaif.reward_run_card import write_run_card
from vla_rlaif.rollout import Split
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.score import try_reward
from vla_rlaif.stage import Stage, Trained
from vla_rlaif.start import check_groups, start_policy
from vla_rlaif.token_config import TokenVLAConfig
from vla_rlaif.train import train
from vla_rlaif.types import Weights

Say = Callable[[str], None]


def align(config: RunConfig, *, resume: bool, overwrite: bool, say: Say, same_as: Path | None = None) -> dict[str, Any]:
    """Run everything and return what is written to result.json. What differs here from the manifest ``same_as`` is
    said."""
    begun, run_dir = time.monotonic(), config.run_dir
    _check(config, run_dir, resume=resume, overwrite=overwrite)
    _check_extras(config)
    check_reward(config)
    for caution in cautions(config):
        say(f"caution: {caution}")
    if same_as is not None:
        for line in differences(read_manifest(same_as), manifest(config)) or ["nothing"]:
            say(f"differs from {same_as}: {line}")
    create = partial(_create, config, run_dir, say, resume=resume)
    with _stage(config, run_dir, create, say) as stage:
        before = _before(config, stage.rollouts, run_dir)
        say(f"success before: {before.success:.3f} [{before.low:.3f}, {before.high:.3f}] of {before.episodes}")
        trained = stage.train(resume=resume)
        _, weights = load_policy(run_dir / "best")
        stage.act_with(weights, trained.state.step)
        after = _test(config, stage.rollouts)
    say(f"success after: {after.success:.3f} [{after.low:.3f}, {after.high:.3f}] of {after.episodes}")
    _write_clips(run_dir / "clips.npz", before, after)
    result = {
        "task": before.instruction[0] if before.instruction else config.env.type,
        "success_before": before.success,
        "success_after": after.success,
        "ci95_before": [before.low, before.high],
        "ci95_after": [after.low, after.high],
        "episodes": after.episodes,
        "labels": trained.num_labels,
        "minutes": (time.monotonic() - begun) / 60,
        "training_minutes": trained.state.minutes,
        "seed": config.seed,
        "best_step": trained.state.best_step,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "versions": versions(),
    }
    write_whole(run_dir / "result.json", json.dumps(result, indent=1).encode())
    say(f"report: {write_report(run_dir)}")
    return result


class LocalStage:
    """A Stage in this process."""

    def __init__(self, config: RunConfig, run_dir: Path, env: VectorEnv, say: Say) -> None:
        self._config, self._run_dir, self._env, self._say = config, run_dir, env, say
        check_groups(env, config)
        self._policy = start_policy(config, env, run_dir, say)
        self.rollouts = LocalRollouts(self._policy, env, act_batch=config.loop.act_batch)

    def train(self, *, resume: bool) -> Trained:
        parts = build_parts(self._config, self._env, self._policy, self._run_dir)
        with open_log(self._config, self._run_dir) as log:
            state = train(self._config, parts, log, self._run_dir, resume=resume, say=self._say)
        write_run_card(self._config, parts, self._run_dir, self._say)
        return Trained(state=state, num_labels=parts.preferences.num_labels if parts.preferences is not None else 0)

    def act_with(self, weights: Weights, version: int) -> None:
        self._policy.load(weights, version)


@contextmanager
def _stage(config: RunConfig, run_dir: Path, create: Callable[[], None], say: Say) -> Iterator[Stage]:
    """``create`` makes the run directory. What may fail for want of GL or of nodes comes before it."""
    if config.cluster.type == "ray":
        from vla_rlaif.build_cluster import cluster_stage

        with cluster_stage(config, run_dir, create, say) as stage:
            yield stage
        return
    env = build_env(config.env)
    try:
        check_judge(config, env.spec, run_dir)
        try_reward(config, env)
        create()
        yield LocalStage(config, run_dir, env, say)
    finally:
        env.close()


def _check(config: RunConfig, run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """Whether the run directory is what the flags say; touches nothing."""
    saved = run_dir / "config.yaml"
    if resume and not saved.exists():
        raise ValueError(f"nothing to resume: {run_dir} has no run. Start it without --resume.")
    if run_dir.exists() and any(run_dir.iterdir()) and not resume and not overwrite:
        raise ValueError(f"{run_dir} already holds a run. Pass --resume to go on, --overwrite to replace it, or --out.")
    if resume and RunCheckpoints(run_dir / "checkpoints", 2).exists():
        old = RunConfig.model_validate(yaml.safe_load(saved.read_text()))
        old, new = _without_layout(old), _without_layout(config)
        same = [k for k in RunConfig.model_fields if k not in ("out", "loop", "logging", "record", "monitor")]
        differ = [k for k in same if getattr(old, k) != getattr(new, k)]
        if differ:
            raise ValueError(
                f"{run_dir} was started with other settings in: {', '.join(differ)}. Resume with {saved} or start anew."
            )


def _check_extras(config: RunConfig) -> None:
    """Find a missing package before minutes of demonstrations, not after."""
    what = f"policy.type {config.policy.type}"
    require(config.policy.backend, what)
    if isinstance(config.policy, LeRobotSettings | TokenVLAConfig):
        require("lerobot", what)
    if learned_part(config.reward) is not None:
        require("torch", "reward.type preference")
    if isinstance(config.algorithm, PPOConfig):
        require("torch", "algorithm.type ppo")
    if any(isinstance(part, LeRobotRewardConfig) for part in parts_of(config.reward)):
        require("lerobot", "reward.type lerobot")
    check_logging(config.logging)


def _without_layout(config: RunConfig) -> RunConfig:
    """A checkpoint holds whole tensors, so a run may go on with other devices and on another cluster."""
    layout = {"devices": None, "sharding": "replicated", "timeout_s": 1}
    learner = config.learner.model_copy(update=layout)
    return config.model_copy(update={"learner": learner, "cluster": LocalClusterConfig()})


def _create(config: RunConfig, run_dir: Path, say: Say, *, resume: bool) -> None:
    if not resume and run_dir.exists():
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / "config.yaml", config_text(config).encode())
    now, differ = continued(run_dir / "manifest.json", manifest(config))
    write_whole(run_dir / "manifest.json", json.dumps(now, indent=1).encode())
    for line in differ:
        say(f"caution: the run began elsewhere or otherwise. {line}")


def _before(config: RunConfig, rollouts: Rollouts, run_dir: Path) -> Evaluation:
    """Success of the start policy, measured once; a resumed run reads it back."""
    path = run_dir / "before.npz"
    if not path.exists():
        result = _test(config, rollouts)
        _write_npz(path, {k: np.array(v) for k, v in vars(result).items()})
    with np.load(path, allow_pickle=False) as file:
        return Evaluation(
            success=float(file["success"]),
            low=float(file["low"]),
            high=float(file["high"]),
            outcomes=file["outcomes"],
            frames=file["frames"],
            instruction=tuple(str(s) for s in file["instruction"]),
        )


def _test(config: RunConfig, rollouts: Rollouts) -> Evaluation:
    return evaluate(rollouts, split=Split.TEST, episodes=config.evaluate.episodes, clips=config.evaluate.clips)


def _write_clips(path: Path, before: Evaluation, after: Evaluation) -> None:
    shown = len(before.frames)
    arrays = {
        "before": before.frames,
        "after": after.frames,
        "before_success": before.outcomes[:shown],
        "after_success": after.outcomes[:shown],
        "instruction": np.array(before.instruction, dtype=np.str_),
    }
    _write_npz(path, arrays)


def _write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_whole(path, buffer.getvalue())
