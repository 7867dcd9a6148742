import errno
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from vla_rlaif.checkpoint import RunCheckpoints, load_policy, save_policy
from vla_rlaif.checkpoint_writer import CheckpointWriter

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
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    checkpoints.save(1, {}, TENSORS)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(2, {}, TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoints.load_latest()[0]["step"] == 1


def wait_for(event: threading.Event) -> None:
    assert event.wait(20)


def test_a_checkpoint_is_written_in_the_background_and_there_at_the_end(tmp_path, monkeypatch):
    """The disk is held up until the writer has been left alone for a while."""
    fsync, may_write = os.fsync, threading.Event()
    monkeypatch.setattr(os, "fsync", lambda file: (wait_for(may_write), fsync(file)))
    checkpoints = RunCheckpoints(tmp_path, keep=2)
    with CheckpointWriter(checkpoints, timeout_s=20.0) as writer:
        writer.save(1, {}, TENSORS)
        writer.check()
        assert not checkpoints.exists()
        may_write.set()
        writer.save(2, {"minutes": 1.5}, TENSORS)  # waits for the first
        assert checkpoints.exists()
    assert checkpoints.load_latest()[0]["minutes"] == 1.5


@pytest.mark.parametrize("noticed", ["check", "save", "exit"])
def test_an_error_of_the_disk_reaches_the_run(tmp_path, monkeypatch, noticed):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(OSError, match="No space left"),
        CheckpointWriter(RunCheckpoints(tmp_path, 2), timeout_s=20.0) as w,
    ):
        w.save(1, {}, TENSORS)
        deadline = time.monotonic() + 20
        while noticed == "check" and time.monotonic() < deadline:
            w.check()
        if noticed == "save":
            w.save(2, {}, TENSORS)


def test_what_went_wrong_first_is_what_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: 1 / 0)
    with (
        pytest.raises(ValueError, match="of the loop"),
        CheckpointWriter(RunCheckpoints(tmp_path, 2), timeout_s=20.0) as w,
    ):
        w.save(1, {}, TENSORS)
        raise ValueError("of the loop")


def test_a_disk_that_hangs_is_an_error(tmp_path, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: wait_for(may_write))
    writer = CheckpointWriter(RunCheckpoints(tmp_path, 2), timeout_s=0.1)
    writer.save(7, {}, TENSORS)
    with pytest.raises(TimeoutError, match=r"checkpoint of step 7 is not written after 0\.1 s"):
        writer.wait()
    may_write.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(20)


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.checkpoint_writer import CheckpointWriter

tensors = {"weight": np.arange(10_000, dtype=np.float32)}
fsync, left = os.fsync, int(sys.argv[2])

def die(file):
    global left
    fsync(file)
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

with CheckpointWriter(RunCheckpoints(Path(sys.argv[1]), 2), timeout_s=20.0) as writer:
    writer.save(1, {}, tensors)
    writer.wait()
    os.fsync = die
    writer.save(2, {}, tensors)
"""


@pytest.mark.parametrize("files_written", [0, 1])
def test_sigkill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, files_written):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(files_written)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    state, tensors, problems = RunCheckpoints(tmp_path, keep=2).load_latest()
    assert (state["step"], problems) == (1, [])
    np.testing.assert_array_equal(tensors["weight"], np.arange(10_000))
