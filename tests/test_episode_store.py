"""Groups that others have played: used once, within the bound, and counted when they are not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_episodes

from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.episode_store import EpisodeStore, Taken
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.parts import Parts
from vla_rlaif.rollout import train_starts
from vla_rlaif.train import train
from vla_rlaif.types import Episodes

EVERY_STEP = {"checkpoint_every": 1}


def groups(num: int, version: int, seed: int = 0) -> Episodes:
    """``num`` groups of 4; the reward-relevant truth tells them apart."""
    return replace(make_episodes(4 * num, group_size=4, seed=seed), version=version)


def take(store: EpisodeStore, num: int, version: int, staleness: int = 1) -> Taken:
    return store.take(num_groups=num, group_size=4, version=version, staleness=staleness)


def test_a_group_is_used_once_whoever_wrote_it(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.append("a", groups(2, 5, seed=1))
    store.append("b", groups(2, 5, seed=2))
    taken = take(store, 4, version=5)
    assert taken.episodes is not None and taken.evicted == 0
    assert len(np.unique(taken.episodes.starts.group)) == 4  # both workers call their groups 0 and 1
    want = np.concatenate([groups(2, 5, seed=s).truth for s in (1, 2)])
    np.testing.assert_array_equal(taken.episodes.truth, want)
    assert take(store, 4, version=5) == Taken(episodes=None, evicted=0)
    later = EpisodeStore(tmp_path, store.read)  # another process, from the trainer's checkpoint
    assert take(later, 1, version=5).episodes is None
    assert take(EpisodeStore(tmp_path), 4, version=5).episodes is not None  # a checkpoint from before has them again


def test_too_few_groups_wait_and_too_old_ones_are_counted(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.append("a", groups(3, 1))
    store.append("a", groups(2, 2))
    assert take(store, 4, version=2) == Taken(episodes=None, evicted=0)
    assert take(store, 4, version=3) == Taken(episodes=None, evicted=12)  # version 1 is two updates old now
    store.append("a", groups(3, 3))
    taken = take(store, 3, version=3)  # the 2 groups of version 2 are passed over for good
    assert taken.episodes is not None and taken.episodes.version == 3 and taken.evicted == 8
    assert take(store, 1, version=3).episodes is None


def test_what_is_left_of_a_shard_is_evicted(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.append("a", groups(5, 0))
    taken = take(store, 3, version=0)
    assert taken.episodes is not None and len(taken.episodes.success) == 12 and taken.evicted == 8


def test_the_oldest_usable_version_comes_first_and_the_future_waits(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    for version in (3, 4, 5):
        store.append("a", groups(1, version))
    versions = []
    while (taken := take(store, 1, version=4)).episodes is not None:
        versions.append(taken.episodes.version)
    assert versions == [3, 4]
    assert take(store, 1, version=5).episodes is not None


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_training_takes_stored_groups_and_goes_on_playing(tmp_path: Path, backend: str) -> None:
    def build(run: str, steps: int) -> tuple[RunConfig, Parts]:
        data = {
            "env": {"type": "point_reach", "num_envs": 8},
            "policy": {"type": "gaussian", "backend": backend},
            "reward": {"type": "pixel_distance"},
            "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
            "loop": {"steps": steps, "stored": str(tmp_path / "store"), "validation_episodes": 8, **EVERY_STEP},
        }
        config = parse_config(data, source="test")
        env = build_env(config.env)
        return config, build_parts(config, env, build_policy(config.policy, env.spec, 0), tmp_path / run)

    store = EpisodeStore(tmp_path / "store")
    config, parts = build("a", 3)
    for version in (0, 0):  # two shards of the start policy: the second is one update old when it is used
        played = parts.rollouts.play(train_starts(9, version, 2, 4), seed=9).episodes
        assert played is not None
        store.append("night", replace(played, version=version))
    with MetricsLog(tmp_path / "a") as log:
        train(config, parts, log, tmp_path / "a", resume=False, say=lambda text: None)
        lines = log_lines(tmp_path / "a")
    assert [line["stored/used"] for line in lines] == [8, 8, 0]
    assert [line.get("stored/age") for line in lines] == [0, 1, None]
    assert lines[1]["importance"] != 1 and lines[0].get("importance") is None
    assert all(line["ratio_error_first"] == 0 for line in lines)
    again, more = build("a", 4)
    with MetricsLog(tmp_path / "a") as log:
        train(again, more, log, tmp_path / "a", resume=True, say=lambda text: None)
    assert log_lines(tmp_path / "a")[3]["stored/used"] == 0  # nothing is used twice


def log_lines(run: Path) -> list[dict]:
    return read_metrics(run / "metrics.jsonl")
