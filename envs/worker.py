"""The env worker: owns some members of a ``ProcessVectorEnv``, and answers one request at a time.

Requests and answers are JSON over a socket, arrays are shared (shared_arrays.py); nothing is unpickled. Numpy, the
standard library and the suite only (see single.py). An exception of one member is reported and costs that member its
episode; the others go on.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import importlib
import json
import math
import os
import platform
import time
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vla_rlaif.envs.gl_missing import explained
from vla_rlaif.envs.shared_arrays import SharedArrays
from vla_rlaif.envs.single import Reading, RestorableEnv, SingleEnv, TeachingEnv

PROTOCOL = 2  # raised with every change of the messages or of the shared arrays


class Worker:
    def __init__(self, connection: Connection, arrays_fd: int, hello: dict[str, Any]) -> None:
        self._connection, self._index = connection, int(hello["worker"])
        module, _, name = hello["factory"].partition(":")
        self._factory, self._options = vars(importlib.import_module(module))[name], hello["options"]
        self._max_steps = int(hello["max_steps"])
        self._envs: dict[int, SingleEnv] = {}
        self._num_steps: dict[int, int] = {}
        first: SingleEnv = self._factory(**self._options)
        self._spare: SingleEnv | None = first  # becomes the first member
        spec = first.spec
        self._send(
            {
                "protocol": PROTOCOL,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "spec": asdict(spec),
                "name": type(first).__name__,
                "has_expert": isinstance(first, TeachingEnv) and first.teaches,
                "is_restorable": isinstance(first, RestorableEnv),
            }
        )
        shapes = json.loads(connection.recv_bytes())
        self._arrays = SharedArrays(arrays_fd, spec, max_steps=self._max_steps, **shapes)

    def serve(self) -> None:
        """Answer until the driver says close, or is gone."""
        gc.freeze()  # what is there by now stays; collecting is quick without it
        answers = {
            "reset": self._reset,
            "step": self._step,
            "expert": self._expert,
            "hash": self._hash,
            "snapshot": self._snapshot,
            "restore": self._restore,
        }
        while True:
            try:
                request = json.loads(self._connection.recv_bytes())
            except EOFError:
                return
            if request["op"] == "close":
                return
            if request["op"] == "reset":
                gc.collect()  # suites leave cycles that hold native memory, which the collector does not see
            self._arrays.physics_s[self._index] = self._arrays.render_s[self._index] = 0
            failed: dict[str, str] = {}
            said: dict[str, str] = {}
            for member, argument in zip(request["members"], request["arguments"], strict=True):
                self._arrays.busy[self._index] = member
                try:
                    said[str(member)] = answers[request["op"]](member, argument)
                except Exception:  # a suite may raise anything; the driver counts it and the member sits out
                    failed[str(member)] = traceback.format_exc()
                    self._drop(member)
                self._beat()
            self._send({"said": said, "failed": failed})

    def _reset(self, member: int, seed: int) -> str:
        if member not in self._envs:
            self._envs[member], self._spare = self._spare or self._factory(**self._options), None
        begun = time.perf_counter()
        reading = self._envs[member].reset(seed)
        self._num_steps[member] = 0
        self._arrays.physics_s[self._index] += time.perf_counter() - begun
        self._write(member, reading)
        self._render(member)
        return reading.instruction

    def _step(self, member: int, length: int) -> str:
        """A chunk, up to the end of the episode; one frame at its end."""
        arrays, env, instruction, executed = self._arrays, self._envs[member], "", 0
        begun = time.perf_counter()
        for action in arrays.action[member, :length]:
            reading = env.step(action)
            executed += 1
            self._num_steps[member] += 1
            self._write(member, reading)
            self._beat()
            instruction = reading.instruction
            if arrays.done[member]:
                break
        arrays.executed[member] = executed
        arrays.physics_s[self._index] += time.perf_counter() - begun
        self._render(member)
        return instruction

    def _expert(self, member: int, _: None) -> str:
        env = self._envs[member]
        assert isinstance(env, TeachingEnv)
        self._arrays.expert[member] = env.expert()
        return ""

    def _hash(self, member: int, _: None) -> str:
        steps = self._num_steps[member].to_bytes(8, "little")
        return hashlib.sha256(steps + self._envs[member].fingerprint()).hexdigest()

    def _snapshot(self, member: int, _: None) -> str:
        env = self._envs[member]
        assert isinstance(env, RestorableEnv)
        return json.dumps(
            {"num_steps": self._num_steps[member], "env": base64.b64encode(env.snapshot()).decode("ascii")}
        )

    def _restore(self, member: int, snapshot: str) -> str:
        if member not in self._envs:
            self._envs[member], self._spare = self._spare or self._factory(**self._options), None
        env, saved = self._envs[member], json.loads(snapshot)
        assert isinstance(env, RestorableEnv)
        reading = env.restore(base64.b64decode(saved["env"]))
        self._num_steps[member] = saved["num_steps"]
        self._write(member, reading)
        self._render(member)
        return reading.instruction

    def _write(self, member: int, reading: Reading) -> None:
        arrays = self._arrays
        if not (np.isfinite(reading.state).all() and math.isfinite(reading.truth)):
            raise FloatingPointError(f"the state is not finite: {reading.state}, truth {reading.truth}")
        timed_out = self._num_steps[member] >= self._max_steps
        arrays.state[member], arrays.truth[member] = reading.state, reading.truth
        arrays.success[member], arrays.valid[member], arrays.executed[member] = reading.success, True, 0
        arrays.truncated[member] = timed_out and not (reading.success or reading.ended)
        arrays.done[member] = reading.success or reading.ended or timed_out

    def _render(self, member: int) -> None:
        begun = time.perf_counter()
        self._envs[member].render(self._arrays.images[member])
        self._arrays.render_s[self._index] += time.perf_counter() - begun

    def _beat(self) -> None:
        self._arrays.beat[self._index] += 1

    def _drop(self, member: int) -> None:
        """Give up the env of a member; the next reset makes a new one."""
        env = self._envs.pop(member, None)
        try:
            if env is not None:
                env.close()
        except Exception:  # it is broken already, and what broke it has been reported
            traceback.print_exc()

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())


def main(connection: Connection, arrays_fd: int, hello: dict[str, Any]) -> None:
    """Serve until told to stop. What goes wrong before the first request is an answer: {"mistake"} for a ValueError,
    which a user can fix, and {"crash"} for all else."""
    try:
        with explained():
            worker = Worker(connection, arrays_fd, hello)
    except ValueError as error:
        connection.send_bytes(json.dumps({"mistake": str(error)}).encode())
    except Exception:  # of a suite, while it was imported or built
        connection.send_bytes(json.dumps({"crash": traceback.format_exc()}).encode())
    else:
        worker.serve()
    os._exit(0)  # exit handlers of graphics libraries print, and may hang
