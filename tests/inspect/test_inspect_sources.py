"""Datasets as sources: ours, demonstrations, LeRobot's; every frame and number as it was written."""

from dataclasses import replace

import numpy as np
import pytest
from inspect_runs import scene_episodes
from synthetic import make_episodes

from vla_rlaif.dataset import Demonstrations, append_episodes, save_demonstrations
from vla_rlaif.inspect import Filter, load_group, open_source


def same_episode(source, name, episodes, row, *, cameras=("top", "wrist")):
    numbers, length = source.numbers(name), int(episodes.num_decisions[row])
    np.testing.assert_array_equal(numbers.action, episodes.action[row, :length])
    np.testing.assert_array_equal(numbers.logp, episodes.logp[row, :length])
    np.testing.assert_array_equal(numbers.state, episodes.state[row, : len(numbers.state)])
    for camera in cameras:
        frames = source.frames(name)[camera]
        np.testing.assert_array_equal(frames, episodes.images[camera][row, : len(frames)])
    return numbers


def test_shards_of_ours(tmp_path):
    parts = [scene_episodes(2, seed=seed) for seed in (0, 1)]
    for part in parts:
        append_episodes(tmp_path, part, {})
    source = open_source(tmp_path)
    assert source.table.id == tuple(f"{shard}:{row}" for shard in (0, 1) for row in range(8))
    for shard, row in ((0, 0), (1, 7)):
        numbers = same_episode(source, f"{shard}:{row}", parts[shard], row)
        assert len(numbers.state) == len(numbers.action) + 1
    assert source.sizes("0:0") == {"top": (32, 32), "wrist": (32, 32)}
    assert (
        Filter.parse("success:yes").rows(source.table).tolist()
        == np.flatnonzero(np.concatenate([part.success for part in parts])).tolist()
    )
    assert source.sheet("1:3", "top")[:4] == b"RIFF"
    with pytest.raises(ValueError, match="no camera 'left'"):
        source.sheet("1:3", "left")
    with pytest.raises(ValueError, match="no episode '9:0'"):
        source.numbers("9:0")


def test_demonstrations(tmp_path):
    rng = np.random.default_rng(0)
    demos = Demonstrations(
        images={"top": rng.integers(0, 256, (3, 6, 8, 8, 3), dtype=np.uint8)},
        state=rng.normal(size=(3, 6, 2)).astype(np.float32),
        instruction=("reach", "push", "reach"),
        action=rng.normal(size=(3, 6, 4)).astype(np.float32),
        mask=np.arange(6) < np.array([[6], [4], [1]]),
        success=np.array([True, False, True]),
    )
    save_demonstrations(tmp_path, demos, {})
    source = open_source(tmp_path)
    numbers = source.numbers("0:1")
    np.testing.assert_array_equal(numbers.action[:, 0], demos.action[1, :4])
    np.testing.assert_array_equal(source.frames("0:1")["top"], demos.images["top"][1, :4])
    assert numbers.logp.shape == (4, 0) and source.table.decisions.tolist() == [6, 4, 1]
    assert Filter.parse("task:reach success:yes").rows(source.table).tolist() == [0, 2]


def test_rollouts_in_a_lerobot_dataset(tmp_path):
    lerobot_export = pytest.importorskip("vla_rlaif.lerobot_export", reason="extra lerobot")
    episodes = make_episodes(4, length=np.array([4, 2, 3, 1]), success=np.array([True, False, True, False]))
    episodes = replace(episodes, action=np.random.default_rng(0).normal(size=episodes.action.shape))
    lerobot_export.append_episodes(tmp_path / "data", episodes, {}, fps=10)
    source = open_source(tmp_path / "data")
    for row in range(4):
        numbers = same_episode(source, str(row), episodes, row, cameras=("top",))
        assert numbers.executed.tolist() == episodes.executed[row, : len(numbers.action)].tolist()
    table = source.table
    assert table.success.tolist() == [1, 0, 1, 0] and table.instruction == episodes.instruction
    np.testing.assert_allclose(table.truth, episodes.truth)
    assert table.seed.tolist() == episodes.starts.seed.tolist() and len(load_group(source, "0")) == 4


def test_a_lerobot_dataset_of_another_program(tmp_path):
    """No success, no state, no notes of ours: what there is is shown."""
    datasets = pytest.importorskip("lerobot.datasets", reason="extra lerobot")
    features = {
        "observation.images.front": {"dtype": "image", "shape": (16, 24, 3), "names": ["height", "width", "channels"]},
        "action": {"dtype": "float32", "shape": (3,), "names": None},
    }
    foreign = datasets.LeRobotDataset.create("local/x", 10, features, root=tmp_path / "x", use_videos=False)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)
    for episode in (slice(0, 2), slice(2, 5)):
        for frame in frames[episode]:
            action = np.full(3, frame[0, 0, 0], np.float32)
            foreign.add_frame({"observation.images.front": frame, "action": action, "task": "pour"})
        foreign.save_episode(parallel_encoding=False)
    foreign.finalize()
    source = open_source(tmp_path / "x")
    assert source.table.instruction == ("pour", "pour") and np.isnan(source.table.success).all()
    np.testing.assert_array_equal(source.frames("1")["front"], frames[2:])
    np.testing.assert_array_equal(source.numbers("1").action[:, 0, 0], frames[2:, 0, 0, 0])
    assert source.numbers("1").state.shape == (3, 0) and source.sizes("0") == {"front": (16, 24)}
