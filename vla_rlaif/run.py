"""A run from start to finish: start policy, success before, the training loop, success after, report.

runs/<name>/  config.yaml  manifest.json  start/ best/ checkpoints/  preferences.sqlite
              before.npz  metrics.jsonl  clips.npz  result.json  report.html
"""

import io
import json
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import yaml

from vla_rlaif.build import build_env, build_parts, build_policy, check_reward, load_folder
from vla_rlaif.checkpoint import RunCheckpoints, load_policy, save_policy, write_whole
from vla_rlaif.collect import collect_demonstrations
from vla_rlaif.config import RunConfig, cautions
from vla_rlaif.dataset import Demonstrations, save_demonstrations
from vla_rlaif.evaluate import Evaluation, evaluate
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.metrics import MetricsLog
from vla_rlaif.policy_config import OctoSettings
from vla_rlaif.report import write_report
from vla_rlaif.rollout import Split, train_starts
from vla_rlaif.train import train
from vla_rlaif.warm_start_config import WarmStartConfig

Say = Callable[[str], None]
PACKAGES = ("vla_rlaif", "numpy", "mujoco", "jax", "flax", "optax", "torch")


def align(config: RunConfig, *, resume: bool, overwrite: bool, say: Say) -> dict[str, Any]:
    """Run everything and return what is written to result.json."""
    begun, run_dir = time.monotonic(), config.run_dir
    _check(config, run_dir, resume=resume, overwrite=overwrite)
    check_reward(config)
    for caution in cautions(config):
        say(f"caution: {caution}")
    env = build_env(config.env)  # may fail for want of GL: before anything is written or removed
    _create(config, run_dir, resume=resume)
    try:
        check_groups(env, config)
        policy = start_policy(config, env, run_dir, say)
        before = _before(config, policy, env, run_dir)
        say(f"success before: {before.success:.3f} [{before.low:.3f}, {before.high:.3f}] of {before.episodes}")
        parts = build_parts(config, env, policy, run_dir)
        with MetricsLog(run_dir) as log:
            state = train(config, parts, log, run_dir, resume=resume, say=say)
        _, weights = load_policy(run_dir / "best")
        policy.load(weights, parts.learner.version)
        after = evaluate(policy, env, split=Split.TEST, episodes=config.evaluate.episodes, clips=config.evaluate.clips)
    finally:
        env.close()
    say(f"success after: {after.success:.3f} [{after.low:.3f}, {after.high:.3f}] of {after.episodes}")
    _write_clips(run_dir / "clips.npz", before, after)
    result = {
        "task": before.instruction[0] if before.instruction else config.env.type,
        "success_before": before.success,
        "success_after": after.success,
        "ci95_before": [before.low, before.high],
        "ci95_after": [after.low, after.high],
        "episodes": after.episodes,
        "labels": parts.preferences.num_labels if parts.preferences is not None else 0,
        "minutes": (time.monotonic() - begun) / 60,
        "training_minutes": state.minutes,
        "seed": config.seed,
        "best_step": state.best_step,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "versions": versions(),
    }
    write_whole(run_dir / "result.json", json.dumps(result, indent=1).encode())
    say(f"report: {write_report(run_dir)}")
    return result


@runtime_checkable
class HashedEnv(Protocol):
    """An env that can say whether members are in the identical state."""

    def state_hash(self) -> tuple[str, ...]: ...


def check_groups(env: VectorEnv, config: RunConfig) -> None:
    """Members of a group must start from the identical simulator state; compared once, before anything is learned."""
    if not isinstance(env, HashedEnv):
        return
    size = config.algorithm.group_size
    env.reset(train_starts(config.seed, 0, env.num_envs // size, size).seed)
    hashes = np.array(env.state_hash()).reshape(-1, size)
    assert (hashes == hashes[:, :1]).all(), "members of one group do not start from the identical state"


def start_policy(config: RunConfig, env: VectorEnv, run_dir: Path, say: Say) -> Any:
    """The policy a run starts from, made once and kept in ``run_dir/start``."""
    folder = run_dir / "start"
    if not isinstance(config.policy, OctoSettings):
        return build_policy(config.policy, env.spec, config.seed)
    if not folder.exists():
        warm = config.warm_start
        if warm is None:
            policy = build_policy(config.policy, env.spec, config.seed)
            _say_adaptation(policy, say)
        elif warm.checkpoint is not None:
            policy = load_folder(warm.checkpoint, config, env.spec)
        else:
            policy = imitated_policy(config, demonstrations(config, warm, say), env, say)
        save_policy(folder, policy.metadata(), {k: np.asarray(v) for k, v in policy.params.items()})
    policy = load_folder(folder, config, env.spec)
    policy.freeze_reference()
    return policy


def _say_adaptation(policy: Any, say: Say) -> None:
    """What an official folder gave, and what is new."""
    if "adaptation" in policy.metadata():
        say(policy.metadata()["adaptation"]["summary"])


def demonstrations(config: RunConfig, warm: WarmStartConfig, say: Say) -> Demonstrations:
    env = build_env(config.env, max_steps=_demonstration_steps(config, warm))
    try:
        demos = collect_demonstrations(env, warm.collect, config.seed)
    finally:
        env.close()
    say(f"collected {len(demos.success)} demonstrations, {int(demos.mask.sum())} steps")
    return demos


def _demonstration_steps(config: RunConfig, warm: WarmStartConfig) -> int:
    chunk = config.env.chunk if config.env.type == "tabletop" else 1
    return -(-(warm.collect.scatter_steps + warm.collect.max_steps + 1) // chunk) * chunk


def imitated_policy(config: RunConfig, demos: Demonstrations, env: VectorEnv, say: Say) -> Any:
    """Fit a fresh policy to demonstrations; normalisation statistics come from them."""
    from vla_rlaif.jax_imitation import imitate
    from vla_rlaif.policies.octo.statistics import Statistics

    assert config.warm_start is not None
    assert isinstance(config.policy, OctoSettings)
    obs, action = demos.samples(env.spec.chunk, config.policy.window)
    state = obs.state.reshape(-1, obs.state.shape[-1])
    statistics = Statistics.measured(action.reshape(-1, action.shape[-1]), state)
    policy = build_policy(config.policy, env.spec, config.seed, statistics=statistics)
    _say_adaptation(policy, say)
    on_start = lambda trained, frozen: say(f"imitate: {trained:,} parameters trained, {frozen:,} frozen")  # noqa: E731
    on_step = lambda step, loss: say(f"imitate step {step}: loss {loss:.4f}")  # noqa: E731
    settings = config.warm_start.imitate
    fitted = imitate(policy, obs, action, settings, seed=config.seed, on_start=on_start, on_step=on_step)
    policy.load(fitted, 0)
    return policy


def save_demos(folder: Path, demos: Demonstrations, config: RunConfig) -> None:
    save_demonstrations(folder, demos, {"env": config.env.model_dump(mode="json"), "seed": config.seed})


def _check(config: RunConfig, run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """Whether the run directory is what the flags say; touches nothing."""
    saved = run_dir / "config.yaml"
    if resume and not saved.exists():
        raise ValueError(f"nothing to resume: {run_dir} has no run. Start it without --resume.")
    if run_dir.exists() and any(run_dir.iterdir()) and not resume and not overwrite:
        raise ValueError(f"{run_dir} already holds a run. Pass --resume to go on, --overwrite to replace it, or --out.")
    if resume and RunCheckpoints(run_dir / "checkpoints", 2).exists():
        old = RunConfig.model_validate(yaml.safe_load(saved.read_text()))
        same = [k for k in RunConfig.model_fields if k not in ("out", "loop")]
        differ = [k for k in same if getattr(old, k) != getattr(config, k)]
        if differ:
            raise ValueError(
                f"{run_dir} was started with other settings in: {', '.join(differ)}. Resume with {saved} or start anew."
            )


def _create(config: RunConfig, run_dir: Path, *, resume: bool) -> None:
    if not resume and run_dir.exists():
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_whole(run_dir / "config.yaml", text.encode())
    write_whole(run_dir / "manifest.json", json.dumps(manifest(), indent=1).encode())


def manifest() -> dict[str, Any]:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {"versions": versions(), "python": platform.python_version(), "git": git.stdout.strip() or None}


def versions() -> dict[str, str]:
    installed = {d.metadata["Name"].replace("-", "_"): d.version for d in metadata.distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


def _before(config: RunConfig, policy: Any, env: VectorEnv, run_dir: Path) -> Evaluation:
    """Success of the start policy, measured once; a resumed run reads it back."""
    path = run_dir / "before.npz"
    if not path.exists():
        result = evaluate(policy, env, split=Split.TEST, episodes=config.evaluate.episodes, clips=config.evaluate.clips)
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
