"""Octo as its users know it. Numbers of the original are compared in test_octo_golden.py."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from octo_folders import copied
from octo_golden import CHECKPOINT, GOLDEN, case, counted_compilations, golden, model, noise, with_head, without

from vla_rlaif.policies.octo.adapt import PROPRIO, adapted_spec
from vla_rlaif.policies.octo.instructions import Instructions
from vla_rlaif.policies.octo.octo_model import OctoModel
from vla_rlaif.policies.octo.spec import ContinuousSpec, ImageSpec

TEXTS = json.loads((GOLDEN / "create_tasks.json").read_text())["texts"]
READS: dict[str, Any] = {"readout_key": "readout_action", "action_horizon": 4}


def instructions(octo: OctoModel, **changes: Any) -> OctoModel:
    """With another text processor, or other parameters of the encoder."""
    given = {"params": octo.instructions.params, "text_processor": octo.instructions.text_processor, **changes}
    return dataclasses.replace(octo, instructions=Instructions(**given, near=CHECKPOINT))


# Folders


def test_saved_folders_load_alike(tmp_path: Path) -> None:
    octo = dataclasses.replace(model(), params={name: value + 1 for name, value in model().params.items()})
    octo.save(tmp_path / "octo", 7)
    model().save(tmp_path / "octo", 8)
    found = OctoModel.load(tmp_path / "octo", 7)
    assert found.spec == octo.spec and found.config == octo.config
    assert found.params.keys() == octo.params.keys()
    for name, value in octo.params.items():
        np.testing.assert_array_equal(found.params[name], value)
    latest = OctoModel.load(tmp_path / "octo")
    np.testing.assert_array_equal(
        latest.params["heads_action/diffusion_model/time_preprocess/kernel"] + 1,
        octo.params["heads_action/diffusion_model/time_preprocess/kernel"],
    )
    for name, value in octo.instructions.params.items():
        np.testing.assert_array_equal(latest.instructions.params[name], value)
    made, want = latest.create_tasks(texts=TEXTS), model().create_tasks(texts=TEXTS)  # the tokenizer came along
    np.testing.assert_array_equal(made["language_instruction"]["input_ids"], want["language_instruction"]["input_ids"])
    with pytest.raises(ValueError, match="has a step 7 already"):
        octo.save(tmp_path / "octo", 7)


def test_another_head_survives_the_round_trip(tmp_path: Path) -> None:
    octo = with_head(ContinuousSpec(**READS, action_dim=5))
    octo.save(tmp_path / "octo", 1)
    _, observations, tasks = case()
    found = OctoModel.load(tmp_path / "octo")
    assert found.spec == octo.spec
    np.testing.assert_array_equal(found.sample_actions(observations, tasks), octo.sample_actions(observations, tasks))


def test_a_folder_whose_config_is_another_models_is_refused(tmp_path: Path) -> None:
    folder = copied("tiny_ckpt", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["model"]["heads"]["action"]["kwargs"]["hidden_dim"] = 32
    config["model"]["readouts"]["value"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as raised:
        OctoModel.load(folder)
    assert "Missing: octo_transformer/readout_value_pos_embedding" in str(raised.value)
    assert "reverse_network/Dense_0/kernel had (124, 64) wants (124, 32)" in str(raised.value)


def test_what_is_new_in_an_adapted_model_must_be_allowed() -> None:
    spec = adapted_spec(model().spec, action_dim=3)
    with pytest.raises(ValueError, match=r"allow_new=\('heads_action/diffusion_model/reverse_network/Dense_"):
        model().adapted(spec, seed=0)


def test_a_model_for_another_robot(tmp_path: Path) -> None:
    """With proprioception, without the wrist camera; a later folder knows what it was trained on."""
    _, observations, tasks = case()
    example = model().example_batch
    state = np.linspace(-1, 1, 3 * 2 * 5, dtype=np.float32).reshape(3, 2, 5)
    seen = {**without(example["observation"], "image_wrist"), "proprio": state[:1]}
    spec = adapted_spec(model().spec, cameras={"primary": "image_primary"}, add_lowdim={"proprio": PROPRIO})
    octo, report = model().adapted(
        spec, seed=0, example_batch={**example, "observation": seen}, allow_new=("*obs_proprio_*",), skip=("*wrist*",)
    )
    assert (
        sorted(name.split("/")[1] for name in report.initialised)
        == ["obs_proprio_pos_embedding"] + ["obs_proprio_projection"] * 2
    )
    octo.save(tmp_path / "octo", 0)
    octo = OctoModel.load(tmp_path / "octo")
    both = {**without(observations, "image_wrist"), "proprio": state}
    with pytest.raises(ValueError, match="no tokenizer reads image_wrist of the task"):
        octo.readouts(both, tasks)
    tasks = without(tasks, "image_wrist")
    got = octo.readouts(both, tasks)
    assert got["obs_proprio"].tokens.shape == (3, 2, 5, 64) and "obs_wrist" not in got
    moved = octo.readouts({**both, "proprio": state + 1}, tasks)
    assert np.abs(got["readout_action"].tokens - moved["readout_action"].tokens).max() > 1e-4
    assert "  proprio: float32 [B, T, 5], read by proprio" in octo.describe()
    with pytest.raises(ValueError, match=r"proprio is float32 \[3, 2, 4\], wanted float32 \[B, T, 5\]"):
        octo.readouts({**both, "proprio": state[..., :4]}, tasks)


def test_cameras_that_are_stacked_come_together() -> None:
    (name, part), wrist = model().spec.observation_tokenizers
    assert isinstance(part, ImageSpec)
    stacked = dataclasses.replace(part, obs_stack_keys=("image_.*",))
    octo = dataclasses.replace(
        model(), spec=dataclasses.replace(model().spec, observation_tokenizers=((name, stacked), wrist))
    )
    _, observations, tasks = case()
    with pytest.raises(ValueError, match="primary reads image_primary, image_wrist together; got only image_primary"):
        octo.readouts(without(observations, "image_wrist"), tasks)


# Tasks


def test_goals_and_texts_together() -> None:
    goals = {"image_wrist": golden()["in/task/image_wrist"][:2]}
    tasks = model().create_tasks(goals=goals, texts=TEXTS)
    assert tasks["image_wrist"] is goals["image_wrist"]
    assert (
        tasks["language_instruction"]["input_ids"].tolist()
        == golden()["create_tasks/texts/language_instruction/input_ids"].tolist()
    )
    flags = {key: value.tolist() for key, value in tasks["pad_mask_dict"].items()}
    assert flags == {"image_wrist": [True, True], "language_instruction": [True, True]}


def test_without_a_text_processor_there_is_no_language() -> None:
    octo = instructions(model(), text_processor=None)
    goals = {"image_primary": golden()["in/task/image_primary"]}
    assert octo.create_tasks(goals=goals).keys() == {"image_primary", "pad_mask_dict"}
    with pytest.raises(ValueError, match=r"has no text processor.*cannot read 'pick up the red cube'"):
        octo.create_tasks(texts=TEXTS)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "neither goals nor texts"),
        ({"texts": "push"}, "texts is 'push', wanted a list"),
        ({"texts": []}, "wanted a list"),
        ({"goals": {}}, "goals are empty; the model reads the goals image_primary, image_wrist"),
        ({"goals": {"image_left": np.zeros((1, 64, 64, 3), np.uint8)}}, "goals are image_left; the model reads"),
        ({"goals": {"image_primary": np.zeros((1, 32, 32, 3), np.uint8)}}, r"wanted uint8 \[B, 64, 64, 3\]: resize"),
        ({"goals": {"image_primary": np.zeros((2, 64, 64, 3), np.uint8)}, "texts": ["a"]}, "has 2 rows, wanted 1"),
        ({"texts": ["a " * 20]}, "more than 16 tokens"),
    ],
)
def test_tasks_that_cannot_be_made(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().create_tasks(**kwargs)


def test_a_sentence_may_be_cut_if_asked_for() -> None:
    tasks = model().create_tasks(texts=["cube " * 20], allow_truncation=True)
    assert tasks["language_instruction"]["input_ids"].shape == (1, 16)


# Language


def test_language_as_features() -> None:
    """Those that another program computed, with the slots of a sentence."""
    _, observations, tasks = case()
    features = golden()["inter/full/t5_last_hidden_state"]
    octo = instructions(model(), params={})
    got = octo.sample_actions(observations, {**tasks, "language_instruction": features}, noise=noise())
    np.testing.assert_allclose(got, model().sample_actions(observations, tasks, noise=noise()), atol=1e-3)
    with pytest.raises(ValueError, match="no language encoder, so token ids mean nothing"):
        octo.sample_actions(observations, tasks, noise=noise())


@pytest.mark.parametrize(
    ("language", "message"),
    [
        (["pick up the cube"] * 3, "is a list: make tasks with create_tasks"),
        ("pick up the cube", "is a str: make tasks with create_tasks"),
        ({"input_ids": np.ones((3, 16), int)}, "has input_ids; attention_mask is missing"),
        ({"input_ids": np.ones((3, 8), int), "attention_mask": np.ones((3, 8), int)}, r"wanted int64 \[B, 16\]"),
        ({"input_ids": np.full((3, 16), 64), "attention_mask": np.ones((3, 16), int)}, "from 64 to 64; .* 0 to 63"),
        (np.ones((3, 16, 31), np.float32), r"float32 \[3, 16, 31\], wanted float32 \[B, 16, 32\]"),
        (np.ones((3, 32), np.float32), r"float32 \[3, 1, 32\], wanted float32 \[B, 16, 32\]"),
    ],
)
def test_language_that_is_not_the_models(language: Any, message: str) -> None:
    _, observations, tasks = case()
    with pytest.raises(ValueError, match=message):
        model().readouts(observations, {**tasks, "language_instruction": language})


def test_sentences_are_read_once() -> None:
    octo, ids = instructions(model()), golden()["in/task/language_instruction/input_ids"]
    mask = golden()["in/task/language_instruction/attention_mask"]
    first = octo.instructions.features(ids, mask)
    with counted_compilations() as names:
        again = octo.instructions.features(ids[[2, 0, 1]], mask[[2, 0, 1]])
    np.testing.assert_array_equal(again, first[[2, 0, 1]])
    assert not names and len({row.tobytes() for row in first}) == 3


# For people


def test_description() -> None:
    assert model().describe().splitlines() == [
        "Octo with 354,124 parameters, 18,720 of them in the frozen language encoder",
        "observations (window T: trained with 2, at most 4):",
        "  image_primary: uint8 [B, T, 64, 64, 3], read by primary",
        "  image_wrist: uint8 [B, T, 32, 32, 3], read by wrist",
        "tasks:",
        "  language_instruction: input_ids and attention_mask int [B, 16], or features float32 [B, 16, 32]",
        "  image_primary: uint8 [B, 64, 64, 3], black if absent",
        "  image_wrist: uint8 [B, 32, 32, 3], black if absent",
        "actions: DiffusionActionHead, chunks of 4 with 7 dims",
        "statistics: tiny_bridge (7 action dims), tiny_two_arm (7 action dims)",
    ]
