"""Run checkpoints are written on a thread, so that neither rollouts nor updates wait for the disk."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.types import Weights


class CheckpointWriter:
    """One checkpoint at a time; leaving the context waits for the last one."""

    def __init__(self, checkpoints: RunCheckpoints, *, timeout_s: float) -> None:
        self._checkpoints, self._timeout_s = checkpoints, timeout_s
        self._writing: Future[None] | None = None
        self._step = -1

    def save(self, step: int, state: Mapping[str, Any], tensors: Weights) -> None:
        """Begin to write; nobody may change ``tensors`` after this. Waits until the one before is written.

        Raises what went wrong with the one before.
        """
        self.wait()
        self._writing, self._step = Future(), step
        # Not a daemon: a run that fails elsewhere still ends with a whole checkpoint.
        threading.Thread(target=self._write, args=(self._writing, step, state, tensors), name="checkpoint").start()

    def check(self) -> None:
        """Raises what went wrong with a checkpoint that has ended."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def wait(self) -> None:
        """Until nothing is being written. Raises what went wrong."""
        if self._writing is None:
            return
        if wait([self._writing], self._timeout_s).not_done:
            raise TimeoutError(
                f"the checkpoint of step {self._step} is not written after {self._timeout_s} s (loop.timeout_s): is "
                "the disk full, slow or gone?"
            )
        self._writing.result()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._writing is not None:  # what was raised already matters more
            wait([self._writing], self._timeout_s)

    def _write(self, future: Future[None], step: int, state: Mapping[str, Any], tensors: Weights) -> None:
        try:
            self._checkpoints.save(step, state, tensors)
        except BaseException as error:  # raised again by whoever saves, checks or leaves
            future.set_exception(error)
        else:
            future.set_result(None)
