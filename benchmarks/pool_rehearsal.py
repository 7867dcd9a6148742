"""A rehearsal of a live pool: Ray with fake GPUs, schedulers that are processes, robots that never stop asking.

Used by pool_live.py. Everything runs on this machine; times are real seconds unless they say pool time.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import yaml
from ray.cluster_utils import Cluster

from vla_rlaif.pool.client import NoAnswerError, PoolRobot
from vla_rlaif.reward_models.pixel_distance import PixelDistance
from vla_rlaif.types import Episodes

STORE_BYTES = 80 * 2**20  # of Ray's object store: nothing large goes through it
DEADLINE_S = 5.0  # of a robot's request: after that it has failed
PAUSE_S = float(os.environ.get("POOL_REHEARSAL_PAUSE_S", "0.2"))  # of a training step, so that a run lasts a day


def slow_reward(episodes: Episodes) -> np.ndarray:
    """The reward of the rehearsed run."""
    time.sleep(PAUSE_S)
    return PixelDistance().score(episodes)


@contextlib.contextmanager
def cluster(nodes: int, gpus: int) -> Iterator[Cluster]:
    """A Ray cluster with fake GPUs."""
    here = str(Path(__file__).parent)  # so that the trainers find `slow_reward`
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled"}
    made = Cluster()
    try:
        for index in range(nodes):
            node: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "node_name": f"node-{index}"}
            if index == 0:  # Ray's 15 would let everything else on this machine go before the robots
                node["_system_config"] = {"worker_niceness": 0}
            made.add_node(**node, object_store_memory=STORE_BYTES, include_dashboard=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@dataclass
class Schedulers:
    """Processes of `pool run`: one has the lease, the others stand by."""

    pool: Path
    run: Path
    address: str
    log: Path
    lease_s: float
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        flags = ["--address", self.address, "--fake-gpus", "--poll-s", "0.25", "--idle-s", "0.5"]
        flags += ["--lease-s", str(self.lease_s), "--serve.port", "0", "--serve.max-batch", "4", "--serve.fixed-batch"]
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "vla_rlaif", "pool", "run", str(self.pool), str(self.run), *flags]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self.processes[process.pid] = process

    def kill(self, holder: str) -> None:
        """SIGKILL to the one that has the lease, named host:pid:random."""
        process = self.processes.pop(int(holder.split(":")[1]))
        process.kill()
        process.wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(timeout=30)


@dataclass(frozen=True)
class Request:
    sent: float  # time.time()
    seconds: float
    is_served: bool
    trouble: str = ""


class Robots:
    """Ask all the time, from a thread."""

    def __init__(self, endpoints: Path, num: int, pause_s: float) -> None:
        self._endpoints, self._num, self._pause_s = endpoints, num, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), name="robots")
        self.requests: list[Request] = []

    def __enter__(self) -> "Robots":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(index) for index in range(self._num)))

    async def _one(self, index: int) -> None:
        rng, robot = random.Random(index), PoolRobot(self._endpoints, f"arm-{index}", seed=index)
        image, state = np.zeros((16, 16, 3), np.uint8), np.zeros(4, np.float32)
        observation = {"observation/image": image, "observation/state": state, "prompt": "reach the goal"}
        while not self._stop.is_set():
            sent = time.time()
            try:
                await robot.infer(observation, within_s=DEADLINE_S)
                self.requests.append(Request(sent, time.time() - sent, True))
            except NoAnswerError as error:
                self.requests.append(Request(sent, time.time() - sent, False, str(error)))
            await asyncio.sleep(rng.uniform(0, 2 * self._pause_s))
        await robot.close()


class Watcher:
    """Follows the status file: when was the pool in a transition, and who had the lease?"""

    def __init__(self, state_dir: Path) -> None:
        self._path, self._stop = state_dir / "status.json", threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watcher")
        self.transitions: list[tuple[float, float]] = []  # time.time() from, to

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def status(self) -> dict[str, Any] | None:
        return json.loads(self._path.read_text()) if self._path.exists() else None

    def is_in_transition(self) -> bool:
        status = self.status()
        return status is None or any(r["phase"] != "active" for r in status["replicas"])

    def _follow(self) -> None:
        since: float | None = None
        while not self._stop.wait(0.1):
            is_in = self.is_in_transition()
            if is_in and since is None:
                since = time.time()
            elif not is_in and since is not None:
                self.transitions.append((since, time.time()))
                since = None
        if since is not None:
            self.transitions.append((since, time.time()))

    def was_in_transition(self, request: Request) -> bool:
        end = request.sent + request.seconds
        return any(a <= end and request.sent <= b for a, b in self.transitions)


def write_yaml(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path
