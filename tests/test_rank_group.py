"""Processes that work in step: what travels, and what becomes of them when one of them, or the driver, is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_serving

from vla_rlaif.rank_group import RankError, RankGroup


@pytest.fixture
def group() -> Iterator[RankGroup]:
    made = RankGroup(rank_serving.serve, 2, timeout_s=30)
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    """A process that ended and was not waited for yet counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def ask(group: RankGroup, head: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None):
    return group.ask("work", iter([[(head, arrays or {})] * 2]))


def test_arrays_come_back_as_they_are(group):
    sent = {
        "scalar": np.array(3),
        "empty": np.zeros((0, 4), np.float32),
        "large": np.arange(300_000, dtype=np.float64),
        "turned": np.arange(6, dtype=np.uint8).reshape(2, 3).T,
        "bools": np.array([True, False]),
    }
    for index, (head, arrays) in enumerate(ask(group, {"text": "a", "list": [1, 2.5, None]}, sent)):
        assert head == {"index": index, "head": {"text": "a", "list": [1, 2.5, None]}}
        for name, value in sent.items():
            np.testing.assert_array_equal(arrays[name], 2 * value)
            assert arrays[name].shape == value.shape and arrays[name].dtype == (2 * value).dtype


def test_an_error_shows_the_first_traceback_last(group):
    """The other rank fails too, a little later, as ranks do that wait for one that is gone."""
    with pytest.raises(RankError) as error:
        ask(group, {"raise": 1, "raise_late": 0})
    text = str(error.value)
    assert text.startswith("rank 1 of 2 failed during work:\nTraceback")
    assert text.endswith("KeyError: 'rank 1 has no such camera'")
    assert wait_for_end(group.pids, 5)
    with pytest.raises(RankError, match="The ranks have stopped: rank 1 of 2 failed"):
        ask(group, {})


def test_a_killed_rank_is_named_within_seconds(group):
    begun = time.monotonic()
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match=rf"rank 1 of 2 \(process {group.pids[1]}\) was killed by signal 9"):
        ask(group, {"raise_late": 0})
    assert time.monotonic() - begun < 5
    assert wait_for_end(group.pids, 5)


@pytest.mark.parametrize("large", [False, True], ids=["its answer", "its reading"])
def test_a_rank_that_hangs_is_given_up_at_the_deadline(large):
    """A stopped process neither answers nor reads; what does not fit into the pipe waits for it too."""
    group = RankGroup(rank_serving.serve, 2, timeout_s=1)
    os.kill(group.pids[0], signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(RankError, match=r"did not finish work within 1 s; raise learner\.timeout_s"):
        ask(group, {}, {"x": np.zeros(10_000_000)} if large else {})
    assert time.monotonic() - begun < 5
    assert wait_for_end(group.pids, 5)


def test_a_rank_that_cannot_start_says_why():
    with pytest.raises(RankError, match=r"(?s)failed during start:\nTraceback.*ValueError: rank \d has no policy"):
        RankGroup(rank_serving.refuse, 2, timeout_s=30)


def test_a_driver_that_stops_in_the_middle_leaves_no_ranks(group):
    def messages() -> Iterator[list]:
        yield [({}, {})] * 2
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        group.ask("update", messages())
    with pytest.raises(RankError, match="the driver did not finish update"):
        ask(group, {})
    assert wait_for_end(group.pids, 5)


def test_a_group_that_is_dropped_leaves_no_ranks():
    group = RankGroup(rank_serving.serve, 2, timeout_s=30)
    pids = group.pids
    assert all(map(is_alive, pids))
    del group
    assert wait_for_end(pids, 5)


def test_a_killed_driver_leaves_no_orphans():
    """One rank is in the middle of something and would not notice that its link has closed."""
    driver = subprocess.Popen([sys.executable, rank_serving.__file__], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    driver.kill()
    driver.wait(5)
    driver.stdout.close()
    assert wait_for_end(pids, 5)
