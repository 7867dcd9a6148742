"""Reading official folders. The oracles are upstream's own files, and flax and orbax as writers."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.serialization import msgpack_serialize
from octo_folders import GOLDEN, PARAMS, SHAPES, assert_golden, copied, flat, flax_tree, nested

from vla_rlaif.policies.octo.official import check_params, read_folder
from vla_rlaif.policies.octo.spec import ModelSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied("tiny_ckpt", tmp_path)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return copied("tiny_ckpt_ocdbt", tmp_path)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(("name", "step"), [("tiny_ckpt", 2000), ("tiny_ckpt_ocdbt", 300000)])
def test_pain_1_folders_of_any_number_of_devices_load_bitwise(name, step, caplog, capfd):
    """#119: tiny_ckpt_ocdbt was saved from two devices; this process has one."""
    found = read_folder(GOLDEN / name)
    assert found.step == step
    assert_golden(found.params)
    check_params(found.params, SHAPES)
    assert not caplog.records and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["zarr", "ocdbt", "zarr3"])
def test_pain_1_folders_of_current_orbax_load_bitwise(kind, database):
    shutil.rmtree(database / "300000")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=kind == "ocdbt", use_zarr3=kind == "zarr3")
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(database / "7" / "default", args=ocp.args.PyTreeSave(nested(PARAMS)))
    assert (database / "7/default/manifest.ocdbt").exists() == (kind == "ocdbt")
    found = read_folder(database)
    assert found.step == 7
    assert_golden(found.params)


def test_pain_1_some_arrays_in_the_tree_and_some_in_zarr_stores(folder):
    """What orbax 0.4.4 leaves when some parameters were sharded: their leaves name the store."""
    path = folder / "2000" / "default"
    (path / "_METADATA").unlink()
    tree = flax_tree(path / "checkpoint")
    head = tree["heads_action"]["diffusion_model"]["cond_encoder"]["Dense_0"]
    store = "heads_action.diffusion_model.cond_encoder.Dense_0.kernel"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "other", args=ocp.args.PyTreeSave({"x": head["kernel"]}))
    (folder / "other" / "x").rename(path / store)
    head["kernel"] = f"PLACEHOLDER://{store}"
    (path / "checkpoint").write_bytes(msgpack_serialize(tree))
    assert_golden(read_folder(folder).params)


@pytest.mark.parametrize("left_out", ["_METADATA", "_sharding", "checkpoint"])
def test_the_stores_need_none_of_orbax_s_own_files(database, left_out):
    (database / "300000" / "default" / left_out).unlink()
    assert_golden(read_folder(database).params)


def test_what_else_is_in_a_folder():
    official = read_folder(GOLDEN / "tiny_ckpt")
    assert official.config == json.loads((GOLDEN / "tiny_ckpt/config.json").read_text())
    assert official.spec == ModelSpec.from_official(official.config["model"])
    expected = flat(flax_tree(GOLDEN / "tiny_ckpt/example_batch.msgpack"))
    found = flat(official.example_batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, strict=True)
    bridge = official.statistics["tiny_bridge"]
    assert bridge["action"]["mean"].dtype == np.float32 and bridge["num_transitions"] == 1024
    np.testing.assert_array_equal(bridge["action"]["mask"], [True] * 6 + [False], strict=True)
    with np.load(GOLDEN / "tiny_golden.npz") as golden:
        np.testing.assert_array_equal(bridge["action"]["std"], golden["stats/tiny_bridge/std"].astype(np.float32))


def test_the_latest_step_is_read_and_others_by_number(folder):
    shutil.copytree(folder / "2000", folder / "10000")
    shutil.copytree(folder / "2000", folder / "30000.orbax-checkpoint-tmp-1")
    shutil.copytree(folder / "2000", folder / "40000.part")
    assert read_folder(folder).step == 10000
    assert read_folder(folder, 2000).step == 2000
    with pytest.raises(ValueError, match=r"no step 3000; it has 2000, 10000\."):
        read_folder(folder, 3000)


def test_pain_14_folders_of_version_1_0_load(folder):
    """#91. pred_horizon, tasks and pad_mask are the old names; two keys did not exist."""

    def age(config):
        kwargs = config["model"]["heads"]["action"]["kwargs"]
        kwargs["pred_horizon"] = kwargs.pop("action_horizon")
        del config["model"]["repeat_task_tokens"], config["model"]["use_correct_attention"]

    edit_json(folder / "config.json", age)
    path = folder / "example_batch.msgpack"
    batch = flax_tree(path)
    batch["tasks"] = batch.pop("task")
    batch["observation"]["pad_mask"] = batch["observation"].pop("timestep_pad_mask")
    path.write_bytes(msgpack_serialize(batch))
    found = read_folder(folder)
    assert found.spec.head.action_horizon == 4
    assert not found.spec.repeat_task_tokens and not found.spec.use_correct_attention
    assert found.example_batch["task"]["image_wrist"].shape == (1, 32, 32, 3)
    assert found.example_batch["observation"]["timestep_pad_mask"].shape == (1, 2)
    assert "tasks" not in found.example_batch and "pad_mask" not in found.example_batch["observation"]


def test_pain_14_a_key_of_a_newer_version_is_named(folder):
    edit_json(folder / "config.json", lambda config: config["model"].update(use_newer_attention=True))
    with pytest.raises(ValueError, match=r"unknown key 'use_newer_attention'.*use_correct_attention"):
        read_folder(folder)


def test_a_read_tree_is_held_once(folder):
    """Eight arrays of 4 MB: the arrays, and less than two more for one of them on its way."""
    params = {f"a/{i}": np.full(1_000_000, i, np.float32) for i in range(8)}
    (folder / "2000/default/checkpoint").write_bytes(msgpack_serialize(nested(params)))
    tracemalloc.start()
    read_folder(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10.5 * 4_000_000


def test_a_model_without_statistics(folder):
    (folder / "dataset_statistics.json").write_text("null")
    assert read_folder(folder).statistics == {}


def test_pain_2_every_parameter_that_differs_is_named():
    """#34, #165: a whole part is one entry, a single parameter is itself."""
    params = {name: value for name, value in PARAMS.items() if "wrist" not in name}
    params["heads_value/kernel"] = np.zeros(3, np.float32)
    params["octo_transformer/readout_action_pos_embedding"] = np.zeros((1, 9, 1, 64), np.float32)
    with pytest.raises(ValueError) as error:
        check_params(params, SHAPES)
    assert str(error.value) == (
        "the parameters are not those of the config.\n"
        "Missing: octo_transformer/obs_wrist_pos_embedding, octo_transformer/obs_wrist_projection/* (2), "
        "octo_transformer/observation_tokenizers_wrist/* (18).\n"
        "Unexpected: heads_value/kernel.\n"
        "Of another shape: octo_transformer/readout_action_pos_embedding had (1, 9, 1, 64) wants (1, 4, 1, 64)."
    )
