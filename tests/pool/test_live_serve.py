"""Serving replicas and a robot that notices nothing: real servers, one after the other, and one beside the other."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from live_work import commit, make_work, until

from vla_rlaif.pool.actions import Admit, Drain, Sync, Warm
from vla_rlaif.pool.client import NoAnswerError, PoolRobot
from vla_rlaif.pool.endpoints import announce, live_endpoints
from vla_rlaif.pool.serve_duty import ServeDuty
from vla_rlaif.pool.work import Work

OBSERVATION = {
    "observation/image": np.zeros((16, 16, 3), np.uint8),
    "observation/state": np.ones(4, np.float32),
    "prompt": "reach the goal",
}


@contextlib.contextmanager
def serving(work: Work, name: str) -> Iterator[ServeDuty]:
    """Admitted on entry, ended on exit."""
    duty = ServeDuty(name, work, "192.0.2.1")
    try:
        duty.do(Warm(replica=name, reason=""), lambda: True)
        assert live_endpoints(work.endpoints) == [] or name != "a"  # not before it is admitted
        duty.do(Sync(replica=name, version=0, attempt=0, reason=""), lambda: True)
        duty.do(Admit(replica=name, reason=""), lambda: True)
        yield duty
    finally:
        duty.close()


def drain(duty: ServeDuty) -> None:
    duty.do(Drain(replica="", within=5_000_000, carry_unfinished=False, reason=""), lambda: True)


def ask(work: Work, robot: PoolRobot, num: int = 1) -> list[dict]:
    async def all_of_them() -> list[dict]:
        try:
            return [await robot.infer(OBSERVATION, within_s=10.0) for _ in range(num)]
        finally:
            await robot.close()

    return asyncio.run(all_of_them())


def test_a_server_acts_on_the_averaged_committed_weights_and_follows_the_trainer(tmp_path: Path) -> None:
    work, robot = make_work(tmp_path), PoolRobot(tmp_path / "state" / "endpoints", "arm", seed=0)
    commit(work.run.run_dir, 1)
    with serving(work, "a") as duty:
        [url] = live_endpoints(work.endpoints)
        assert url.startswith("ws://127.0.0.1:")  # it listens there, whatever the node's address
        [reply] = ask(work, robot)
        # Averaged weights are 0.5 everywhere, the state is 1: 4 * 0.5 + 0.5, clipped to 1.
        assert reply["version"] == 1 and (reply["actions"] == 1).all()
        commit(work.run.run_dir, 2)
        until(lambda: duty.report().version == 2, "the next version acts")
        assert ask(work, robot)[0]["version"] == 2
        assert sum(count for bound, count in duty.report().latency if bound == float("inf")) == 2
    assert live_endpoints(work.endpoints) == []


def test_robots_lose_no_request_when_their_server_drains(tmp_path: Path) -> None:
    work = make_work(tmp_path)
    answers: list[list[dict]] = []
    robots = [PoolRobot(work.endpoints, f"arm-{i}", seed=i) for i in range(3)]
    with serving(work, "a") as first, serving(work, "b"):
        threads = [threading.Thread(target=lambda r=r: answers.append(ask(work, r, num=300))) for r in robots]
        for thread in threads:
            thread.start()
        until(lambda: requests(first) > 20, "robots ask the first server")
        drain(first)
        assert len(live_endpoints(work.endpoints)) == 1
        for thread in threads:
            thread.join()
        assert requests(first) < 900  # the second one took over
    assert [len(replies) for replies in answers] == [300] * 3


def requests(duty: ServeDuty) -> float:
    return next(count for bound, count in duty.report().latency if bound == float("inf"))


def test_a_robot_goes_on_from_a_server_that_is_gone_to_one_that_comes(tmp_path: Path) -> None:
    work = make_work(tmp_path)
    announce(work.endpoints, "killed", "ws://127.0.0.1:9")  # nobody listens there any more
    robot = PoolRobot(work.endpoints, "arm", seed=0)
    later = threading.Timer(0.3, lambda: serve_once(work))
    later.start()
    assert len(ask(work, robot)) == 1
    later.join()


def serve_once(work: Work) -> None:
    with serving(work, "b") as duty:
        until(lambda: requests(duty) > 0, "a request")


def test_a_robot_gives_up_at_its_deadline_and_says_why(tmp_path: Path) -> None:
    robot = PoolRobot(tmp_path, "arm", seed=0)
    with pytest.raises(NoAnswerError, match=r"no action within 0\.2 s.*no server is announced"):
        asyncio.run(robot.infer(OBSERVATION, within_s=0.2))
