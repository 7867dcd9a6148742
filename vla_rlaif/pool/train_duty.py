"""A replica of a training run: it holds GPUs of the run, and leads its process if it is told to."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from vla_rlaif.pool.actions import Checkpoint, Drain
from vla_rlaif.pool.committed import verify_newest
from vla_rlaif.pool.replica import Halt, Launch, Leave, Order, Report, RunReport
from vla_rlaif.pool.work import Work

END_S = 5.0  # for a killed process to be gone


@dataclass
class _Run:
    order: Launch
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    ended: float | None = None


class TrainDuty:
    def __init__(self, replica: str, work: Work) -> None:
        self._replica, self._work = replica, work
        self._left = threading.Event()  # the run no longer uses these GPUs
        self._runs: list[_Run] = []
        self._num_failures = 0

    def do(self, order: Order, is_current: Callable[[], bool]) -> None:
        match order:
            case Launch():
                self._launch(order)
            case Halt(serial=serial, kill=kill):
                for run in self._runs:
                    if run.order.serial == serial and run.process.poll() is None:
                        run.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            case Leave():
                self._left.set()
            case Drain():
                self._left.wait()  # the planner ends what does not end
            case Checkpoint():
                verify_newest(self._work.run.run_dir)
            case _:  # a newcomer has nothing to load: the process restores the run
                pass

    def report(self) -> Report:
        for run in self._runs:
            if run.ended is None and run.process.poll() is not None:
                run.ended = time.monotonic()
                self._num_failures = 0 if run.process.returncode == 0 else self._num_failures + 1
                self._close_files(run)
        alive = [run for run in self._runs if run.ended is None]
        return Report(runs=tuple(self._report(run) for run in (*alive, *self._runs[-1:]) if run in alive or not alive))

    def close(self) -> None:
        self._left.set()
        for run in self._runs:
            if run.process.poll() is None:
                run.process.kill()
            run.process.wait(timeout=END_S)
            self._close_files(run)

    def _report(self, run: _Run) -> RunReport:
        return RunReport(
            serial=run.order.serial,
            members=run.order.members,
            is_alive=run.ended is None,
            num_failures=self._num_failures,
            ended_s=0.0 if run.ended is None else time.monotonic() - run.ended,
        )

    def _launch(self, order: Launch) -> None:
        run = self._work.run
        folder = run.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        data = {"config": run.model_dump(mode="json")}
        data |= {"devices": order.devices, "micro_batches": order.micro_batches}
        path = folder / f"launch-{self._replica}-{order.serial}.json"
        path.write_text(json.dumps(data))
        log = (folder / "trainer.log").open("ab")
        command = [sys.executable, "-m", "vla_rlaif.pool.trainer", str(path)]
        environment = os.environ | device_environment(order, fake=self._work.fake_gpus)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        self._runs.append(_Run(order, process, log))

    def _close_files(self, run: _Run) -> None:
        assert run.process.stdin is not None
        run.process.stdin.close()
        run.log.close()


def device_environment(order: Launch, *, fake: bool) -> dict[str, str]:
    """What makes the process see the GPUs of all members, and no others."""
    if fake:
        return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={order.devices}", "CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, order.visible))}
