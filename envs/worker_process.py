"""The driver's end of one env worker: start, ask, watch, end.

Workers are started as new processes (never forked from one that may have rendered) and die with the driver.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vla_rlaif.envs.shared_arrays import SharedArrays
from vla_rlaif.envs.worker import PROTOCOL

# Threads inside a worker only contend with the other workers, and llvmpipe's deadlock in some drivers.
_ENVIRONMENT = {
    "LP_NUM_THREADS": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
    "SDL_VIDEODRIVER": "dummy",
}
_LOOK_S = 0.2  # how often a silent worker's beat is looked at


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """How to start a worker; all that a replacement needs."""

    factory: str  # module:name of a callable that returns a SingleEnv
    options: Mapping[str, Any]  # its keyword arguments; JSON
    interpreter: Path | None  # None: this one
    extra_path: tuple[str, ...]  # import path for another interpreter, where factory and suite are
    renderer: str  # egl or osmesa, for suites that render with MuJoCo
    max_steps: int


class WorkerFault(Exception):
    """A worker that hung or died; ``kind`` says which."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerProcess:
    def __init__(self, spec: WorkerSpec, index: int, arrays_fd: int) -> None:
        """Start the process; ``greeting`` waits for it."""
        self.index = index
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        program = sys.executable if spec.interpreter is None else str(spec.interpreter)
        script = str(Path(__file__).with_name("worker_start.py"))
        fds = (theirs.fileno(), arrays_fd, lifeline_read)
        environment = os.environ | _ENVIRONMENT | {"MUJOCO_GL": spec.renderer, "PYOPENGL_PLATFORM": spec.renderer}
        try:
            self._process = subprocess.Popen(
                [program, script, *map(str, fds)], stdin=subprocess.DEVNULL, pass_fds=fds, env=environment
            )
        except OSError as error:
            ours.close()
            os.close(lifeline_write)
            raise ValueError(f"cannot start an env worker with {program}: {error}.") from error
        finally:
            theirs.close()
            os.close(lifeline_read)
        self.connection = Connection(ours.detach())
        # Dropping the last reference ends the process too.
        self._end = weakref.finalize(self, _end, self._process, self.connection, lifeline_write)
        self._send(
            {
                "worker": index,
                "factory": spec.factory,
                "options": dict(spec.options),
                "max_steps": spec.max_steps,
                "sys_path": sys.path if spec.interpreter is None else None,
                "extra_path": list(spec.extra_path),
            }
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def greeting(self, timeout_s: float) -> dict[str, Any]:
        """What the worker says of itself once its first env is built.

        Raises ValueError for a mistake in the options or an interpreter that does not fit, WorkerFault for all else.
        """
        if not self.connection.poll(timeout_s):
            raise WorkerFault("hung", f"an env worker was not ready after {timeout_s:g} s")
        said = self.receive("starting")
        if "mistake" in said:
            raise ValueError(said["mistake"])
        if "crash" in said:
            raise WorkerFault("raised", f"an env worker could not build its environment:\n{said['crash']}")
        if said["protocol"] != PROTOCOL:
            raise ValueError(f"the env worker speaks protocol {said['protocol']}, this process {PROTOCOL}; update it.")
        return said

    def attach(self, *, num_envs: int, num_workers: int) -> None:
        self._send({"num_envs": num_envs, "num_workers": num_workers})

    def ask(self, op: str, members: Sequence[int], arguments: Sequence[Any]) -> None:
        """Send a request; ``answers`` waits for it."""
        self._send({"op": op, "members": list(members), "arguments": list(arguments)})

    def end(self) -> None:
        """Stop the process now. A second call does nothing."""
        self._end()

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died; who waits for the answer is told
            self.connection.send_bytes(json.dumps(message).encode())

    def receive(self, what: str) -> dict[str, Any]:
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self._process.wait()  # the kernel closed its socket: it is gone, or just going
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise WorkerFault("died", f"env worker {self.index} died ({how}) while {what}") from None


def answers(
    workers: Sequence[WorkerProcess], arrays: SharedArrays, timeout_s: float
) -> dict[int, dict[str, Any] | WorkerFault]:
    """Wait for the answer of each worker, by its index; a fault instead where one died, or gave no sign of life for
    ``timeout_s``."""
    pending = {w.connection: w for w in workers}
    beats = {w.index: (int(arrays.beat[w.index]), time.monotonic()) for w in workers}
    found: dict[int, dict[str, Any] | WorkerFault] = {}
    while pending:
        for connection in wait(list(pending), timeout=min(_LOOK_S, timeout_s / 2)):
            worker = pending.pop(connection)  # pyright: ignore[reportArgumentType] (only connections were waited for)
            try:
                found[worker.index] = worker.receive(f"it was at member {arrays.busy[worker.index]}")
            except WorkerFault as fault:
                found[worker.index] = fault
        now = time.monotonic()
        for connection, worker in list(pending.items()):
            beat, since = beats[worker.index]
            if arrays.beat[worker.index] != beat:
                beats[worker.index] = (int(arrays.beat[worker.index]), now)
            elif now - since > timeout_s:
                member = arrays.busy[worker.index]
                message = f"env worker {worker.index} gave no sign of life for {timeout_s:g} s at member {member}"
                found[worker.index] = WorkerFault("hung", message)
                del pending[connection]
    return found


def _end(process: subprocess.Popen[bytes], connection: Connection, lifeline: int) -> None:
    """Kill rather than ask: the worker holds nothing that must be saved, and one that hangs would not answer."""
    process.kill()
    process.wait()
    connection.close()
    os.close(lifeline)
