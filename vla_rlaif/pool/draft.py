"""A plan while it is being made: what is observed, what is wanted, and how the actions so far change both."""

import functools
from collections import Counter
from dataclasses import dataclass, field

from vla_rlaif.pool.actions import Action, Release, Sync, Violation
from vla_rlaif.pool.clock import Micros, say_time
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.goals import Outlook, Wants
from vla_rlaif.pool.history import Leads
from vla_rlaif.pool.placement import Free, free_gpus
from vla_rlaif.pool.state import COMING, Observed, Phase, Replica

NOTHING_AT_RISK = (*COMING, Phase.SAVED, Phase.RELEASING)


@dataclass(kw_only=True)
class Draft:
    now: Micros
    config: PoolConfig
    observed: Observed
    leads: Leads
    outlook: Outlook
    wants: Wants
    num_nodes: int  # alive
    coming: dict[str, dict[str, Replica]]  # by role and name
    active: dict[str, dict[str, Replica]]
    leaving: dict[str, dict[str, Replica]]
    has_lost: bool  # replicas that died
    num_coming: Counter[str]  # GPUs by role
    num_active: Counter[str]
    actions: list[Action] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    wakeups: list[Micros] = field(default_factory=list)  # instants
    handled: set[str] = field(default_factory=set)  # replicas that have their action
    reserved: dict[str, int] = field(default_factory=dict)  # role -> GPUs that a job of it waits for
    draining: Counter[str] = field(default_factory=Counter)  # node -> GPUs that this plan begins to drain
    killed: Counter[str] = field(default_factory=Counter)  # node -> GPUs that kills of this plan will free

    @functools.cached_property
    def free(self) -> Free:
        return free_gpus(self.observed)

    def holds(self, role: str) -> int:
        """GPUs of replicas that stay: coming and active."""
        return self.num_coming[role] + self.num_active[role]

    def age(self, replica: Replica) -> Micros:
        """Time in its phase."""
        return self.observed.monotonic - replica.since

    def wake_in(self, duration: Micros) -> None:
        self.wakeups.append(self.now + max(duration, 0))

    def say(self, text: str) -> None:
        self.reasons.append(text)

    def when(self, instant: Micros) -> str:
        return say_time(instant, self.outlook.timeline.zone)

    def kill(self, replica: Replica, reason: str) -> None:
        """End it at once; what it did since its last good checkpoint is lost, and said."""
        lost = 0
        if replica.saved is not None and replica.phase not in NOTHING_AT_RISK:
            lost = (self.observed.monotonic - replica.saved) * len(replica.gpus)
        self.actions.append(
            Release(replica=replica.name, kill=True, lost=lost, attempt=replica.attempts, reason=reason)
        )
        self.forget(replica)

    def give_up(self, replica: Replica, reason: str) -> None:
        """Let go of a newcomer. A weight sync in flight is aborted first: it must not write into freed memory."""
        if replica.phase is Phase.SYNCING:
            self.abort_sync(replica, reason)
        else:
            self.actions.append(Release(replica=replica.name, reason=reason))
        self.forget(replica)

    def abort_sync(self, replica: Replica, reason: str) -> None:
        self.actions.append(
            Sync(
                replica=replica.name,
                version=self.observed.version,
                attempt=replica.attempts,
                reason=reason,
                abort=True,
            )
        )

    def forget(self, replica: Replica) -> None:
        """It has its action, and no longer counts as held by its role."""
        self.handled.add(replica.name)
        if self.coming[replica.role].pop(replica.name, None) is not None:
            self.num_coming[replica.role] -= len(replica.gpus)
        elif self.active[replica.role].pop(replica.name, None) is not None:
            self.num_active[replica.role] -= len(replica.gpus)

    def add(self, action: Action, replica: Replica) -> None:
        self.actions.append(action)
        self.handled.add(replica.name)

    def expect(self, replica: Replica) -> None:
        """A newcomer that this plan acquires."""
        self.handled.add(replica.name)
        self.coming[replica.role][replica.name] = replica
        self.num_coming[replica.role] += len(replica.gpus)

    def promote(self, replica: Replica) -> None:
        """A newcomer that this plan admits."""
        del self.coming[replica.role][replica.name]
        self.num_coming[replica.role] -= len(replica.gpus)
        self.active[replica.role][replica.name] = replica
        self.num_active[replica.role] += len(replica.gpus)
