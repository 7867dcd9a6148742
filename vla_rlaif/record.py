"""The verbs that write datasets: collect and convert.

Compressed .npz is the default format: it needs no extra and takes milliseconds an episode, where LeRobot's writer, with
its statistics and an image file a frame, takes tenths of a second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vla_rlaif import dataset
from vla_rlaif.build import build_env, load_folder
from vla_rlaif.config import RunConfig
from vla_rlaif.dataset import Demonstrations, format_of, load_demonstrations, load_episodes, num_episodes, require_kind
from vla_rlaif.rollout import Split, rollout, take_starts, train_starts
from vla_rlaif.types import Episodes
from vla_rlaif.warm_start_config import WarmStartConfig

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a dataset is written."""

    format: Literal["npz", "lerobot"] = "npz"
    video: bool = False  # of a LeRobotDataset: lossy MP4 files instead of images
    fps: int | None = None  # env steps a second, for an env that does not say

    def require_fits(self, folder: Path) -> None:
        if (found := format_of(folder)) not in (None, self.format):
            raise ValueError(f"{folder} is a dataset in format {found}; choose another folder, or --format {found}.")
        if self.format == "npz" and (self.video or self.fps is not None):
            raise ValueError("--video and --fps are for --format lerobot; npz keeps images as they are, and no rate.")


def collect(config: RunConfig, to: Path, policy: Path | None, episodes: int, storage: Storage, say: Say) -> None:
    storage.require_fits(to)
    if policy is None:
        _collect_demonstrations(config, to, storage, say)
        return
    group = config.algorithm.group_size
    if episodes < group or episodes % group:
        raise ValueError(f"--episodes {episodes} does not split into groups of {group} (algorithm.group_size).")
    require_kind(to, "episodes")
    before = num_episodes(to)  # start states go on where the last shard ended, or the same episodes would come again
    starts = train_starts(config.seed, 0, -(-before // group) + episodes // group, group, Split.REWARD)
    starts = take_starts(starts, np.arange(len(starts.seed))[-episodes:])
    env = build_env(config.env)
    try:
        rate = _rate(storage, env.spec.fps)
        acting = load_folder(policy, config, env.spec)
        played = rollout(acting, env, starts, seed=config.seed, act_batch=config.loop.act_batch)
    finally:
        env.close()
    _append(to, played, {"env": config.env.model_dump(mode="json"), "policy": str(policy)}, storage, rate)
    say(f"{to}: {episodes} episodes more, {played.success.mean():.0%} of them successful")


def convert(config: RunConfig, data: Path, to: Path, storage: Storage, say: Say) -> None:
    """A copy in the other format; the env of the config tells the rate."""
    found = format_of(data)
    if found is None:
        raise ValueError(f"{data} is no dataset; `vla-rlaif collect` makes one.")
    if found == storage.format:
        raise ValueError(f"{data} is in format {found} already; --format names the one to write.")
    if to.exists():
        raise ValueError(f"{to} exists; a copy goes to a folder that does not exist yet.")
    storage.require_fits(to)
    rate = _rate(storage, _env_fps(config, storage))
    about = {"converted": str(data)}
    if dataset.kind_of(data) == "demonstrations":
        demos = load_demonstrations(data)
        _save(to, demos, about, storage, rate)
        say(f"{to}: {len(demos.success)} demonstrations written")
        return
    shards = load_episodes(data)
    for _, played in shards:
        _append(to, played, about, storage, rate)
    say(f"{to}: {sum(len(ids) for ids, _ in shards)} episodes in {len(shards)} shards written")


def _collect_demonstrations(config: RunConfig, to: Path, storage: Storage, say: Say) -> None:
    from vla_rlaif.start import demonstrations

    require_kind(to, "demonstrations")
    if storage.format == "lerobot" and to.exists():  # the same starts would come again, beside the old ones
        raise ValueError(f"{to} exists; demonstrations for LeRobot go to a folder that does not exist yet.")
    rate = _rate(storage, _env_fps(config, storage))
    demos = demonstrations(config, config.warm_start or WarmStartConfig(), say)
    _save(to, demos, {"env": config.env.model_dump(mode="json"), "seed": config.seed}, storage, rate)
    say(f"{to}: {len(demos.success)} demonstrations, {demos.success.mean():.0%} reach the goal within their length")


def _env_fps(config: RunConfig, storage: Storage) -> int | None:
    if storage.format == "npz" or storage.fps is not None:
        return storage.fps  # building the envs of some suites takes a minute
    env = build_env(config.env)
    env.close()
    return env.spec.fps


def _rate(storage: Storage, fps: int | None) -> int:
    """Env steps a second; 0 where none is needed."""
    rate = storage.fps or fps
    if storage.format == "lerobot" and rate is None:
        raise ValueError("this env does not say how many steps a second is; a LeRobotDataset needs it: pass --fps.")
    return rate or 0


def _save(to: Path, demos: Demonstrations, about: Mapping[str, object], storage: Storage, rate: int) -> None:
    if storage.format == "npz":
        dataset.save_demonstrations(to, demos, about)
        return
    from vla_rlaif import lerobot_export

    lerobot_export.save_demonstrations(to, demos, about, fps=rate, video=storage.video)


def _append(to: Path, played: Episodes, about: Mapping[str, object], storage: Storage, rate: int) -> None:
    if storage.format == "npz":
        dataset.append_episodes(to, played, about)
        return
    from vla_rlaif import lerobot_export

    lerobot_export.append_episodes(to, played, about, fps=rate, video=storage.video)
