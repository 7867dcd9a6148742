"""Folders that cannot be read, and what is said of them."""

import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.serialization import msgpack_serialize
from octo_folders import copied

from vla_rlaif.policies.octo.official import read_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied("tiny_ckpt", tmp_path)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return copied("tiny_ckpt_ocdbt", tmp_path)


def test_a_hub_address_says_how_to_download():
    with pytest.raises(ValueError, match=r"hf download rail-berkeley/octo-small-1.5 --local-dir octo-small-1.5"):
        read_folder(Path("hf://rail-berkeley/octo-small-1.5"))


def test_folders_that_are_not_octo_s(tmp_path, folder):
    with pytest.raises(ValueError, match="there is no folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(ValueError, match=r"config.json, dataset_statistics.json, example_batch.msgpack missing"):
        read_folder(tmp_path)
    with pytest.raises(ValueError, match=r"missing\. Give .*tiny_ckpt, and the step separately"):
        read_folder(folder / "2000")
    with pytest.raises(ValueError, match=r"missing\. Give .*tiny_ckpt, and the step separately"):
        read_folder(folder / "2000" / "default")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"folder: config.json missing"):
        read_folder(folder)


@pytest.mark.parametrize("text", ["[1]", "{}", '{"model": 3}'])
def test_a_config_of_something_else(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json has no 'model' section"):
        read_folder(folder)


def test_broken_json(folder):
    for name in ("config.json", "dataset_statistics.json"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before[:-20])
        with pytest.raises(ValueError, match=rf"{name} is not JSON .*again"):
            read_folder(folder)
        (folder / name).write_bytes(before)


def test_a_folder_without_steps(folder):
    (folder / "2000" / "default").rename(folder / "2000" / "other")
    with pytest.raises(ValueError, match=r"no parameters: wanted a folder <step>/default"):
        read_folder(folder)


@pytest.mark.parametrize("keep", [0, 1, 100, 700_000, -1])
def test_truncated_parameters(folder, keep):
    path = folder / "2000" / "default" / "checkpoint"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"checkpoint is truncated or damaged .*again"):
        read_folder(folder)


def test_a_truncated_example_batch(folder):
    path = folder / "example_batch.msgpack"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"example_batch.msgpack is truncated"):
        read_folder(folder)


def test_a_pointer_of_git_lfs(folder):
    pointer = b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 546000000\n"
    (folder / "2000" / "default" / "checkpoint").write_bytes(pointer)
    with pytest.raises(ValueError, match="git-lfs pointer"):
        read_folder(folder)


def packed(tree: Any) -> bytes:
    return msgpack.Packer().pack(tree)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed([1, 2]), "truncated or damaged"),  # lists are in no such file
        (b"\xdd\x7f\xff\xff\xff", "truncated or damaged"),  # a list that says it has 2**31 - 1 entries
        (packed(7), "holds a int"),
        (packed({"a": msgpack.ExtType(9, b"x")}), "extension type 9 is no array"),
        (packed({"a": msgpack.ExtType(1, packed(((1,), "object", b"x" * 8)))}), "dtype b'object'"),
        (packed({"a": msgpack.ExtType(1, packed(((1,), "f4,O", b"x" * 8)))}), "dtype b'f4,O'"),
        (packed({"a": msgpack.ExtType(1, packed(((3,), "float32", b"x" * 8)))}), "cannot reshape"),
        (packed({"a": msgpack.ExtType(1, packed(((2,), 5, b"x" * 8)))}), "dtype 5"),
        (packed({"a": msgpack.ExtType(1, packed("abc"))}), "truncated or damaged"),
        (packed({"a/b": msgpack.ExtType(1, packed(((), "float32", b"x" * 4)))}), "'a/b' is no name"),
        (packed({1: 2}), "int is not allowed for map key"),
        (packed({}), "there are no parameters"),
        (b"\x81\xa1a" * 3000 + packed({}), "truncated or damaged"),  # nested too deeply
        (msgpack_serialize({"a": np.zeros(2, np.int32)}), "parameter a is int32, wanted a float32"),
        (msgpack_serialize({"a": np.zeros(2, np.float16)}), "parameter a is float16, wanted a float32"),
        (msgpack_serialize({"a": 1.0}), "parameter a is float, wanted a float32"),
        (msgpack_serialize({"a": "text"}), r"lacks the arrays of a: it was copied incompletely"),
    ],
)
def test_trees_that_hold_anything_but_float32_arrays(folder, content, message):
    (folder / "2000" / "default" / "checkpoint").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_folder(folder)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"observation": {"x": "text"}, "task": {}}, "observation/x is str, wanted an array"),
        ({"observation": {}}, "no group 'task'; it has observation"),
        ({"observation": np.zeros(1), "task": {}}, "no group 'observation'"),
    ],
)
def test_example_batches_of_something_else(folder, batch, message):
    (folder / "example_batch.msgpack").write_bytes(msgpack_serialize(batch))
    with pytest.raises(ValueError, match=message):
        read_folder(folder)


def test_missing_pieces_of_a_database(database):
    pieces = sorted((database / "300000").rglob("d/*"), key=lambda path: path.stat().st_size)
    pieces[-1].unlink()  # 744 kB of values
    with pytest.raises(ValueError, match=r"array stores in .* are damaged or incomplete"):
        read_folder(database)


def test_a_database_without_its_manifest(database):
    (database / "300000/default/manifest.ocdbt").unlink()
    with pytest.raises(ValueError, match=r"lacks the arrays of .*it was copied incompletely"):
        read_folder(database)


def test_missing_pieces_of_zarr_stores_are_not_zeros(folder):
    shutil.rmtree(folder / "2000")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "1" / "default", args=ocp.args.PyTreeSave({"a": {"b": np.ones((2, 2), np.float32)}}))
    np.testing.assert_array_equal(read_folder(folder).params["a/b"], np.ones((2, 2), np.float32), strict=True)
    (folder / "1" / "default" / "a.b" / "0.0").unlink()
    with pytest.raises(ValueError, match=r"array stores in .* are damaged or incomplete"):
        read_folder(folder)


def test_an_empty_step(folder):
    (folder / "2001" / "default").mkdir(parents=True)
    with pytest.raises(ValueError, match="neither a file 'checkpoint' nor array stores"):
        read_folder(folder)


@pytest.mark.parametrize("value", ["[[1, 2], [3]]", '"text"', "null", '[1, "a"]'])
def test_statistics_that_are_no_numbers(folder, value):
    (folder / "dataset_statistics.json").write_text(f'{{"action": {{"mean": {value}}}}}')
    with pytest.raises(ValueError, match=r"action: mean is .*wanted numbers or booleans"):
        read_folder(folder)
