"""What a live pool did: the ledger of its GPU-seconds, kept from look to look and from scheduler to scheduler.

Between two looks everything is booked as the first of them found it, so the sum is the pool's size times the wall time,
exactly. Time in which nobody looked is booked as `unseen`.
"""

from collections import Counter
from collections.abc import Mapping

from vla_rlaif.pool.accounts import Accounts, Breach
from vla_rlaif.pool.actions import Action, Drain, Plan, Release
from vla_rlaif.pool.calendar import Timeline, shares_of
from vla_rlaif.pool.clock import MINUTE, Micros
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.history import Step
from vla_rlaif.pool.ledger import DEAD, IDLE, NOBODY, STATES, Handover, Ledger, State
from vla_rlaif.pool.live_clock import LiveClock
from vla_rlaif.pool.observe import Seen
from vla_rlaif.pool.state import Gpu, Phase, Replica

UNSEEN = "unseen"
STEP_OF: dict[Phase, Step] = {
    Phase.ACQUIRING: "acquire",
    Phase.WARMING: "warmup",
    Phase.SYNCING: "sync",
    Phase.DRAINING: "drain",
    Phase.CHECKPOINTING: "checkpoint",
}
MAX_GAP_S = 30.0  # real seconds between two looks; after more, nobody knows
Counts = Mapping[tuple[str, State], int]  # (role, state) -> GPUs


class Record:
    """Of one scheduler; ``ledger`` and ``counts`` may be continued from the one before."""

    def __init__(self, clock: LiveClock, ledger: Ledger, counts: Counts) -> None:
        self._clock, self.ledger, self.counts = clock, ledger, counts
        self.breaches: list[Breach] = []
        self.latency: Counter[tuple[bool, float]] = Counter()  # (in a transition, p99 in ms) -> microseconds
        self._accounts = Accounts(ledger, self.breaches)
        self._rule: tuple[object, ...] | None = None  # what held at the last plan
        self._before: dict[str, Replica] = {}
        self._now: Micros = 0  # monotonic, of the last look
        self._killed: list[tuple[str, Step, Micros]] = []  # steps that were cut short, and how long they had taken
        self._num_took: dict[str, int] = {}  # steps of a replica whose durations are known
        self._left: dict[Gpu, tuple[str, Micros, Micros]] = {}  # role, start of its drain, moment it was free
        self._taken: dict[str, tuple[str, Micros]] = {}  # newcomer -> whom it took GPUs from, and since when

    def book(self, seen: Seen, config: PoolConfig, timeline: Timeline, now: Micros) -> None:
        """The time since the last look, split at the boundaries between windows; from now on holds what is seen."""
        start, ledger = self.ledger.now, self.ledger
        if now - start > self._clock.micros(MAX_GAP_S):
            self.counts = {(NOBODY, UNSEEN): ledger.num_gpus}
        if now > start:
            for interval in timeline.between(max(start, timeline.starts[0]), now):
                minimums = {role: share.min for role, share in shares_of(config, interval).items()}
                until = min(interval.end, now)
                ledger.advance(until, window=interval.window, held=self.counts, minimums=minimums)
            is_in = any(r.phase is not Phase.ACTIVE for r in seen.observed.replicas)
            for p99_ms in seen.observed.p99_ms.values():
                self.latency[is_in, p99_ms] += now - start
        self.counts = counts_of(seen, config)

    def note(self, planned: Plan, timeline: Timeline, now: Micros) -> None:
        """A plan was made, and carried out as far as that goes."""
        ruling = timeline.at(now)
        rule = ruling.window, ruling.source, ruling.targets
        if self._rule is None:
            self._accounts.begin(planned)
        elif rule != self._rule:
            self._accounts.open_window(ruling, now)
        self._rule = rule
        self._accounts.note(planned, now, lambda role: self.counts.get((role, "active"), 0))
        for action in planned.actions:
            self._count(action)

    def follow(self, seen: Seen, config: PoolConfig) -> list[tuple[str, Step, Micros]]:
        """Who came, who went, who is ready. Returns how long the steps took that ended since the last look."""
        now = seen.observed.monotonic
        took: list[tuple[str, Step, Micros]] = [*self._steps(seen), *self._killed]
        self._killed.clear()
        replicas = {r.name: r for r in seen.observed.replicas}
        for name in set(self._before) - set(replicas):
            gone = self._before[name]
            for gpu in gone.gpus:
                self._left[gpu] = gone.role, gone.since if gone.leaving is None else gone.leaving, now
            if gone.phase is Phase.RELEASING:
                took.append((gone.role, "release", now - gone.since))
            self._taken.pop(name, None)
            self._num_took.pop(name, None)
        for name, replica in replicas.items():
            before = self._before.get(name)
            if before is None:
                self._arrive(replica, now)
            elif before.phase is Phase.ACQUIRING and replica.phase is Phase.ACQUIRED:
                took.append((replica.role, "acquire", replica.since - replica.acquired))
            if name in self._taken and _is_ready(replica, config):
                role, since = self._taken.pop(name)
                self.ledger.handovers.append(
                    Handover(role=replica.role, taken_from=role, num_gpus=len(replica.gpus), duration=now - since)
                )
        self._before, self._now = replicas, now
        return [sample for sample in took if sample[0] in config.roles]

    def _steps(self, seen: Seen) -> list[tuple[str, Step, Micros]]:
        """Each step once: those that ended before this scheduler first saw the replica belong to the one before."""
        found: list[tuple[str, Step, Micros]] = []
        for name, heard in seen.heard.items():
            if heard.status is None:
                self._num_took.setdefault(name, 0)
                continue
            took = heard.status.took
            known = self._num_took.get(name, len(took))
            for step, seconds in took[known:]:
                found.append((heard.status.claim.role, step, self._clock.micros(seconds)))
            self._num_took[name] = len(took)
        return found

    def _arrive(self, replica: Replica, now: Micros) -> None:
        if replica.phase is Phase.ACTIVE:  # it was there before this scheduler
            return
        recent = max(MINUTE, self._clock.micros(MAX_GAP_S))
        left = [self._left[g] for g in replica.gpus if g in self._left and now - self._left[g][2] <= recent]
        taken = (left[0][0], min(since for _, since, _ in left)) if left else (NOBODY, replica.acquired)
        self._taken[replica.name] = taken

    def _count(self, action: Action) -> None:
        if isinstance(action, Drain):
            role = self._before[action.replica].role
            self.ledger.preemptions[role] += 1
            self.ledger.carried[role] += action.carry_unfinished
        elif isinstance(action, Release) and action.kill:
            replica = self._before[action.replica]
            self.ledger.kills[replica.role] += replica.phase is not Phase.LOST
            self.ledger.lost[replica.role] += action.lost
            if replica.phase in STEP_OF:  # it takes at least so long
                self._killed.append((replica.role, STEP_OF[replica.phase], self._now - replica.since))


def _is_ready(replica: Replica, config: PoolConfig) -> bool:
    """Training restores its own state, all others must be on the committed weights."""
    role = config.roles.get(replica.role)
    loads = role is None or not role.checkpoints
    return replica.phase in (Phase.SYNCED, Phase.ACTIVE) or (replica.phase is Phase.WARM and not loads)


def counts_of(seen: Seen, config: PoolConfig) -> Counts:
    """What every GPU of the pool does. Nodes that are not there are dead."""
    healthy = {Gpu(node.name, slot) for node in seen.observed.nodes for slot, ok in enumerate(node.healthy) if ok}
    counts: Counter[tuple[str, State]] = Counter()
    for replica in seen.observed.replicas:
        counts[replica.role, STATES[replica.phase]] += sum(gpu in healthy for gpu in replica.gpus)
    counts[NOBODY, DEAD] = config.pool.num_gpus - len(healthy)
    counts[NOBODY, IDLE] = len(healthy) - sum(n for (role, _), n in counts.items() if role != NOBODY)
    return {key: n for key, n in counts.items() if n}
