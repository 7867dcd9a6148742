"""Where every GPU-microsecond went. The sum over (role, window, state) is the pool's size times the wall time, exactly.

The caller says what held until when; the ledger knows neither planner nor calendar.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vla_rlaif.pool.clock import Micros
from vla_rlaif.pool.history import percentile
from vla_rlaif.pool.state import Phase

State = str
NOBODY = ""  # role of GPUs that are idle or dead
STATES: dict[Phase, State] = {
    Phase.ACQUIRING: "warming",
    Phase.ACQUIRED: "warming",
    Phase.WARMING: "warming",
    Phase.WARM: "warming",
    Phase.SYNCING: "syncing",
    Phase.SYNCED: "standby",
    Phase.ACTIVE: "active",
    Phase.DRAINING: "draining",
    Phase.DRAINED: "draining",
    Phase.CHECKPOINTING: "checkpointing",
    Phase.SAVED: "checkpointing",
    Phase.UNSAVED: "checkpointing",
    Phase.RELEASING: "releasing",
    Phase.LOST: "releasing",
}
IDLE, DEAD = "idle", "dead"
USEFUL = ("active",)
Holding = Mapping[tuple[str, State], int]  # (role, state) -> GPUs


@dataclass(frozen=True, kw_only=True)
class Handover:
    """GPUs that changed hands: from the start of the drain (of the acquisition, if they were free) until ready."""

    role: str  # that got them
    taken_from: str  # NOBODY if they were free
    num_gpus: int
    duration: Micros


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """How long after a boundary a role had what the new window gives it; 0 if it was there before."""

    boundary: Micros
    window: str
    role: str
    late: Micros
    arrived: bool = True  # False: not before the window was over


class Ledger:
    """Counts. ``advance`` is called at every change and at every boundary between windows."""

    def __init__(self, *, start: Micros, num_gpus: int) -> None:
        self.start = self.now = start
        self.num_gpus = num_gpus
        self.spent: Counter[tuple[str, str, State]] = Counter()  # (role, window, state) -> GPU-microseconds
        self.below: Counter[str] = Counter()  # role -> microseconds with fewer active GPUs than its minimum
        self.missing: Counter[str] = Counter()  # role -> GPU-microseconds that were missing meanwhile
        self.handovers: list[Handover] = []
        self.lateness: list[Lateness] = []
        self.preemptions: Counter[str] = Counter()  # role -> drains of active replicas, kills included
        self.kills: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()  # role -> GPU-microseconds of work done again
        self.carried: Counter[str] = Counter()  # role -> unfinished groups carried over by drains
        self._p99: dict[bool, list[tuple[float, Micros]]] = defaultdict(list)

    def advance(self, until: Micros, *, window: str, held: Holding, minimums: Mapping[str, int]) -> None:
        """Since the last call, and until ``until``, GPUs were held like this."""
        duration = until - self.now
        assert duration >= 0, "a ledger only goes forward"
        assert sum(held.values()) == self.num_gpus, "every GPU has one state"
        if not duration:
            return
        self.now = until
        for (role, state), num_gpus in held.items():
            if num_gpus:
                self.spent[role, window, state] += num_gpus * duration
        for role, minimum in minimums.items():
            lack = minimum - held.get((role, "active"), 0)
            if lack > 0:
                self.below[role] += duration
                self.missing[role] += lack * duration

    def record_latency(self, p99_ms: float, duration: Micros, *, in_transition: bool) -> None:
        self._p99[in_transition].append((p99_ms, duration))

    @property
    def total(self) -> Micros:
        """GPU-microseconds on record."""
        return sum(self.spent.values())

    @property
    def useful_share(self) -> float:
        """Of all GPU time, that in which GPUs served, trained or collected."""
        useful = sum(spent for (_, _, state), spent in self.spent.items() if state in USEFUL)
        return useful / self.total if self.total else 0.0

    def by(self, *keys: str) -> Counter[tuple[str, ...]]:
        """GPU-microseconds summed by some of 'role', 'window', 'state'."""
        names, result = ("role", "window", "state"), Counter()
        for key, spent in self.spent.items():
            result[tuple(key[names.index(k)] for k in keys)] += spent
        return result

    def transition(self, share: float, *, role: str | None = None) -> Micros | None:
        """Nearest-rank percentile of the handovers, of one role or all; each GPU counts."""
        taken = [h for h in self.handovers if role is None or h.role == role]
        return percentile([h.duration for h in taken for _ in range(h.num_gpus)], share) if taken else None

    def late(self, share: float, *, role: str) -> Micros | None:
        """Nearest-rank percentile of the lateness at boundaries where a role grew."""
        taken = [entry.late for entry in self.lateness if entry.role == role]
        return percentile(taken, share) if taken else None

    def p99_ms(self, *, in_transition: bool) -> float | None:
        """The latency that was exceeded in 1 % of the time, in or out of transitions."""
        return weighted_percentile(self._p99[in_transition], 0.99) if self._p99[in_transition] else None


def weighted_percentile(samples: Iterable[tuple[float, int]], share: float) -> float:
    """The smallest value that at least this share of the weight does not exceed."""
    ordered = sorted(samples)
    needed = share * sum(weight for _, weight in ordered)
    reached = 0
    for value, weight in ordered:
        reached += weight
        if reached >= needed:
            return value
    raise AssertionError("a percentile needs samples")
