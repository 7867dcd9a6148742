"""Datasets on disk come back bit for bit, and a damaged or foreign folder is named."""

import dataclasses
import json

import numpy as np
import pytest
from synthetic import make_episodes

from vla_rlaif.dataset import (
    Demonstrations,
    append_episodes,
    load_demonstrations,
    load_episodes,
    num_episodes,
    save_demonstrations,
)


def make_demonstrations(seed: int = 0) -> Demonstrations:
    """Two demonstrations of 3 and 2 steps; action l of demonstration e is (10 e + l, -1)."""
    rng = np.random.default_rng(seed)
    action = np.full((2, 3, 2), -1.0, np.float32)
    action[..., 0] = [[0, 1, 2], [10, 11, 12]]
    return Demonstrations(
        images={"top": rng.integers(0, 256, (2, 3, 4, 4, 3), np.uint8)},
        state=rng.normal(size=(2, 3, 5)).astype(np.float32),
        instruction=("push it", "lift it"),
        action=action,
        mask=np.array([[True, True, True], [True, True, False]]),
        success=np.array([True, False]),
    )


def assert_same(one, other):
    """Equal dataclasses of arrays, dtypes included."""
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(a):
            assert_same(a, b)
        elif isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                np.testing.assert_array_equal(a[key], b[key], strict=True)
        elif isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, strict=True)
        else:
            assert a == b


def test_samples_are_steps_with_the_chunk_that_follows():
    demos = make_demonstrations()
    obs, action = demos.samples(2)
    # The last action (2 of the first, 11 of the second, which has two steps only) is repeated past the end.
    assert action[..., 0].tolist() == [[0, 1], [1, 2], [2, 2], [10, 11], [11, 11]]
    assert (action[..., 1] == -1).all()
    assert obs.instruction == ("push it",) * 3 + ("lift it",) * 2
    np.testing.assert_array_equal(obs.state, np.concatenate([demos.state[0], demos.state[1, :2]]))
    np.testing.assert_array_equal(obs.images["top"][4], demos.images["top"][1, 1])


def test_a_chunk_may_be_longer_than_the_demonstration():
    assert make_demonstrations().samples(4)[1][..., 0].tolist()[0] == [0, 1, 2, 2]


def test_demonstrations_round_trip(tmp_path):
    save_demonstrations(tmp_path / "d", make_demonstrations(), {"seed": 7})
    assert_same(load_demonstrations(tmp_path / "d"), make_demonstrations())
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert manifest["seed"] == 7 and manifest["kind"] == "demonstrations"
    ended = dataclasses.replace(make_demonstrations(1), is_end_seen=True)
    save_demonstrations(tmp_path / "d", ended, {})  # replaces
    assert_same(load_demonstrations(tmp_path / "d"), ended)


def test_episodes_round_trip_by_shard(tmp_path):
    traced = dataclasses.replace(make_episodes(8), trace={"noise": np.ones((8, 4, 2), np.float32)}, version=5)
    first, second = traced, make_episodes(4, seed=1)
    assert num_episodes(tmp_path) == 0
    assert append_episodes(tmp_path, first, {}) == [f"0:{row}" for row in range(8)]
    assert append_episodes(tmp_path, second, {}) == ["1:0", "1:1", "1:2", "1:3"]
    assert num_episodes(tmp_path) == 12
    (ids0, loaded0), (ids1, loaded1) = load_episodes(tmp_path)
    assert (ids0[-1], ids1) == ("0:7", ["1:0", "1:1", "1:2", "1:3"])
    assert_same(loaded0, first)
    assert_same(loaded1, second)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".npz", ".npz"]


def test_a_truncated_shard_is_named(tmp_path):
    append_episodes(tmp_path, make_episodes(4), {})
    append_episodes(tmp_path, make_episodes(4), {})
    shard = tmp_path / "episodes-00001.npz"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"episodes-00001\.npz is damaged or missing.*Collect the dataset again"):
        load_episodes(tmp_path)


def test_flipped_bytes_are_noticed(tmp_path):
    save_demonstrations(tmp_path, make_demonstrations(), {})
    shard = tmp_path / "demonstrations-00000.npz"
    data = bytearray(shard.read_bytes())
    for at in range(60, 120):
        data[at] ^= 0xFF
    shard.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="is damaged or missing"):
        load_demonstrations(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    append_episodes(tmp_path, make_episodes(4), {})
    (tmp_path / "episodes-00000.npz").unlink()
    with pytest.raises(ValueError, match=r"episodes-00000\.npz is damaged or missing"):
        load_episodes(tmp_path)


def test_a_folder_without_manifest_says_what_makes_one(tmp_path):
    for load in (load_demonstrations, load_episodes):
        with pytest.raises(ValueError, match=r"not a dataset: it has no manifest.json. `vla-rlaif collect`"):
            load(tmp_path / "none")


def test_a_damaged_manifest_and_another_format_are_named(tmp_path):
    append_episodes(tmp_path, make_episodes(4), {})
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[:-5])
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        load_episodes(tmp_path)
    manifest.write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="format 2; this version reads 1"):
        load_episodes(tmp_path)


def test_one_kind_is_not_taken_for_the_other_nor_written_over_it(tmp_path):
    append_episodes(tmp_path / "e", make_episodes(4), {})
    save_demonstrations(tmp_path / "d", make_demonstrations(), {})
    with pytest.raises(ValueError, match="holds episodes, wanted demonstrations"):
        load_demonstrations(tmp_path / "e")
    with pytest.raises(ValueError, match="holds demonstrations, wanted episodes"):
        load_episodes(tmp_path / "d")
    with pytest.raises(ValueError, match="already holds demonstrations; choose another folder for episodes"):
        append_episodes(tmp_path / "d", make_episodes(4), {})
    with pytest.raises(ValueError, match="already holds episodes"):
        save_demonstrations(tmp_path / "e", make_demonstrations(), {})
    assert len(load_episodes(tmp_path / "e")) == 1


def test_a_full_disk_leaves_the_dataset_as_it_was(tmp_path, monkeypatch):
    append_episodes(tmp_path, make_episodes(4), {})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        append_episodes(tmp_path, make_episodes(4), {})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
