"""Writing official folders. The oracles are upstream's own files, and flax and orbax as readers."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from octo_folders import GOLDEN, PARAMS, assert_golden, flat, vectors

from vla_rlaif.policies.octo.official import OfficialFolder, read_folder, write_folder
from vla_rlaif.policies.octo.spec import DiffusionSpec, L1Spec, LanguageSpec, ModelSpec

CHECK = Path(__file__).parents[1] / "upstream" / "check_orbax_044.py"
OLD_PYTHON = "OCTO_UPSTREAM_PYTHON"


@pytest.fixture(scope="module")
def official() -> OfficialFolder:
    return read_folder(GOLDEN / "tiny_ckpt")


def write(folder: Path, official: OfficialFolder, **changes: Any) -> None:
    names = ("step", "params", "config", "example_batch", "statistics")
    write_folder(folder, **{name: getattr(official, name) for name in names} | changes)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_written_folder_has_upstream_s_bytes(tmp_path, official):
    write(tmp_path / "x", official)
    upstream = GOLDEN / "tiny_ckpt"
    assert files(tmp_path / "x") == {name for name in files(upstream) if not name.startswith("t5-tiny")}
    for name in files(tmp_path / "x") - {"dataset_statistics.json"}:
        assert (tmp_path / "x" / name).read_bytes() == (upstream / name).read_bytes(), name
    statistics = json.loads((tmp_path / "x/dataset_statistics.json").read_text())
    expected = flat(json.loads((upstream / "dataset_statistics.json").read_text()))
    found = flat(statistics)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert np.float32(found[name]).tolist() == np.float32(value).tolist(), name


def test_write_and_read_round_trip(tmp_path, official):
    write(tmp_path / "x", official, step=7)
    found = read_folder(tmp_path / "x")
    assert (found.step, found.config, found.spec) == (7, official.config, official.spec)
    assert_golden(found.params)
    for part in ("example_batch", "statistics"):
        again, before = flat(getattr(found, part)), flat(getattr(official, part))
        assert again.keys() == before.keys()
        for name, value in before.items():
            np.testing.assert_array_equal(again[name], value, strict=True)


def test_current_orbax_reads_what_is_written(tmp_path, official):
    write(tmp_path / "x", official)
    with ocp.CheckpointManager(tmp_path / "x") as manager:
        restored = manager.restore(official.step, args=ocp.args.PyTreeRestore())
    assert_golden({name: np.asarray(value) for name, value in flat(restored).items()})


def test_pain_2_other_heads_and_tokenizers_survive_the_round_trip(tmp_path, official):
    """#34, #165: the config that was trained is the one that is read back, whatever was changed in it."""
    spec = official.spec
    head = L1Spec(readout_key="readout_action", action_horizon=8, action_dim=14)
    for edited in (
        ModelSpec(**(vars(spec) | {"heads": (("action", head),)})),
        ModelSpec(**(vars(spec) | {"observation_tokenizers": spec.observation_tokenizers[1:]})),
        ModelSpec(**(vars(spec) | {"task_tokenizers": (("language", LanguageSpec()),), "max_horizon": 2})),
    ):
        target = tmp_path / str(abs(hash(edited)))
        write(target, official, config=official.config | {"model": edited.to_official()})
        assert read_folder(target).spec == edited


def test_a_second_step_and_no_step_twice(tmp_path, official):
    write(tmp_path / "x", official, step=1)
    before = {name: (tmp_path / "x" / name).read_bytes() for name in files(tmp_path / "x")}
    (tmp_path / "x" / "notes.txt").write_text("mine")
    write(tmp_path / "x", official, step=2, params={"a": np.ones(2, np.float32)})
    assert read_folder(tmp_path / "x").params["a"].sum() == 2
    with pytest.raises(ValueError, match="has a step 1 already"):
        write(tmp_path / "x", official, step=1)
    (tmp_path / "x" / "3").mkdir()
    with pytest.raises(ValueError, match="has a step 3 already"):
        write(tmp_path / "x", official, step=3)
    for name, data in before.items():
        assert (tmp_path / "x" / name).read_bytes() == data, name
    assert (tmp_path / "x" / "notes.txt").read_text() == "mine"


def test_another_model_s_folder_is_left_alone(tmp_path, official):
    write(tmp_path / "x", official, step=1)
    before = {name: (tmp_path / "x" / name).read_bytes() for name in files(tmp_path / "x")}
    head = DiffusionSpec(readout_key="readout_action", action_horizon=8)
    model = ModelSpec(**(vars(official.spec) | {"heads": (("action", head),)})).to_official()
    batch = official.example_batch | {"action": np.zeros((1, 2, 8, 7), np.float32)}
    for changes, name in (
        ({"config": official.config | {"model": model}}, "config.json"),
        ({"config": official.config | {"text_processor": None}}, "config.json"),
        ({"statistics": {"action": vectors(7)}}, "dataset_statistics.json"),
        ({"example_batch": batch}, "example_batch.msgpack"),
    ):
        with pytest.raises(ValueError, match=rf"another model's {name}: write to a new folder"):
            write(tmp_path / "x", official, step=2, **changes)
    write(tmp_path / "x", official, step=2, config=official.config | {"seed": 43})  # no matter of the model
    after = {name: (tmp_path / "x" / name).read_bytes() for name in before}
    assert after == before and read_folder(tmp_path / "x").step == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"config": {"window_size": 2}}, "config has no 'model' section"),
        ({"params": {}}, "no parameters"),
        ({"params": {"a": np.zeros(2)}}, "parameter a is float64"),
        ({"params": {"a": np.zeros(2, np.float32), "a/b": np.zeros(2, np.float32)}}, "a/b lies below another"),
        ({"params": {"a//b": np.zeros(2, np.float32)}}, "is no name"),
        ({"example_batch": {"observation": {"text": np.array(["x"])}}}, "observation/text is <U1"),
        ({"example_batch": {"observation": {"text": [1]}}}, "observation/text is list"),
        ({"statistics": {"action": {"mean": 0.5}}}, "action/mean is float"),
        ({"statistics": {"action": vectors(7) | {"mean": np.zeros(6, np.float32)}}}, "one number per dimension"),
    ],
)
def test_what_is_not_official_is_not_written(tmp_path, official, changes, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "x", official, **changes)
    assert not (tmp_path / "x").exists()


def test_a_step_that_could_not_be_written_is_not_there(tmp_path, official):
    """Numbers that cannot be copied stand for a full disk: nothing appears under the step's name."""

    class Unreadable(np.ndarray):
        def tobytes(self, order=None) -> bytes:
            raise OSError("no space left on device")

    params = PARAMS | {"z": np.zeros(2, np.float32).view(Unreadable)}
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path / "x", official, params=params)
    assert files(tmp_path / "x") == {"config.json", "dataset_statistics.json", "example_batch.msgpack"}
    write(tmp_path / "x", official)
    assert_golden(read_folder(tmp_path / "x").params)


@pytest.mark.skipif(
    OLD_PYTHON not in os.environ,
    reason=f"needs upstream's environment: `make env-octo-upstream`, then {OLD_PYTHON}=<its python>",
)
def test_upstream_s_reader_loads_a_written_folder(tmp_path, official):
    write(tmp_path / "x", official)
    np.savez(tmp_path / "params.npz", **PARAMS)  # pyright: ignore[reportArgumentType]
    np.savez(tmp_path / "example.npz", **flat(official.example_batch))  # pyright: ignore[reportArgumentType]
    command = [
        str(Path(os.environ[OLD_PYTHON]).absolute()),
        str(CHECK),
        "x",
        str(official.step),
        "params.npz",
        "example.npz",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "params: 126 arrays are equal" in done.stdout
