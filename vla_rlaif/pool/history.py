"""How long the steps of a handover take: measured where there are enough samples, declared until then."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from vla_rlaif.pool.clock import SECOND, Micros
from vla_rlaif.pool.config import PoolConfig, Role

Step = Literal["acquire", "warmup", "sync", "drain", "checkpoint", "release"]
STEPS: tuple[Step, ...] = ("acquire", "warmup", "sync", "drain", "checkpoint", "release")
MIN_SAMPLES = 5  # fewer say nothing about a tail
KEPT_SAMPLES = 200  # the newest
MIN_TIMEOUT = 10 * SECOND  # below it a scheduler that looks once a second would kill healthy steps


@dataclass(frozen=True, kw_only=True)
class History:
    """95th percentiles (nearest rank) of measured steps, by role and step."""

    p95: Mapping[tuple[str, Step], Micros] = field(default_factory=dict)


COLD = History()


class Recorder:
    """Collects durations; may know neither roles nor calendar."""

    def __init__(self, samples: Iterable[tuple[str, Step, Micros]] = ()) -> None:
        self._samples: dict[tuple[str, Step], deque[Micros]] = defaultdict(lambda: deque(maxlen=KEPT_SAMPLES))
        self._p95: dict[tuple[str, Step], Micros] = {}
        self._stale: set[tuple[str, Step]] = set()
        for role, step, duration in samples:
            self.add(role, step, duration)

    def add(self, role: str, step: Step, duration: Micros) -> None:
        self._samples[role, step].append(duration)
        self._stale.add((role, step))

    def history(self) -> History:
        for key in self._stale:
            if len(self._samples[key]) >= MIN_SAMPLES:
                self._p95[key] = percentile(self._samples[key], 0.95)
        self._stale.clear()
        return History(p95=dict(self._p95))


def percentile(samples: Iterable[Micros], share: float) -> Micros:
    """Nearest rank: the smallest sample that at least this share does not exceed."""
    ordered = sorted(samples)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


class Leads:
    """Times to plan with, of every role: safety x p95."""

    def __init__(self, config: PoolConfig, history: History) -> None:
        self._roles, self._history = config.roles, history
        self.safety = config.transition.safety
        self.out, self.into = {}, {}
        self._budget: dict[str, tuple[Micros, Micros]] = {}
        self._timeouts: dict[tuple[str, Step], Micros] = {}
        for name, role in config.roles.items():
            e = {step: expected(history, name, role, step) for step in STEPS}
            self.out[name] = e["drain"] + e["checkpoint"] + e["release"]
            self.into[name] = e["acquire"] + e["warmup"] + e["sync"]
        self.longest = self.scaled(max(self.out.values()) + max(self.into.values()))

    def scaled(self, duration: Micros) -> Micros:
        return round(self.safety * duration)

    def _expected(self, role: str, step: Step) -> Micros:
        return expected(self._history, role, self._roles[role], step)

    def handover(self, loser: str, gainer: str) -> Micros:
        """From the start of the drain until the newcomer is ready."""
        return self.scaled(self.out[loser] + self.into[gainer])

    def timeout(self, role: str, step: Step) -> Micros:
        """After so long a start, a sync or a release hangs. Not less than declared: fast ones make no slow one sick."""
        if (role, step) not in self._timeouts:
            longest = max(self._expected(role, step), expected(COLD, role, self._roles[role], step))
            self._timeouts[role, step] = max(self.scaled(longest), MIN_TIMEOUT)
        return self._timeouts[role, step]

    def _budgets(self, role: str) -> tuple[Micros, Micros]:
        """From the start of a drain: the last moments to end the drain, and to end the checkpoint."""
        if role not in self._budget:
            checkpoint, release = self._expected(role, "checkpoint"), self._expected(role, "release")
            drain = max(self.scaled(self.out[role]) - checkpoint - release, MIN_TIMEOUT)
            self._budget[role] = (drain, max(self.scaled(self.out[role]) - release, drain + checkpoint))
        return self._budget[role]

    def drain_budget(self, role: str) -> Micros:
        """From the start of a drain to the last moment at which the steps after it still fit."""
        return self._budgets(role)[0]

    def save_budget(self, role: str) -> Micros:
        """From the start of a drain to the last moment at which the release still fits."""
        return self._budgets(role)[1]


def expected(history: History, name: str, role: Role, step: Step) -> Micros:
    """Measured p95, else declared; 0 for a step that the role does not take."""
    if (step == "checkpoint" and not role.checkpoints) or (step == "sync" and role.checkpoints):
        return 0
    measured = history.p95.get((name, step))
    if measured is not None:
        return measured
    declared = {
        "acquire": role.acquire,
        "warmup": role.warmup,
        "sync": role.sync,
        "drain": role.drain,
        "checkpoint": role.checkpoint,
        "release": role.release,
    }
    return declared[step]
