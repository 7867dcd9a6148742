"""What a plan asks for. An executor applies each key at most once, whatever it observes in between."""

from collections.abc import Mapping
from dataclasses import dataclass

from vla_rlaif.pool.clock import Micros
from vla_rlaif.pool.state import Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquire:
    """Start a replica (or a job) on free GPUs. Answers: phase ACQUIRED."""

    replica: str
    role: str
    gpus: tuple[Gpu, ...]
    reason: str
    job: str | None = None

    @property
    def key(self) -> str:
        return f"acquire:{self.replica}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Warm:
    """Load, compile, restore its own checkpoint. Answers: phase WARM."""

    replica: str
    reason: str

    @property
    def key(self) -> str:
        return f"warm:{self.replica}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Send the committed weights, or abort the sync in flight. Answers: phase SYNCED, or WARM after an abort."""

    replica: str
    version: int
    attempt: int
    reason: str
    abort: bool = False

    @property
    def key(self) -> str:
        return f"{'abort' if self.abort else 'sync'}:{self.replica}:{self.version}:{self.attempt}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """Open routing and admission. Answers: phase ACTIVE."""

    replica: str
    reason: str

    @property
    def key(self) -> str:
        return f"admit:{self.replica}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Stop admission, cut routing, finish or stop at the chunk boundary. Answers: phase DRAINED."""

    replica: str
    reason: str
    within: Micros  # the executor's own deadline, from now
    carry_unfinished: bool  # an unfinished group goes on elsewhere; it is not thrown away

    @property
    def key(self) -> str:
        return f"drain:{self.replica}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Write the state and read it back. Answers: phase SAVED or UNSAVED."""

    replica: str
    attempt: int
    within: Micros
    reason: str

    @property
    def key(self) -> str:
        return f"checkpoint:{self.replica}:{self.attempt}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """End the processes and free the GPUs. Answers: the replica is gone."""

    replica: str
    reason: str
    kill: bool = False  # at once, whatever it is doing: work since the last good checkpoint is lost
    lost: Micros = 0  # that work, in GPU-microseconds
    attempt: int = 0  # of killing it: the replica's attempts so far

    @property
    def key(self) -> str:
        return f"kill:{self.replica}:{self.attempt}" if self.kill else f"release:{self.replica}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """The job stays in the queue."""

    job: str
    eta: Micros | None  # instant at which it may start; None: not within the calendar's horizon
    reason: str
    answer: int = 0  # number of answers before it

    @property
    def key(self) -> str:
        return f"reject:{self.job}:{self.answer}:{self.eta}"


Action = Acquire | Warm | Sync | Admit | Drain | Checkpoint | Release | Reject


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A role is below its minimum, or a step cannot end as it should."""

    role: str
    minimum: int  # GPUs
    active: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    actions: tuple[Action, ...]
    next_wakeup: Micros  # instant; plan again then, or when something changes
    reasons: tuple[str, ...]
    violations: tuple[Violation, ...]
    window: str  # that rules now
    goals: Mapping[str, int]  # role -> GPUs it should hold now
    accumulation: Mapping[str, int]  # role -> micro-batches per update at that size, of roles with a global batch
