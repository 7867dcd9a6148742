"""Env workers: faults of a suite, death of either side, and what a worker needs to run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rlaif.envs.processes import ProcessVectorEnv
from vla_rlaif.envs.worker_process import WorkerSpec

TESTS = Path(__file__).parents[1]
UNIT = np.ones((6, 1, 2))
SEEDS = np.array([1, 2, 7, 4, 5, 6])  # the third member, of the first worker's three, has the fault


def make(fault: str = "", *, num_workers: int = 2, timeout_s: float = 30.0, **change: Any) -> ProcessVectorEnv:
    worker = WorkerSpec(
        factory="toy_env:Toy",
        options={"fault": fault} | change.pop("options", {}),
        interpreter=change.pop("interpreter", None),
        extra_path=change.pop("extra_path", ()),
        renderer="egl",
        max_steps=12,
    )
    return ProcessVectorEnv(worker, num_envs=6, num_workers=num_workers, chunk=1, timeout_s=timeout_s, **change)


@pytest.fixture(scope="module")
def healthy() -> Iterator[ProcessVectorEnv]:
    env = make()
    yield env
    env.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def worker_pids(env: ProcessVectorEnv) -> list[int]:
    return [worker.pid for worker in env._workers]


@pytest.mark.parametrize(
    ("fault", "kind", "lost", "says"),
    [
        ("raise", "raised", [2], "the toy is broken"),
        ("nan", "raised", [2], "not finite"),
        ("die", "died", [0, 1, 2], "SIGABRT"),
        ("hang", "hung", [0, 1, 2], "no sign of life for 1 s at member 2"),
        ("spin", "hung", [0, 1, 2], "no sign of life for 1 s at member 2"),
    ],
)
def test_a_fault_costs_one_episode_and_the_others_go_on(
    healthy: ProcessVectorEnv, fault: str, kind: str, lost: list[int], says: str
) -> None:
    env = make(fault, timeout_s=1.0)
    others = np.setdiff1d(np.arange(6), lost)
    expected, now = healthy.reset(SEEDS), env.reset(SEEDS)
    assert now.valid.all()
    begun = time.monotonic()
    for _ in range(3):
        expected, now = healthy.step(UNIT), env.step(UNIT)
    assert time.monotonic() - begun < 10
    assert np.flatnonzero(~now.valid).tolist() == lost
    assert now.done[lost].all() and not now.success[lost].any() and not now.truncated[lost].any()
    np.testing.assert_array_equal(now.obs.state[others], expected.obs.state[others])
    np.testing.assert_array_equal(now.obs.images["top"][others], expected.obs.images["top"][others])
    assert env.faults == {"raised": 0, "hung": 0, "died": 0, kind: 1} and says in env.last_fault
    again = env.reset(np.arange(10, 16))  # a worker that was lost is back
    assert again.valid.all() and not again.done.any()
    np.testing.assert_array_equal(again.obs.state, healthy.reset(np.arange(10, 16)).obs.state)
    env.close()


def test_members_that_had_finished_survive_their_worker() -> None:
    env = make("die")
    env.reset(np.array([1, 7, 3, 4, 5, 6]))
    fast = np.zeros((6, 10, 2))
    fast[0, :, 0] = 1  # the others stand still, and member 1 aborts its worker in its second step
    now = env.step(fast)
    assert now.success[0] and now.valid.tolist() == [True, False, False, True, True, True]
    assert now.done.tolist() == [True, True, True, False, False, False] and now.executed[0] > 1
    env.close()


def test_a_failed_reset_costs_one_member_and_all_failing_is_an_error() -> None:
    env = make("reset")
    start = env.reset(SEEDS)
    assert start.valid.tolist() == [True, True, False, True, True, True] and start.done[2]
    action = UNIT.copy()
    action[start.done] = np.nan
    now = env.step(action)
    assert now.executed.tolist() == [1, 1, 0, 1, 1, 1]
    with pytest.raises(RuntimeError, match=r"(?s)no environment could be reset.*the reset of 7 fails"):
        env.reset(np.full(6, 7))
    assert env.faults["raised"] == 7
    assert env.reset(np.arange(6)).valid.all()
    env.close()


def test_a_worker_killed_between_requests_is_replaced(healthy: ProcessVectorEnv) -> None:
    env = make()
    env.reset(SEEDS)
    os.kill(worker_pids(env)[1], signal.SIGKILL)
    now = env.step(UNIT)
    assert now.valid.tolist() == [True] * 3 + [False] * 3 and "SIGKILL" in env.last_fault
    assert env.state_hash()[3:] == ("invalid",) * 3
    assert env.step(UNIT).valid.tolist() == [True] * 3 + [False] * 3  # nothing waits for the replacement
    assert env.reset(SEEDS).valid.all() and env.faults["died"] == 1
    env.close()


def test_a_reset_outlives_the_death_of_all_workers(healthy: ProcessVectorEnv) -> None:
    env = make()
    for pid in worker_pids(env):
        os.kill(pid, signal.SIGKILL)
    now = env.reset(SEEDS)
    assert now.valid.all() and env.faults["died"] == 2
    np.testing.assert_array_equal(now.obs.state, healthy.reset(SEEDS).obs.state)
    env.close()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"options": {"size": 65}}, ValueError, "size 65 is more than 64"),
        ({"fault": "build"}, RuntimeError, "could not build.*this toy cannot be built"),
        ({"fault": "slow build", "start_timeout_s": 0.5}, RuntimeError, "not ready after 0.5 s"),
        ({"interpreter": Path("/nowhere/python")}, ValueError, "cannot start.*/nowhere/python"),
        ({"num_workers": 0}, ValueError, "num_workers is 0"),
        ({"fault": "no GL"}, ValueError, "apt install libegl1 libgl1"),
    ],
)
def test_what_cannot_start_says_why(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        make(**change)


def test_workers_die_with_a_driver_that_is_killed() -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / 'envs')!r}]\n"
        "import numpy as np; import test_processes as t\n"
        "env = t.make('spin', timeout_s=1000.0); print(*t.worker_pids(env), flush=True)\n"
        "env.reset(t.SEEDS); env.step(np.ones((6, 5, 2)))"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    time.sleep(0.3)  # into the step that never ends
    assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)


def test_close_ends_the_workers_and_frees_what_they_shared() -> None:
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_descriptors()
    closed, dropped = make(), make()
    pids = worker_pids(closed) + worker_pids(dropped)
    closed.close()
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        closed.reset(SEEDS)
    del closed, dropped
    assert not any(is_alive(pid) for pid in pids)
    assert num_descriptors() <= before


def test_a_snapshot_continues_exactly_in_any_member(healthy: ProcessVectorEnv) -> None:
    healthy.reset(SEEDS)
    healthy.step(UNIT)
    saved = healthy.snapshot(4)
    expected = healthy.step(UNIT)
    healthy.reset(np.arange(6))
    back = healthy.restore([0, 5], saved)
    assert back.obs.instruction[0] == back.obs.instruction[5] == "go there" and len(set(healthy.state_hash())) == 5
    now = healthy.step(UNIT)
    for i in (0, 5):
        np.testing.assert_array_equal(now.obs.state[i], expected.obs.state[4])
        np.testing.assert_array_equal(now.obs.images["top"][i], expected.obs.images["top"][4])


def test_members_of_a_group_have_one_hash(healthy: ProcessVectorEnv) -> None:
    healthy.reset(np.array([8, 8, 9, 8, 9, 9]))  # both workers hold members of both groups
    a, b, c, d, e, f = healthy.state_hash()
    assert a == b == d != c == e == f


def test_the_expert_of_a_suite_reaches_the_driver(healthy: ProcessVectorEnv) -> None:
    now = healthy.reset(SEEDS)
    for _ in range(12):
        now = healthy.step(healthy.expert()[:, None])
    assert now.success.all() and now.executed.max() == 0 and not healthy.expert().any()
    assert healthy.seconds["physics"] > 0 and healthy.seconds["render"] > 0


def test_another_interpreter_needs_numpy_and_the_suite_only(tmp_path: Path) -> None:
    python = tmp_path / "python"  # ours, without our folders on its import path
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I "$@"\n')
    python.chmod(0o755)
    env = make("modules", interpreter=python, extra_path=(str(TESTS),))
    loaded = set(env.spec.instructions[0].split())
    assert {"numpy", "toy_env", "vla_rlaif"} <= loaded and not loaded & {"jaxtyping", "pydantic", "gymnasium", "mujoco"}
    assert env.reset(SEEDS).valid.all()
    env.close()
