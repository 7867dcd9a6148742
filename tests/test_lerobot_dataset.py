"""LeRobotDataset out and in: ours come back bit for bit, LeRobot reads them itself, and what is not whole is named."""

import dataclasses
import json
import shutil
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot.datasets import LeRobotDataset, LeRobotDatasetMetadata, resolve_delta_timestamps
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.utils.feature_utils import dataset_to_policy_features
from synthetic import make_episodes
from test_dataset import assert_same, make_demonstrations
from torch.utils.data import DataLoader

from vla_rlaif.dataset import format_of, kind_of, load_demonstrations, load_episodes, num_episodes, require_kind
from vla_rlaif.lerobot_export import append_episodes, save_demonstrations
from vla_rlaif.lerobot_files import open_files
from vla_rlaif.types import Episodes

FPS = 20  # env steps a second; decisions of 2 actions are at 10


def make_rollouts(num: int, seed: int, version: int, length: list[int]) -> Episodes:
    """Everything random; what the policy said after the end is zeros, which is how it comes back."""
    rng = np.random.default_rng(seed)
    plain = make_episodes(num, seed=seed, group_size=2, length=np.array(length), success=rng.random(num) < 0.5)
    live = plain.mask
    zeroed = lambda values: np.where(live.reshape(*live.shape, *[1] * (values.ndim - 2)), values, 0)  # noqa: E731
    draw = lambda *shape: zeroed(rng.normal(size=(num, 4, *shape)).astype(np.float32))  # noqa: E731
    return dataclasses.replace(
        plain,
        action=draw(2, 2),
        logp=draw(3),
        trace={
            "chain": draw(3, 2, 2),
            "step": zeroed(rng.integers(0, 9, (num, 4))),
            "flag": zeroed(rng.integers(0, 2, (num, 4, 1))).astype(bool),
        },
        executed=np.where(live, rng.integers(1, 3, (num, 4)), 0),
        valid=rng.random(num) < 0.5,
        version=version,
    )


FIRST, SECOND = make_rollouts(4, 0, 7, [1, 4, 3, 2]), make_rollouts(2, 1, 8, [4, 1])


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lerobot") / "rollouts"
    assert append_episodes(folder, FIRST, {"policy": "a"}, fps=FPS) == ["0:0", "0:1", "0:2", "0:3"]
    assert append_episodes(folder, SECOND, {"policy": "b"}, fps=FPS) == ["1:0", "1:1"]
    return folder


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lerobot") / "demonstrations"
    save_demonstrations(folder, make_demonstrations(), {"seed": 3}, fps=FPS)
    return folder


def test_rollouts_come_back_bit_for_bit_by_shard(rollouts):
    (ids_first, first), (ids_second, second) = load_episodes(rollouts)
    assert (ids_first, ids_second) == (["0:0", "0:1", "0:2", "0:3"], ["1:0", "1:1"])
    assert_same(first, FIRST)
    assert_same(second, SECOND)
    assert (format_of(rollouts), kind_of(rollouts), num_episodes(rollouts)) == ("lerobot", "episodes", 6)
    assert [s["policy"] for s in json.loads((rollouts / "meta/vla_rlaif.json").read_text())["shards"]] == ["a", "b"]


def test_lerobot_reads_rollouts_itself(rollouts):
    there = LeRobotDataset("any/name", root=rollouts, video_backend="pyav")
    assert (there.num_episodes, len(there), there.fps) == (6, 1 + 4 + 3 + 2 + 4 + 1, 10)
    third: Any = there[3]  # episode 0 has one frame: this is decision 2 of episode 1
    np.testing.assert_array_equal(third["action"], FIRST.action[1, 2].reshape(-1))
    image = np.round(third["observation.images.top"].numpy().transpose(1, 2, 0) * 255)
    np.testing.assert_array_equal(image, FIRST.images["top"][1, 2])
    np.testing.assert_array_equal(third["rollout.logp"], FIRST.logp[1, 2])
    assert third["task"] == FIRST.instruction[1] and third["timestamp"] == pytest.approx(0.2)
    last: Any = there[4]
    assert last["next.done"] and not third["next.done"]
    assert bool(last["next.success"]) == FIRST.success[1] and float(last["next.reward"]) == FIRST.success[1]
    # Nothing but these may become an input or an output of a LeRobot policy.
    features = dataset_to_policy_features(there.features)
    assert features.keys() == {"observation.images.top", "observation.state", "action"}
    assert features["action"].shape == (4,)
    live = np.concatenate([e.action[e.mask].reshape(-1, 4) for e in (FIRST, SECOND)])
    stats: Any = there.meta.stats
    np.testing.assert_allclose(stats["action"]["mean"], live.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(stats["action"]["std"], live.std(axis=0), rtol=1e-4)


@pytest.mark.parametrize("kind, chunk, action_dim", [("rollouts", 1, 4), ("demonstrations", 2, 2)])
def test_lerobot_trains_on_them_as_they_are(request, kind, chunk, action_dim):
    """Its own policy, statistics, processors and loader, without a word about what kind of dataset this is."""
    root = request.getfixturevalue(kind)
    config = ACTConfig(
        **{"chunk_size": chunk, "n_action_steps": chunk, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16},
        **{"n_encoder_layers": 1, "use_vae": False, "pretrained_backbone_weights": None, "device": "cpu"},
    )
    meta = LeRobotDatasetMetadata("any/name", root=root)
    ahead: Any = resolve_delta_timestamps(config, meta)
    dataset = LeRobotDataset("any/name", root=root, delta_timestamps=ahead, video_backend="pyav")
    policy = make_policy(config, ds_meta=meta)
    stats: Any = meta.stats
    prepare, _ = make_pre_post_processors(config, dataset_stats=stats)
    batch = next(iter(DataLoader(dataset, batch_size=3)))
    assert batch["action"].shape == (3, chunk, action_dim)
    loss, _ = policy(prepare(batch))
    loss.backward()
    assert torch.isfinite(loss)


def test_given_rewards_are_in_the_last_frame(tmp_path):
    reward = np.array([0.25, -1.5])
    append_episodes(tmp_path / "r", SECOND, {}, fps=FPS, reward=reward)
    there = LeRobotDataset("any/name", root=tmp_path / "r", video_backend="pyav")
    assert [float(r) for r in there.hf_dataset["next.reward"]] == [0, 0, 0, 0.25, -1.5]


def test_demonstrations_come_back_and_have_a_frame_an_env_step(demonstrations):
    made, loaded = make_demonstrations(), load_demonstrations(demonstrations)
    assert kind_of(demonstrations) == "demonstrations"
    live = made.mask
    blank = lambda a: np.where(live.reshape(*live.shape, *[1] * (a.ndim - 2)), a, 0).astype(a.dtype)  # noqa: E731
    images = {k: blank(v) for k, v in made.images.items()}
    assert_same(loaded, dataclasses.replace(made, images=images, state=blank(made.state), action=blank(made.action)))
    there = LeRobotDataset("any/name", root=demonstrations, video_backend="pyav")
    assert (len(there), there.fps) == (5, FPS)
    assert [bool(s) for s in there.hf_dataset["next.success"]] == [False, False, True, False, False]


def test_videos_are_close(tmp_path):
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    frame = np.stack(
        [np.tile(ramp, (64, 1)), np.tile(ramp[:, None], (1, 64)), np.full((64, 64), 90, np.uint8)], axis=-1
    )
    demos = dataclasses.replace(make_demonstrations(), images={"top": np.tile(frame, (2, 3, 1, 1, 1))})
    save_demonstrations(tmp_path / "v", demos, {}, fps=FPS, video=True)
    assert len(list((tmp_path / "v/videos").rglob("*.mp4"))) == 1
    loaded = load_demonstrations(tmp_path / "v")
    difference = np.abs(loaded.images["top"].astype(int) - demos.images["top"])[demos.mask]
    assert difference.max() <= 32 and difference.mean() < 4
    np.testing.assert_array_equal(loaded.action[demos.mask], demos.action[demos.mask])
    next(iter((tmp_path / "v/videos").rglob("*.mp4"))).unlink()
    with pytest.raises(ValueError, match=r"half-written: videos/.*mp4 is missing"):
        load_demonstrations(tmp_path / "v")


def test_a_video_needs_a_whole_rate_and_a_size_that_its_encoder_survives(tmp_path):
    with pytest.raises(ValueError, match=r"videos need 64 pixels a side, observation.images.top has fewer"):
        append_episodes(tmp_path / "v", SECOND, {}, fps=FPS, video=True)
    with pytest.raises(ValueError, match=r"whole number of frames a second, not 12\.5"):
        append_episodes(tmp_path / "v", SECOND, {}, fps=25, video=True)
    assert not (tmp_path / "v").exists()


def test_what_was_saved_before_a_failure_is_kept(tmp_path, monkeypatch):
    frames = []

    def full_disk(dataset, frame, add=LeRobotDataset.add_frame):
        frames.append(frame)
        if len(frames) == 7:  # in the third episode
            raise OSError(28, "No space left on device")
        add(dataset, frame)

    monkeypatch.setattr(LeRobotDataset, "add_frame", full_disk)
    with pytest.raises(OSError, match="No space"):
        append_episodes(tmp_path / "r", FIRST, {}, fps=FPS)
    monkeypatch.undo()
    ((ids, kept),) = load_episodes(tmp_path / "r")
    assert ids == ["0:0", "0:1"]
    np.testing.assert_array_equal(kept.action, FIRST.action[:2])
    assert len(LeRobotDataset("any/name", root=tmp_path / "r", video_backend="pyav")) == 5
    append_episodes(tmp_path / "r", SECOND, {}, fps=FPS)
    assert_same(load_episodes(tmp_path / "r")[1][1], SECOND)


def test_a_dataset_without_finalize_is_named(tmp_path):
    features = {"observation.state": {"dtype": "float32", "shape": (2,), "names": None}}
    dataset = LeRobotDataset.create("local/r", 10, features, root=tmp_path / "r", use_videos=False)
    with pytest.raises(ValueError, match="has no episodes"):
        open_files(tmp_path / "r")
    for _ in range(2):
        dataset.add_frame({"observation.state": np.zeros(2, np.float32), "task": "reach"})
    dataset.save_episode()
    shutil.copytree(tmp_path / "r", tmp_path / "killed")
    dataset.finalize()
    assert open_files(tmp_path / "r").lengths.tolist() == [2]
    start = time.process_time()
    with pytest.raises(ValueError, match=r"killed is half-written: .*`finalize`; record it again"):
        load_demonstrations(tmp_path / "killed")
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: shutil.rmtree(f / "meta/episodes"),
        lambda f: shutil.rmtree(f / "data"),
        lambda f: (f / "meta/tasks.parquet").unlink(),
        lambda f: (f / "data/chunk-000/file-000.parquet").write_bytes(b"PAR1" + bytes(100)),
        lambda f: (f / "data/chunk-000/file-001.parquet").unlink(),
    ],
)
def test_a_part_that_is_missing_or_cut_is_named(rollouts, tmp_path, damage):
    shutil.copytree(rollouts, tmp_path / "r")
    damage(tmp_path / "r")
    for use in (load_episodes, num_episodes, lambda f: append_episodes(f, SECOND, {}, fps=FPS)):
        with pytest.raises(ValueError, match=r"r is half-written: .*record it again"):
            use(tmp_path / "r")


def test_a_shard_that_was_never_noted_is_named(rollouts, tmp_path):
    """Killed between LeRobot's last word and ours."""
    shutil.copytree(rollouts, tmp_path / "r")
    notes = json.loads((tmp_path / "r/meta/vla_rlaif.json").read_text())
    (tmp_path / "r/meta/vla_rlaif.json").write_text(json.dumps({**notes, "shards": notes["shards"][:1]}))
    with pytest.raises(ValueError, match=r"half-written: it has 6 episodes in shards of \[4\]"):
        load_episodes(tmp_path / "r")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"codebase_version": "v2.1"}, r"format v2.1, wanted v3.0; convert it"),
        ({"total_episodes": 0}, "has no episodes"),
        ({"total_frames": 99}, r"half-written: data has 15 rows, meta/info.json says 99"),
        (None, "info.json is damaged"),
    ],
)
def test_what_info_says_is_checked(rollouts, tmp_path, change, message):
    shutil.copytree(rollouts, tmp_path / "r")
    path = tmp_path / "r/meta/info.json"
    text = path.read_text()
    path.write_text(text[:-20] if change is None else json.dumps(json.loads(text) | change))
    with pytest.raises(ValueError, match=message):
        load_episodes(tmp_path / "r")


def test_an_image_that_is_cut_is_named(demonstrations, tmp_path):
    shutil.copytree(demonstrations, tmp_path / "d")
    path = tmp_path / "d/data/chunk-000/file-000.parquet"
    table = pq.ParquetFile(path).read()
    key = "observation.images.top"
    cut = [{**image, "bytes": image["bytes"][:50]} for image in table[key].to_pylist()]
    column = table.schema.get_field_index(key)
    pq.write_table(table.set_column(column, table.schema.field(column), pa.array(cut, table[key].type)), path)
    with pytest.raises(ValueError, match=r"file-000.parquet has an image that cannot be read"):
        load_demonstrations(tmp_path / "d")


def test_only_the_same_is_appended(rollouts, demonstrations, tmp_path):
    copy = tmp_path / "r"
    shutil.copytree(rollouts, copy)
    longer = dataclasses.replace(SECOND, logp=SECOND.logp[..., :2])
    with pytest.raises(ValueError, match=r"other features .*rollout.logp: \('float32', \(3,\)\), not .*choose another"):
        append_episodes(copy, longer, {}, fps=FPS)
    with pytest.raises(ValueError, match=r"10.0 frames a second, the new episodes 15"):
        append_episodes(copy, SECOND, {}, fps=30)
    with pytest.raises(ValueError, match="keep the episodes of one env and policy in a folder"):
        append_episodes(copy, dataclasses.replace(SECOND, trace={}), {}, fps=FPS)
    with pytest.raises(ValueError, match=r"holds demonstrations, these are episodes"):
        append_episodes(demonstrations, SECOND, {}, fps=FPS)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="exists and is no LeRobotDataset"):
        append_episodes(tmp_path / "other", SECOND, {}, fps=FPS)
    assert num_episodes(copy) == 6


def test_kinds_are_not_mixed_up(rollouts, demonstrations):
    with pytest.raises(ValueError, match="holds demonstrations, wanted episodes"):
        load_episodes(demonstrations)
    with pytest.raises(ValueError, match=r"holds episodes, wanted demonstrations"):
        load_demonstrations(rollouts)
    with pytest.raises(ValueError, match="already holds episodes; choose another folder for demonstrations"):
        require_kind(rollouts, "demonstrations")


def test_an_episode_without_a_frame_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"episodes \[1\] have no frame"):
        append_episodes(tmp_path / "r", make_rollouts(2, 0, 0, [2, 0]), {}, fps=FPS)
