"""The index of a folder, the frames of single episodes, and the sheets that the page shows."""

import io
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from synthetic import make_episodes

from vla_rlaif.dataset import append_episodes
from vla_rlaif.label_page.catalogue import FolderCatalogue
from vla_rlaif.label_page.clips import ClipCache
from vla_rlaif.label_page.shards import read_index
from vla_rlaif.local_page.sheets import columns_of, encode_sheet
from vla_rlaif.preferences.labelled import gather_episodes


@pytest.fixture
def data(tmp_path):
    for seed, length in ((0, np.array([4, 2, 4, 1, 4, 4, 3, 4])), (1, np.full(4, 4))):
        append_episodes(tmp_path / "data", make_episodes(len(length), seed=seed, length=length), {})
    return tmp_path / "data"


def test_the_index_is_that_of_the_whole_episodes(data):
    catalogue = FolderCatalogue(data)
    names, episodes = gather_episodes(data)
    assert catalogue.ids == names
    for key in ("mask", "valid", "success", "truth"):
        np.testing.assert_array_equal(getattr(catalogue.episodes, key), getattr(episodes, key))
    np.testing.assert_array_equal(catalogue.episodes.starts.group, episodes.starts.group)
    assert catalogue.episodes.instruction == episodes.instruction


def test_frames_are_the_episodes_up_to_their_end(data):
    catalogue = FolderCatalogue(data)
    names, episodes = gather_episodes(data)
    found = catalogue.frames(["1:2", "0:3", "0:1", "0:0"])
    assert set(found) == {"1:2", "0:3", "0:1", "0:0"}
    for name, images in found.items():
        row = names.index(name)
        shown = catalogue.shown(name)
        assert shown is not None
        assert (shown.num_frames, shown.sizes) == (episodes.num_decisions[row] + 1, {"top": (8, 8)})
        np.testing.assert_array_equal(images["top"], episodes.images["top"][row, : shown.num_frames])
    assert catalogue.shown("0:8") is None and catalogue.shown("nonsense") is None


def test_cameras_can_be_chosen(tmp_path):
    episodes = make_episodes(4)
    both = replace(episodes, images={"top": episodes.images["top"], "wrist": 255 - episodes.images["top"]})
    append_episodes(tmp_path / "data", both, {})
    catalogue = FolderCatalogue(tmp_path / "data", ["wrist"])
    np.testing.assert_array_equal(catalogue.frames(["0:1"])["0:1"]["wrist"], both.images["wrist"][1])
    assert list(catalogue.frames(["0:1"])["0:1"]) == ["wrist"]
    assert list(FolderCatalogue(tmp_path / "data").frames(["0:1"])["0:1"]) == ["top", "wrist"]
    with pytest.raises(ValueError, match=r"has no camera 'left'; it has top, wrist"):
        FolderCatalogue(tmp_path / "data", ["left"])


def test_a_damaged_shard_is_named(data):
    shard = data / "episodes-00001.npz"
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"episodes-00001.npz is damaged or missing.*Collect the dataset again"):
        FolderCatalogue(data)
    shard.unlink()
    with pytest.raises(ValueError, match=r"episodes-00001.npz is damaged or missing"):
        read_index(data)


def test_shards_of_different_envs_are_not_mixed(data):
    episodes = make_episodes(4)
    append_episodes(data, replace(episodes, images={"side": episodes.images["top"]}), {})
    with pytest.raises(ValueError, match="shard 2 was collected in another env than shard 0"):
        FolderCatalogue(data)


def test_another_kind_of_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a dataset"):
        FolderCatalogue(tmp_path)


@pytest.mark.parametrize(("num", "columns"), [(1, 1), (2, 2), (4, 2), (5, 3), (17, 5)])
def test_a_sheet_holds_every_frame_at_its_place(num, columns):
    frames = np.random.default_rng(num).integers(0, 256, (num, 6, 9, 3), np.uint8)  # 6 high, 9 wide
    sheet = np.asarray(Image.open(io.BytesIO(encode_sheet(frames))).convert("RGB"))
    assert columns_of(num) == columns
    for frame in range(num):
        y, x = 6 * (frame // columns), 9 * (frame % columns)
        np.testing.assert_array_equal(sheet[y : y + 6, x : x + 9], frames[frame])  # small frames lose nothing


def test_large_frames_are_compressed_with_loss():
    ramp = np.linspace(0, 255, 256).astype(np.uint8)
    frame = np.stack([np.tile(ramp, (256, 1)), np.tile(ramp[:, None], (1, 256)), np.zeros((256, 256), np.uint8)], -1)
    data = encode_sheet(np.stack([frame] * 4))
    sheet = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert len(data) < 4 * frame.size / 40
    assert np.abs(sheet[:256, :256] - frame).mean() < 3


def test_a_clip_that_fits_no_picture_is_named():
    with pytest.raises(ValueError, match=r"a clip of 4 frames of 9000 x 8 pixels is too large"):
        encode_sheet(np.zeros((4, 8, 9000, 3), np.uint8))


class Counting:
    """A catalogue that counts how often episodes are read."""

    def __init__(self, catalogue):
        self._catalogue, self.read = catalogue, []

    def shown(self, name):
        return self._catalogue.shown(name)

    def frames(self, names):
        self.read += names
        return self._catalogue.frames(names)


def test_clips_are_read_once_and_memory_is_bounded(data):
    counting = Counting(FolderCatalogue(data))
    cache = ClipCache(counting)
    first = cache.sheet("0:0", "top", also=["0:2", "0:4"])
    assert counting.read == ["0:0", "0:2", "0:4"]
    assert cache.sheet("0:0", "top") is first and cache.sheet("0:4", "top") and counting.read == ["0:0", "0:2", "0:4"]
    assert cache.num_bytes == sum(len(cache.sheet(f"0:{row}", "top")) for row in (0, 2, 4))
    small = ClipCache(counting, max_bytes=len(first) + 1)
    for row in range(8):
        assert small.sheet(f"0:{row}", "top")
        assert small.num_bytes <= len(first) + 1


def test_ten_thousand_episodes_open_in_about_a_second(tmp_path):
    """20 shards of 500 short episodes; the index reads no pixels, so that larger ones take no longer."""
    data = tmp_path / "data"
    append_episodes(data, make_episodes(500), {})
    manifest = json.loads((data / "manifest.json").read_text())
    (name,) = manifest["shards"]
    (data / "manifest.json").write_text(json.dumps(manifest | {"shards": [name] * 20}))
    begun = time.perf_counter()
    catalogue = FolderCatalogue(data)
    assert len(catalogue.ids) == 10_000
    assert time.perf_counter() - begun < 3  # 0.15 s on a quiet machine
