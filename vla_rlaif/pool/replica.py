"""One replica of a role, as it lives on its GPUs: where it is in its life, and each action at most once.

Runs inside a Ray actor and knows no Ray. A call whose answer was lost may have been executed, so what was done is
remembered here, with the replica itself: whoever repeats an action is told that it is known.
"""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from vla_rlaif.pool.actions import Admit, Checkpoint, Drain, Release, Sync, Warm
from vla_rlaif.pool.history import Step
from vla_rlaif.pool.lease import Fence
from vla_rlaif.pool.state import Gpu, Phase


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Start the training process of a run on the GPUs of ``members``; the one that is told leads. Of train only."""

    replica: str
    serial: int  # counts the launches of this leader
    members: tuple[str, ...]
    devices: int
    visible: tuple[int, ...]  # their indices on the leader's node
    micro_batches: int

    @property
    def key(self) -> str:
        return f"launch:{self.replica}:{self.serial}"


@dataclass(frozen=True, kw_only=True)
class Halt:
    """End the training process: after its step and with a checkpoint, or at once."""

    replica: str
    serial: int
    kill: bool = False

    @property
    def key(self) -> str:
        return f"{'abandon' if self.kill else 'halt'}:{self.replica}:{self.serial}"


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The run no longer uses the replica's GPUs: it has drained. Of train only."""

    replica: str

    @property
    def key(self) -> str:
        return f"leave:{self.replica}"


Order = Warm | Sync | Admit | Drain | Checkpoint | Release | Launch | Halt | Leave
Answer = Literal["begun", "known", "fenced"]  # known: done already; fenced: a newer scheduler is in charge


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A training process that a replica leads, or led: all that run, and the last that ended."""

    serial: int
    members: tuple[str, ...]
    is_alive: bool
    num_failures: int = 0  # of the last launches of this leader, how many in a row ended with an error
    ended_s: float = 0.0  # real seconds since it ended


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a duty says of itself."""

    version: int | None = None  # of the weights it holds
    failure: str | None = None  # why it cannot go on
    syncing_s: float | None = None  # real seconds since it began to take newer weights beside its work
    runs: tuple[RunReport, ...] = ()
    latency: tuple[tuple[float, float], ...] = ()  # (upper bound in seconds, requests so far up to it)
    groups: int = 0  # played
    carried: int = 0  # groups left unfinished, for the next one to play


@runtime_checkable
class Duty(Protocol):
    """What a role does on its GPUs."""

    def do(self, order: Order, is_current: Callable[[], bool]) -> None:
        """Carry it out; may take long, and raises if it cannot. Nothing is committed once ``is_current`` is false."""
        ...

    def report(self) -> Report: ...

    def close(self) -> None:
        """End threads and processes."""
        ...


@dataclass(frozen=True, kw_only=True)
class Claim:
    """GPUs that a replica has, as the board keeps it and the replica repeats it."""

    replica: str
    role: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, kw_only=True)
class Status:
    """Ages are real seconds: clocks of different machines are never compared."""

    claim: Claim
    phase: Phase
    age_s: float  # in the phase
    leaving_s: float | None  # since the drain began
    attempts: int  # failed or aborted tries of the present step
    is_over: bool  # released: its processes have ended
    took: tuple[tuple[Step, float], ...]  # steps that ended, seconds
    report: Report
    gpu_ids: tuple[int, ...]  # as the machine counts them
    error: str | None  # the last one


STEPS: dict[type, tuple[Step, Phase, Phase]] = {
    Warm: ("warmup", Phase.WARMING, Phase.WARM),
    Sync: ("sync", Phase.SYNCING, Phase.SYNCED),
    Drain: ("drain", Phase.DRAINING, Phase.DRAINED),
    Checkpoint: ("checkpoint", Phase.CHECKPOINTING, Phase.SAVED),
    Release: ("release", Phase.RELEASING, Phase.RELEASING),
}
AFTER_FAILURE = {Phase.SYNCING: Phase.WARM, Phase.CHECKPOINTING: Phase.UNSAVED}  # to be tried again; all others: lost


class Replica:
    """``duty`` does the work; this keeps the phase. Long steps run in threads, so that it always answers."""

    def __init__(self, claim: Claim, duty: Duty, audit: Path, gpu_ids: tuple[int, ...]) -> None:
        self._claim, self._duty, self._audit, self._gpu_ids = claim, duty, audit, gpu_ids
        self._lock, self._fence = threading.RLock(), Fence()
        self._keys: set[str] = set()
        self._turn = 0  # grows with every step: one that was overtaken changes nothing any more
        self._attempts, self._is_over = 0, False
        self._took: list[tuple[Step, float]] = []
        self._leaving: float | None = None
        self._error: str | None = None
        self._enter(Phase.ACQUIRED)

    def apply(self, token: int, order: Order) -> Answer:
        """Begin an order, once. Raises nothing that a scheduler could mend by repeating it."""
        with self._lock:
            if not self._fence.passes(token):
                return "fenced"
            if order.key in self._keys:
                return "known"
            self._keys.add(order.key)
            write_audit(self._audit, by="replica", key=order.key, token=token)
            self._begin(order)
            return "begun"

    def status(self, token: int) -> Status:
        """To ask shuts out older schedulers."""
        report = self._duty.report()
        with self._lock:
            self._fence.passes(token)
            if report.failure is not None and self._phase not in (Phase.LOST, Phase.RELEASING):
                self._fail(report.failure, Phase.LOST)
            return Status(
                claim=self._claim,
                phase=self._phase,
                age_s=time.monotonic() - self._since,
                leaving_s=None if self._leaving is None else time.monotonic() - self._leaving,
                attempts=self._attempts,
                is_over=self._is_over,
                took=tuple(self._took),
                report=report,
                gpu_ids=self._gpu_ids,
                error=self._error,
            )

    def _begin(self, order: Order) -> None:
        if isinstance(order, Admit):
            self._duty.do(order, lambda: True)
            self._enter(Phase.ACTIVE)
        elif isinstance(order, Launch | Halt | Leave):
            self._duty.do(order, lambda: True)
            if isinstance(order, Leave) and self._phase is Phase.DRAINING:
                self._took.append(("drain", time.monotonic() - self._since))
                self._enter(Phase.DRAINED)
        elif isinstance(order, Sync) and order.abort:
            self._turn += 1
            if self._phase is Phase.SYNCING:
                self._enter(Phase.WARM, attempts=self._attempts + 1)
        else:
            _, phase, _ = STEPS[type(order)]
            if isinstance(order, Drain | Release) and self._leaving is None:
                self._leaving = time.monotonic()
            attempts = self._attempts if isinstance(order, Sync | Checkpoint) else 0
            self._enter(phase, attempts=attempts)
            threading.Thread(target=self._carry_out, args=(order, self._turn), name=order.key, daemon=True).start()

    def _carry_out(self, order: Order, turn: int) -> None:
        step, phase, after = STEPS[type(order)]
        begun = time.monotonic()
        try:
            if isinstance(order, Release):
                self._duty.close()
            else:
                self._duty.do(order, lambda: self._turn == turn)
        except Exception as error:  # the planner tries again, or ends the replica: both are its answers to the phase
            text = "".join(traceback.format_exception(error))
            with self._lock:
                if self._turn == turn:
                    self._fail(text, AFTER_FAILURE.get(phase, Phase.LOST))
            return
        with self._lock:
            if self._turn == turn:
                self._took.append((step, time.monotonic() - begun))
                self._is_over = isinstance(order, Release)
                self._enter(after)

    def _fail(self, text: str, phase: Phase) -> None:
        self._error = text
        self._enter(phase, attempts=self._attempts + 1)

    def _enter(self, phase: Phase, *, attempts: int = 0) -> None:
        self._phase, self._since, self._attempts = phase, time.monotonic(), attempts
        self._turn += 1


def write_audit(path: Path, **fields: str | int | float) -> None:
    """One line for one thing that was done: what `pool` did can be counted afterwards, whoever was killed."""
    line = json.dumps({"at": time.time(), **fields}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())  # one write: lines of several processes do not mix
    finally:
        os.close(file)


def read_audit(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
