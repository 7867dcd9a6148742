"""Demonstrations of a folder, held against an env: what fits is taken as it is, what does not is refused by name."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from lerobot.datasets import LeRobotDataset
from PIL import Image
from pydantic import ValidationError
from test_dataset import assert_same, make_demonstrations

from vla_rlaif import lerobot_import
from vla_rlaif.dataset import load_demonstrations, save_demonstrations
from vla_rlaif.lerobot_export import save_demonstrations as save_lerobot
from vla_rlaif.types import EnvSpec
from vla_rlaif.warm_start_config import WarmStartConfig
from vla_rlaif.warm_start_data import demonstrations_from

SPEC = EnvSpec(
    cameras=("top",),
    image_size=4,
    state_dim=5,
    action_dim=2,
    chunk=1,
    max_decisions=3,
    instructions=("push it", "lift it"),
    fps=20,
)


def made():
    """Actions of a real env: within [-1, 1]."""
    demos = make_demonstrations()
    return dataclasses.replace(demos, action=demos.action / 20)


@pytest.fixture(scope="module", params=["npz", "lerobot"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / request.param
    if request.param == "npz":
        save_demonstrations(path, made(), {})
    else:
        save_lerobot(path, made(), {}, fps=20)
    return path


def take(folder, spec: dict[str, Any] | None = None, **config):
    return demonstrations_from(folder, dataclasses.replace(SPEC, **(spec or {})), WarmStartConfig(**config))


def refuse(folder, match, spec: dict[str, Any] | None = None, **config):
    start = time.process_time()
    with pytest.raises(ValueError, match=match):
        take(folder, spec, **config)
    assert time.process_time() - start < 1


def test_what_fits_is_taken_as_it_is(folder):
    assert_same(take(folder), load_demonstrations(folder))


def test_cameras_are_mapped_and_a_missing_one_names_both_sides(folder):
    key = "observation.images.top" if folder.name == "lerobot" else "top"
    mapped = take(folder, {"cameras": ("left", "right")}, data_cameras={"left": key, "right": key})
    original = load_demonstrations(folder).images["top"]
    assert mapped.images.keys() == {"left", "right"}
    np.testing.assert_array_equal(mapped.images["right"], original)
    refuse(
        folder,
        rf"env has the cameras top, wrist, the dataset {key}; no images for wrist .* warm_start.data_cameras",
        {"cameras": ("top", "wrist")},
    )
    refuse(folder, r"no images for top \(nowhere\)", data_cameras={"top": "nowhere"})
    refuse(folder, "the env has no wrist", data_cameras={"wrist": key})


def test_images_of_another_size_are_refused_unless_scaled(folder):
    refuse(folder, r"other sizes than the env's 6 x 6 pixels: top 4 x 4", {"image_size": 6})
    if folder.name == "lerobot":
        scaled = take(folder, {"image_size": 6}, data_resize=True).images["top"]
        whole = load_demonstrations(folder).images["top"][1, 1]
        assert scaled.shape == (2, 3, 6, 6, 3)
        expected = Image.fromarray(whole).resize((6, 6), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(scaled[1, 1], np.asarray(expected))


def test_dims_are_checked(folder):
    refuse(folder, "state", {"state_dim": 6})
    refuse(folder, "action", {"action_dim": 7})


def test_another_rate_is_refused_unless_wanted(tmp_path):
    save_lerobot(tmp_path / "d", made(), {}, fps=30)
    refuse(tmp_path / "d", r"30 frames a second, the env 20 steps.*warm_start.data_any_fps")
    assert_same(take(tmp_path / "d", data_any_fps=True), take(tmp_path / "d", {"fps": None}))


def test_actions_are_in_the_envs_range_or_brought_there(tmp_path):
    demos = dataclasses.replace(made(), action=np.full((2, 3, 2), 384, np.float32))
    save_demonstrations(tmp_path, demos, {})
    refuse(tmp_path, r"go from \[384, 384\] to \[384, 384\], .*warm_start.data_action_low")
    scaled = take(tmp_path, data_action_low=(0, 256), data_action_high=(512, 384))
    np.testing.assert_array_equal(scaled.action[0, 0], [0.5, 1.0])  # 384 is 3/4 of the way, and all of it
    refuse(tmp_path, "within", data_action_low=(0, 0), data_action_high=(512, 256))  # 384 would be 2
    refuse(tmp_path, "data_action_low has 1 dims, an action 2", data_action_low=(0,), data_action_high=(512,))


def test_numbers_must_be_finite(tmp_path):
    state = make_demonstrations().state.copy()
    state[1, 0, 3] = np.nan
    save_lerobot(tmp_path / "d", dataclasses.replace(made(), state=state), {}, fps=20)
    refuse(tmp_path / "d", r"state of episodes \[1\] is not finite")


def test_tasks_become_instructions_and_can_be_renamed(folder):
    assert take(folder).instruction == ("push it", "lift it")
    assert take(folder, data_tasks={"push it": "shove it"}).instruction == ("shove it", "lift it")


def test_the_first_episodes_can_be_taken(folder):
    assert_same(take(folder, data_episodes=9), take(folder))
    few, every = take(folder, data_episodes=1), take(folder)
    assert few.instruction == ("push it",) and few.mask.shape == (1, 3)
    np.testing.assert_array_equal(few.images["top"], every.images["top"][:1])


def test_what_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    save_lerobot(tmp_path / "d", made(), {}, fps=20)
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 2000 kB\nMemAvailable: 0 kB\n")
    monkeypatch.setattr(lerobot_import, "_MEMINFO", table)
    refuse(tmp_path / "d", r"images of 2 episodes of .* take 0.0 GiB, .*warm_start.data_episodes")


def test_no_dataset_and_no_hub_are_told(tmp_path, monkeypatch):
    refuse(tmp_path / "none", "there is no dataset at")
    refuse(tmp_path, "is not a dataset: it has no manifest.json")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refuse(Path("nobody/nothing"), "is no folder here, and the Hub did not give a dataset")


def test_what_the_hub_gave_before_is_taken_without_it(tmp_path, monkeypatch):
    kept = tmp_path / "datasets--them--reach"
    save_lerobot(kept / "snapshots/abc", made(), {}, fps=20)
    (kept / "refs").mkdir()
    (kept / "refs/v3.0").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("vla_rlaif.lerobot_hub.HF_LEROBOT_HUB_CACHE", tmp_path)
    assert_same(take(Path("them/reach")), load_demonstrations(kept / "snapshots/abc"))


def test_one_source_only():
    with pytest.raises(ValidationError, match="checkpoint and data are two start policies"):
        WarmStartConfig.model_validate({"checkpoint": "a", "data": "b"})
    for low, high in (([0], []), ([0, 1], [1, 1])):
        with pytest.raises(ValidationError, match=r"data_action_low .* is not below data_action_high"):
            WarmStartConfig.model_validate({"data_action_low": low, "data_action_high": high})


def record_elsewhere(folder, tasks: list[list[str]]):
    """As another program may: channels first, no word of success; a frame a task."""
    features = {
        "observation.images.cam_high": {"dtype": "image", "shape": (3, 4, 4), "names": ["channels", "height", "width"]},
        "observation.state": {"dtype": "float32", "shape": (5,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }
    dataset = LeRobotDataset.create("them/elsewhere", 20, features, root=folder, use_videos=False, video_backend="pyav")
    for episode, said in enumerate(tasks):
        for step, task in enumerate(said):
            image = np.full((3, 4, 4), 10 * episode + step, np.uint8)
            image[0] += 100  # red
            state, action = np.full(5, step, np.float32), np.full(2, step / 10, np.float32)
            frame = {"observation.images.cam_high": image, "observation.state": state, "action": action}
            dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
    dataset.finalize()


def test_datasets_of_others_are_read(tmp_path):
    record_elsewhere(tmp_path / "d", [["lift it"] * 2, ["push it"] * 3])
    demos = take(tmp_path / "d", data_cameras={"top": "observation.images.cam_high"})
    assert demos.instruction == ("lift it", "push it") and demos.success.all()
    assert demos.mask.tolist() == [[True, True, False], [True, True, True]]
    np.testing.assert_array_equal(demos.images["top"][1, 2], np.full((4, 4, 3), [112, 12, 12]))
    np.testing.assert_allclose(demos.action[1, :, 0], [0, 0.1, 0.2])


def test_an_episode_has_one_task(tmp_path):
    record_elsewhere(tmp_path / "d", [["lift it"], ["push it", "lift it"]])
    refuse(tmp_path / "d", r"episodes \[1\] change their task", data_cameras={"top": "observation.images.cam_high"})
