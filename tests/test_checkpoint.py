import numpy as np
import pytest

from vla_rlaif.checkpoint import RunCheckpoints, load_policy, save_policy

TENSORS = {"a/b": np.arange(6, dtype=np.float32).reshape(2, 3), "version": np.array(3)}


def test_policy_folder_round_trip(tmp_path):
    save_policy(tmp_path / "p", {"config": {"type": "octo"}}, TENSORS)
    metadata, weights = load_policy(tmp_path / "p")
    assert metadata == {"config": {"type": "octo"}}
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(weights[name], value, strict=True)
    save_policy(tmp_path / "p", {"config": {}}, TENSORS)  # replaces
    assert load_policy(tmp_path / "p")[0] == {"config": {}}
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_missing_and_truncated_policy(tmp_path):
    with pytest.raises(ValueError, match="no policy checkpoint"):
        load_policy(tmp_path / "none")
    save_policy(tmp_path / "p", {}, TENSORS)
    file = tmp_path / "p" / "params.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        load_policy(tmp_path / "p")


def test_latest_run_checkpoint_wins_and_old_ones_go(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    assert not checkpoints.exists()
    for step in (2, 4, 10):
        checkpoints.save(step, {"minutes": step / 2}, TENSORS)
    state, tensors, problems = checkpoints.load_latest()
    assert (state["step"], state["minutes"], problems) == (10, 5.0, [])
    np.testing.assert_array_equal(tensors["a/b"], TENSORS["a/b"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000010"]


def test_the_step_comes_from_the_content(tmp_path):
    RunCheckpoints(tmp_path, keep=2).save(7, {}, TENSORS)
    (tmp_path / "step-000007").rename(tmp_path / "step-000099")
    assert RunCheckpoints(tmp_path, keep=2).load_latest()[0]["step"] == 7


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_a_torn_checkpoint_falls_back_to_the_one_before(tmp_path, name):
    checkpoints = RunCheckpoints(tmp_path, keep=3)
    checkpoints.save(5, {}, TENSORS)
    checkpoints.save(6, {}, TENSORS)
    torn = tmp_path / "step-000006" / name
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    state, _, problems = checkpoints.load_latest()
    assert state["step"] == 5 and len(problems) == 1 and "step-000006" in problems[0]


def test_nothing_to_resume_says_why(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    with pytest.raises(ValueError, match="nothing to resume from"):
        checkpoints.load_latest()
    checkpoints.save(1, {}, TENSORS)
    (tmp_path / "step-000001" / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"nothing to resume from: .*checksum"):
        checkpoints.load_latest()


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    """The write fails half way; the checkpoint before it stays whole and no half folder is left."""
    import errno
    import os

    checkpoints = RunCheckpoints(tmp_path, keep=2)
    checkpoints.save(1, {}, TENSORS)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(2, {}, TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoints.load_latest()[0]["step"] == 1
