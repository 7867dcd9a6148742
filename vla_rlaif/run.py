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

from vla_rlaif.build import (
    build_env,
    build_parts,
    build_policy,
    check_reward,
    demonstrated,
    lerobot_export,
    load_folder,
    measure_statistics,
)
from vla_rlaif.checkpoint import RunCheckpoints, WholeFolder, load_policy, save_policy, write_whole
from vla_rlaif.collect import collect_demonstrations
from vla_rlaif.config import RunConfig, cautions
from vla_rlaif.dataset import Demonstrations, load_demonstrations, save_demonstrations
from vla_rlaif.env_config import ProcessEnvConfig, TabletopConfig
from vla_rlaif.evaluate import Evaluation, evaluate
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.lerobot_config import LeRobotSettings
from vla_rlaif.metrics import MetricsLog
from vla_rlaif.policy_config import OctoSettings, VLASettings
from vla_rlaif.report import write_report
from vla_rlaif.rollout import Split, train_starts
from vla_rlaif.train import train
from vla_rlaif.warm_start_config import WarmStartConfig
from vla_rlaif.warm_start_data import demonstrations_from

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
    if config.algorithm.anchor_coef:
        run_demonstrations(config, env, run_dir, say)
    if not isinstance(config.policy, VLASettings):
        return build_policy(config.policy, env.spec, config.seed)
    if not folder.exists():
        warm = config.warm_start
        if warm is None:
            policy = build_policy(config.policy, env.spec, config.seed)
            _say_adaptation(policy, say)
        elif warm.checkpoint is not None:
            policy = load_folder(warm.checkpoint, config, env.spec)
        else:
            policy = imitated_policy(config, run_demonstrations(config, env, run_dir, say), env, say)
        weights = {k: np.asarray(v) for k, v in policy.params.items()}
        save_policy(folder, policy.metadata(), weights, also=lerobot_export(config.policy, policy))
    policy = load_folder(folder, config, env.spec)
    if isinstance(config.policy, OctoSettings):
        policy.freeze_reference()
    return policy


def _say_adaptation(policy: Any, say: Say) -> None:
    """What an official folder gave, and what is new."""
    if "adaptation" in policy.metadata():
        say(policy.metadata()["adaptation"]["summary"])


def run_demonstrations(config: RunConfig, env: VectorEnv, run_dir: Path, say: Say) -> Demonstrations:
    """Those of the warm start. An anchor needs them as long as the run lasts, so they are kept in its directory."""
    warm, folder = config.warm_start, run_dir / "demonstrations"
    assert warm is not None
    if folder.exists():
        return load_demonstrations(folder)
    if warm.data is not None:
        demos = demonstrations_from(warm.data, env.spec, warm)
    else:
        demos = demonstrations(config, warm, say)
    if config.algorithm.anchor_coef:
        with WholeFolder(folder) as part:
            save_demonstrations(part, demos, {"env": config.env.model_dump(mode="json"), "seed": config.seed})
    return demos


def demonstrations(config: RunConfig, warm: WarmStartConfig, say: Say) -> Demonstrations:
    needed = config.env.model_copy(update={"num_envs": min(config.env.num_envs, warm.collect.episodes)})
    env = build_env(needed, max_steps=_demonstration_steps(config, warm))
    try:
        demos = collect_demonstrations(env, warm.collect, config.seed)
    finally:
        env.close()
    say(f"collected {len(demos.success)} demonstrations, {int(demos.mask.sum())} steps")
    return demos


def _demonstration_steps(config: RunConfig, warm: WarmStartConfig) -> int:
    chunk = config.env.chunk if isinstance(config.env, TabletopConfig | ProcessEnvConfig) else 1
    return -(-(warm.collect.scatter_steps + warm.collect.max_steps + 1) // chunk) * chunk


def imitated_policy(config: RunConfig, demos: Demonstrations, env: VectorEnv, say: Say) -> Any:
    """Fit a fresh policy to demonstrations; normalisation statistics come from them."""
    assert config.warm_start is not None
    if config.policy.backend == "jax":
        from vla_rlaif.jax_imitation import imitate
    else:
        from vla_rlaif.torch_imitation import imitate

    window = config.policy.window if isinstance(config.policy, OctoSettings) else 1
    obs, action = demos.samples(env.spec.chunk, window)
    state = obs.state.reshape(-1, obs.state.shape[-1])
    statistics = measure_statistics(config.policy, action.reshape(-1, action.shape[-1]), state)
    policy = build_policy(config.policy, env.spec, config.seed, statistics=statistics)
    if isinstance(config.policy, LeRobotSettings):  # it brings its own window, and may predict more than is executed
        obs, action = demonstrated(demos, config.policy, policy, env.spec)
    _say_adaptation(policy, say)
    on_start = lambda trained, frozen: say(f"imitate: {trained:,} parameters trained, {frozen:,} frozen")  # noqa: E731
    on_step = lambda step, loss: say(f"imitate step {step}: loss {loss:.4f}")  # noqa: E731
    settings = config.warm_start.imitate
    fitted = imitate(policy, obs, action, settings, seed=config.seed, on_start=on_start, on_step=on_step)
    policy.load(fitted, 0)
    return policy


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
        same = [k for k in RunConfig.model_fields if k not in ("out", "loop")]
        differ = [k for k in same if getattr(old, k) != getattr(new, k)]
        if differ:
            raise ValueError(
                f"{run_dir} was started with other settings in: {', '.join(differ)}. Resume with {saved} or start anew."
            )


def _without_layout(config: RunConfig) -> RunConfig:
    """A checkpoint holds whole tensors, so a run may go on with other devices."""
    layout = {"devices": None, "sharding": "replicated", "timeout_s": 1}
    return config.model_copy(update={"learner": config.learner.model_copy(update=layout)})


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
