"""Simulated GPUs: applies actions, and says when each step is over. Knows no calendar and decides nothing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from vla_rlaif.pool.actions import Acquire, Action, Admit, Checkpoint, Drain, Reject, Release, Sync, Warm
from vla_rlaif.pool.clock import MINUTE, Micros
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.history import Recorder, Step
from vla_rlaif.pool.ledger import DEAD, IDLE, NOBODY, STATES, Handover, Ledger, State
from vla_rlaif.pool.physics import Physics
from vla_rlaif.pool.state import COMING, Gpu, Job, Node, Observed, Phase, Replica
from vla_rlaif.pool.trace import JobSubmitted, node_names

SHORT_IDLE = MINUTE  # GPUs that were free for longer were not handed over, but found


STEP_OF: dict[Phase, tuple[Step, Phase]] = {
    Phase.ACQUIRING: ("acquire", Phase.ACQUIRED),
    Phase.WARMING: ("warmup", Phase.WARM),
    Phase.SYNCING: ("sync", Phase.SYNCED),
    Phase.DRAINING: ("drain", Phase.DRAINED),
    Phase.CHECKPOINTING: ("checkpoint", Phase.SAVED),
}


class World:
    """``after(at, replica, since)`` is told when a step will be over; the caller gives that back to ``finish``."""

    def __init__(
        self, config: PoolConfig, physics: Physics, ledger: Ledger, after: Callable[[Micros, str, Micros], None]
    ) -> None:
        self.config, self.physics, self.ledger = config, physics, ledger
        self.replicas: dict[str, Replica] = {}
        self.jobs: dict[str, Job] = {}
        self.recorder = Recorder()
        self.version = 0
        self.counts: Counter[tuple[str, State]] = Counter({(NOBODY, IDLE): config.pool.num_gpus})
        self._after = after
        self._healthy = {name: [True] * config.pool.gpus_per_node for name in node_names(config)}
        self._nodes = self._look()
        self._applied: set[str] = set()
        self._generation: dict[Gpu, int] = {}
        self._left: dict[Gpu, tuple[str, Micros, Micros]] = {}  # role, start of its drain, moment it was free
        self._taken: dict[str, tuple[str, Micros]] = {}  # replica -> whom it took GPUs from, and since when
        self._remaining: dict[str, Micros] = {}  # job -> work left
        self._began: dict[str, Micros] = {}  # job -> start of its present run
        self._jobs: dict[str, Job] = {}

    def observe(self, now: Micros, *, decided: Micros | None, p99_ms: dict[str, float]) -> Observed:
        return Observed(
            monotonic=now,
            nodes=self._nodes,
            replicas=tuple(self.replicas.values()),
            jobs=tuple(self.jobs.values()),
            version=self.version,
            p99_ms=p99_ms,
            generation=self._generation,
            decided=decided,
        )

    def apply(self, action: Action, now: Micros) -> None:
        """Each key at most once."""
        if action.key in self._applied:
            return
        self._applied.add(action.key)
        match action:
            case Acquire():
                self._acquire(action, now)
            case Reject():
                old = self._jobs[action.job]
                self._jobs[action.job] = replace(old, eta=action.eta, is_answered=True, answers=old.answers + 1)
                if action.job in self.jobs:
                    self.jobs[action.job] = self._jobs[action.job]
            case Warm():
                self._enter(action.replica, Phase.WARMING, now)
            case Sync(abort=False):
                self._enter(action.replica, Phase.SYNCING, now, version=action.version)
            case Sync():
                self._abort_sync(action.replica, now)
            case Admit():
                self._admit(action.replica, now)
            case Drain():
                replica = self._enter(action.replica, Phase.DRAINING, now, leaving=now)
                self.ledger.preemptions[replica.role] += 1
                self.ledger.carried[replica.role] += action.carry_unfinished
            case Checkpoint():
                self._enter(action.replica, Phase.CHECKPOINTING, now)
            case Release():
                self._release(action, now)

    def finish(self, name: str, since: Micros, now: Micros) -> bool:
        """The step that a replica began at ``since`` is over, unless something came between. True: it changed."""
        replica = self.replicas.get(name)
        if replica is None or replica.since != since:
            return False
        if replica.phase is Phase.ACTIVE:  # a job is done
            assert replica.job is not None, "only jobs end by themselves"
            self._remaining.pop(replica.job)
            self._enter(name, Phase.RELEASING, now, leaving=now)
            return True
        if replica.phase is Phase.RELEASING:
            self.recorder.add(replica.role, "release", now - since)
            self._remove(replica, now)
            return True
        step, phase = STEP_OF[replica.phase]
        self.recorder.add(replica.role, step, now - since)
        if phase is Phase.SAVED and self.physics.fails(self.config.roles[replica.role], replica):
            self._put(replace(replica, phase=Phase.UNSAVED, since=now, attempts=replica.attempts + 1))
            return True
        saved = since if phase is Phase.SAVED else replica.saved
        self._put(replace(replica, phase=phase, since=now, saved=saved, attempts=0))
        is_ready = phase is (Phase.WARM if self.config.roles[replica.role].checkpoints else Phase.SYNCED)
        if is_ready and name in self._taken:
            role, began = self._taken.pop(name)
            self.ledger.handovers.append(
                Handover(role=replica.role, taken_from=role, num_gpus=len(replica.gpus), duration=now - began)
            )
        return True

    def submit(self, event: JobSubmitted, now: Micros) -> None:
        job = Job(
            name=event.name,
            role=event.role,
            num_gpus=event.num_gpus,
            min_runtime=event.min_runtime,
            submitted=now,
            one_node=event.one_node,
        )
        self._remaining[job.name] = event.runtime
        self.jobs[job.name] = self._jobs[job.name] = job

    def set_health(self, node: str, slots: range | tuple[int, ...], *, healthy: bool, now: Micros) -> None:
        """GPUs die or come back; replicas on GPUs that die are lost as a whole."""
        for slot in slots:
            self._healthy[node][slot] = healthy
        self._nodes = self._look()
        for replica in list(self.replicas.values()):
            hit = any(g.node == node and g.slot in slots for g in replica.gpus)
            if hit and not healthy and replica.phase is not Phase.LOST:
                self._lose(replica, now)
                self.replicas[replica.name] = replace(replica, phase=Phase.LOST, since=now)
        self._recount()

    def save_all(self, now: Micros) -> None:
        """Training writes its own checkpoints."""
        for name, replica in self.replicas.items():
            if replica.phase is Phase.ACTIVE and replica.saved is not None:
                self.replicas[name] = replace(replica, saved=now)

    def begin_sync(self, now: Micros) -> None:
        for name, replica in self.replicas.items():
            if replica.phase is Phase.ACTIVE and not self.config.roles[replica.role].checkpoints:
                self.replicas[name] = replace(replica, syncing_since=now)

    def end_sync(self) -> None:
        for name, replica in self.replicas.items():
            if replica.syncing_since is not None:
                self.replicas[name] = replace(replica, syncing_since=None)

    def active(self, role: str) -> int:
        return self.counts[role, "active"]

    @property
    def is_in_transition(self) -> bool:
        return any(r.phase is not Phase.ACTIVE for r in self.replicas.values())

    def _acquire(self, action: Acquire, now: Micros) -> None:
        left = [self._left[g] for g in action.gpus if g in self._left and now - self._left[g][2] <= SHORT_IDLE]
        role, since = (left[0][0], min(start for _, start, _ in left)) if left else (NOBODY, now)
        self._taken[action.replica] = (role, since)
        for gpu in action.gpus:
            self._generation[gpu] = self._generation.get(gpu, 0) + 1
        if action.job is not None:
            self.jobs.pop(action.job)
        newcomer = Replica(
            name=action.replica,
            role=action.role,
            gpus=action.gpus,
            phase=Phase.ACQUIRING,
            since=now,
            acquired=now,
            job=action.job,
        )
        self.counts[NOBODY, IDLE] -= len(action.gpus)
        self.counts[action.role, STATES[Phase.ACQUIRING]] += len(action.gpus)
        self.replicas[newcomer.name] = newcomer
        self._schedule(newcomer, now)

    def _admit(self, name: str, now: Micros) -> None:
        replica = self.replicas[name]
        saved = now if self.config.roles[replica.role].checkpoints else None
        self._put(replace(replica, phase=Phase.ACTIVE, since=now, saved=saved))
        if replica.job is not None:
            self._began[replica.job] = now
            self._after(now + self._remaining[replica.job], name, now)

    def _abort_sync(self, name: str, now: Micros) -> None:
        replica = self.replicas[name]
        if replica.phase is Phase.SYNCING:
            self._put(replace(replica, phase=Phase.WARM, since=now, version=None, attempts=replica.attempts + 1))
        else:
            self.replicas[name] = replace(replica, syncing_since=None, attempts=replica.attempts + 1)

    def _release(self, action: Release, now: Micros) -> None:
        replica = self.replicas[action.replica]
        if action.kill and replica.phase in STEP_OF:  # it took at least so long
            self.recorder.add(replica.role, STEP_OF[replica.phase][0], now - replica.since)
        if action.kill and replica.phase is not Phase.LOST:
            self._lose(replica, now)
            self.ledger.kills[replica.role] += 1
            self.ledger.preemptions[replica.role] += replica.phase is Phase.ACTIVE
        if action.kill:
            self.replicas[replica.name] = replace(replica, attempts=replica.attempts + 1)
        self._enter(action.replica, Phase.RELEASING, now, leaving=replica.leaving or now)

    def _lose(self, replica: Replica, now: Micros) -> None:
        """Count the work that has to be done again."""
        if replica.phase in COMING or replica.phase in (Phase.SAVED, Phase.RELEASING):
            return
        role, unsaved = self.config.roles[replica.role], 0
        if replica.saved is not None:
            unsaved = now - replica.saved
        elif role.preemptible == "at_chunk" and replica.phase is Phase.ACTIVE:
            unsaved = (now - replica.since) % max(role.drain, 1)  # the group it was in
        self.ledger.lost[replica.role] += unsaved * len(replica.gpus)

    def _enter(
        self, name: str, phase: Phase, now: Micros, *, leaving: Micros | None = None, version: int | None = None
    ) -> Replica:
        """Begin a step."""
        old = self.replicas[name]
        new = replace(
            old,
            phase=phase,
            since=now,
            leaving=old.leaving if leaving is None else leaving,
            version=old.version if version is None else version,
        )
        self._put(new)
        self._schedule(new, now)
        return new

    def _schedule(self, replica: Replica, now: Micros) -> None:
        step: Step = "release" if replica.phase is Phase.RELEASING else STEP_OF[replica.phase][0]
        self._after(now + self.physics.takes(self.config.roles[replica.role], replica, step), replica.name, now)

    def _put(self, new: Replica) -> None:
        """Replace a replica none of whose GPUs changed their health."""
        old = self.replicas[new.name]
        self.replicas[new.name] = new
        if old.phase is Phase.LOST or new.phase is Phase.LOST:
            self._recount()
            return
        self.counts[old.role, STATES[old.phase]] -= len(old.gpus)
        self.counts[new.role, STATES[new.phase]] += len(new.gpus)

    def _remove(self, replica: Replica, now: Micros) -> None:
        del self.replicas[replica.name]
        self._taken.pop(replica.name, None)
        for gpu in replica.gpus:
            self._left[gpu] = (replica.role, replica.since if replica.leaving is None else replica.leaving, now)
        alive = sum(self._healthy[g.node][g.slot] for g in replica.gpus)
        self.counts[replica.role, STATES[replica.phase]] -= alive
        self.counts[NOBODY, IDLE] += alive
        if replica.job in self._remaining:  # preempted: it waits again, with what it saved
            began = self._began.pop(replica.job, now)
            self._remaining[replica.job] -= 0 if replica.saved is None else max(replica.saved - began, 0)
            self.jobs[replica.job] = self._jobs[replica.job]

    def _recount(self) -> None:
        self.counts.clear()
        dead = sum(not ok for slots in self._healthy.values() for ok in slots)
        for replica in self.replicas.values():
            alive = sum(self._healthy[g.node][g.slot] for g in replica.gpus)
            self.counts[replica.role, STATES[replica.phase]] += alive
        self.counts[NOBODY, DEAD] = dead
        self.counts[NOBODY, IDLE] = self.config.pool.num_gpus - self.counts.total()

    def _look(self) -> tuple[Node, ...]:
        return tuple(Node(name=name, healthy=tuple(slots)) for name, slots in self._healthy.items())
