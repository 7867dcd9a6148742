"""Processes of this host that work in step: started, fed, listened to and buried by one driver.

A message is a head (JSON) and arrays by name; nothing is pickled once a process runs. Every wait has a deadline.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]
Message = tuple[dict[str, Any], dict[str, np.ndarray]]

START_S = 600  # seconds for a rank to import what it needs and to build its policy
GRACE_S = 2.0  # seconds that the other ranks have to say what they saw, once one has failed


class RankError(RuntimeError):
    """A rank raised, died or did not answer. The group is gone; resume from a checkpoint."""


class Link:
    """One end of a pipe for messages."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def send(self, head: Mapping[str, Any], arrays: Arrays = {}) -> None:  # noqa: B006 - never changed
        layout = [(name, value.dtype.str, value.shape) for name, value in arrays.items()]
        self.connection.send_bytes(json.dumps([head, layout]).encode())
        for value in arrays.values():
            self.connection.send_bytes(np.ascontiguousarray(value).reshape(-1).view(np.uint8))

    def receive(self) -> Message:
        head, layout = json.loads(self.connection.recv_bytes())
        arrays = {}
        for name, dtype, shape in layout:
            value = np.empty(shape, dtype)
            self.connection.recv_bytes_into(value.reshape(-1).view(np.uint8))
            arrays[name] = value
        return head, arrays


class RankGroup:
    """``num_ranks`` processes that run ``serve(index, link)``: it says that it is ready, then answers messages until
    the link closes.

    ``serve`` is found again by name in the new process, so it is a module's function, or a partial of one with plain
    arguments.
    """

    def __init__(self, serve: Callable[[int, Link], None], num_ranks: int, *, timeout_s: int):
        self._timeout_s, self._expired, self._broken = timeout_s, "", ""
        context = multiprocessing.get_context("spawn")
        self._links: list[Link] = []
        self._processes: list[BaseProcess] = []
        for index in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(serve, index, theirs, os.getpid()), name=f"rank {index}", daemon=True
            )
            process.start()
            theirs.close()  # or a rank's death would not end the stream
            self._links.append(Link(ours))
            self._processes.append(process)
        self._finalizer = weakref.finalize(self, _bury, self._processes, self._links)
        with self._exchange("start", max(START_S, timeout_s)):
            self._answers("start")

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def ask(self, doing: str, messages: Iterator[Sequence[tuple[Mapping[str, Any], Arrays]]]) -> list[Message]:
        """Send messages, one to each rank at a time, then wait for one answer of each.

        Raises:
            RankError: a rank raised (its traceback comes last), died, or took longer than the deadline.
        """
        if self._broken:
            raise RankError(f"The ranks have stopped: {self._broken}")
        with self._exchange(doing, self._timeout_s):
            for each in messages:
                for link, (head, arrays) in zip(self._links, each, strict=True):
                    try:
                        link.send(head, arrays)
                    except OSError:  # the pipe of a dead rank
                        raise self._failure(doing, {}) from None
            return self._answers(doing)

    def close(self) -> None:
        """End all ranks; they hold nothing that must be saved."""
        self._finalizer()

    def _answers(self, doing: str) -> list[Message]:
        answers: dict[int, Message] = {}
        while len(answers) < len(self._links):
            pending = {i: link for i, link in enumerate(self._links) if i not in answers}
            wait([link.connection for link in pending.values()] + [self._processes[i].sentinel for i in pending])
            for i, link in pending.items():
                try:
                    if not link.connection.poll():
                        if not self._processes[i].is_alive() and not link.connection.poll():
                            raise self._failure(doing, answers)
                        continue
                    answers[i] = link.receive()
                except (OSError, EOFError):
                    raise self._failure(doing, answers) from None
                if "failed" in answers[i][0]:
                    raise self._failure(doing, answers)
        return [answers[i] for i in range(len(self._links))]

    @contextmanager
    def _exchange(self, doing: str, timeout_s: int) -> Iterator[None]:
        """Around messages and their answers. One that is not finished leaves ranks that nobody could go on with."""

        def expire() -> None:
            self._expired = f"the ranks did not finish {doing} within {timeout_s:g} s"
            for process in self._processes:
                process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except BaseException:
            self._broken = self._broken or f"the driver did not finish {doing}"
            self.close()
            raise
        finally:
            timer.cancel()

    def _failure(self, doing: str, answers: Mapping[int, Message]) -> RankError:
        """What went wrong first, as far as it can be told: a death that nobody announced, else the earliest error."""
        heads = {i: head for i, (head, _) in answers.items()}
        until, silent = time.monotonic() + GRACE_S, set(range(len(self._links))) - heads.keys()
        while silent and time.monotonic() < until and not self._expired:
            alive = {i for i in silent if self._processes[i].is_alive()}  # before its last words are looked for
            for i in silent:
                try:
                    if self._links[i].connection.poll():
                        heads[i] = self._links[i].receive()[0]
                except (OSError, EOFError):
                    continue
            silent = alive - heads.keys()
            time.sleep(0.02)
        num, failed = len(self._links), {i: head for i, head in heads.items() if "failed" in head}
        dead = [i for i in range(num) if i not in failed and not self._processes[i].is_alive()]
        if self._expired:
            message = f"{self._expired}; raise learner.timeout_s if they only needed longer"
        elif dead:
            process = self._processes[dead[0]]
            message = f"rank {dead[0]} of {num} (process {process.pid}) {_death(process.exitcode)} during {doing}"
        else:
            first = min(failed, key=lambda i: failed[i]["at"])
            message = f"rank {first} of {num} failed during {doing}:\n{failed[first]['failed']}"
        self._broken = message
        return RankError(message)


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.Signals(-code).name}{hint})"


def _bury(processes: Sequence[BaseProcess], links: Sequence[Link]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(GRACE_S)
    for link in links:
        link.connection.close()


def _run(serve: Callable[[int, Link], None], index: int, connection: Connection, driver: int) -> None:
    """The life of a rank. An error is reported before anything else, so that it comes ahead of those it causes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the group; the driver ends its ranks
    threading.Thread(target=_follow, args=(driver,), daemon=True).start()
    link = Link(connection)
    try:
        serve(index, link)
    except EOFError:  # the driver has closed the link, or is gone
        pass
    except Exception:
        link.send({"failed": traceback.format_exc().rstrip(), "at": time.monotonic()})
    os._exit(0)  # without the clean-up of a process group whose other members may be gone


def _follow(driver: int) -> None:
    """End with the driver, whatever killed it and whatever this process is waiting for."""
    while os.getppid() == driver:
        time.sleep(0.5)
    os._exit(1)
