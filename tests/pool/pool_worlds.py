"""Pools for tests: the factory's, a small one, and a bench on which a test decides when each step ends."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from vla_rlaif.pool.actions import Action, Plan
from vla_rlaif.pool.calendar import Override, Timeline, around
from vla_rlaif.pool.clock import DAY, HOUR, Micros, resolve, zone_of
from vla_rlaif.pool.config import PoolConfig, parse_pool
from vla_rlaif.pool.history import COLD, History
from vla_rlaif.pool.ledger import Ledger
from vla_rlaif.pool.physics import Physics
from vla_rlaif.pool.planner import plan
from vla_rlaif.pool.state import Phase, Replica
from vla_rlaif.pool.trace import JobSubmitted
from vla_rlaif.pool.world import World

FACTORY = Path(__file__).parents[2] / "configs" / "pool_factory.yaml"
SMALL: dict[str, Any] = {
    "pool": {"nodes": 3, "gpus_per_node": 4},
    "timezone": "UTC",
    "windows": [
        {"name": "day", "days": "mon-sun", "start": "06:00", "end": "22:00"},
        {"name": "night", "days": "mon-sun", "start": "22:00", "end": "06:00"},
    ],
    "shares": {
        "day": {"serve": {"min": 3, "target": 4}, "train": {"target": 8}},
        "night": {"serve": {"min": 1, "target": 1}, "train": {"target": 2}, "rollout": {"target": 8}},
    },
    "roles": {
        "serve": {"priority": 100, "preemptible": False, "warmup": "60s"},
        "train": {"priority": 50, "preemptible": "checkpoint", "drain": "60s"},
        "rollout": {"priority": 10, "preemptible": "at_chunk", "drain": "30s"},
    },
}


def factory(**changes: Any) -> PoolConfig:
    """The example pool, with some sections replaced."""
    return parse_pool(yaml.safe_load(FACTORY.read_text()) | changes, source="test")


def small(change: Callable[[dict[str, Any]], object] | None = None) -> PoolConfig:
    """Twelve GPUs in UTC; ``change`` edits the mapping."""
    data = copy.deepcopy(SMALL)
    if change is not None:
        change(data)
    return parse_pool(data, source="test")


def at(text: str, zone: str = "Europe/Berlin") -> Micros:
    return resolve(datetime.fromisoformat(text), zone_of(zone))


class Bench:
    """A planner on a simulated pool whose steps end when the test says so. Wall and monotonic clock are separate."""

    def __init__(self, config: PoolConfig, now: Micros, *, overrides: tuple[Override, ...] = ()) -> None:
        self.config, self.now, self.mono = config, now, 0
        self.overrides = overrides
        self.history: History = COLD
        self.decided: Micros | None = None
        self.keys: list[str] = []
        self.p99_ms: dict[str, float] = {}
        self._timelines: dict[tuple, Timeline] = {}
        ledger = Ledger(start=0, num_gpus=config.pool.num_gpus)
        self.world = World(config, Physics(), ledger, lambda *_: None)

    def settle(self) -> Plan:
        """Plan and end every step at once, until nothing is left to do."""
        for _ in range(60):
            planned = self.step()
            if not self.finish() and not planned.actions:
                return planned
        raise AssertionError(f"the planner goes round in circles: {self.keys[-8:]}")

    def submit(
        self, name: str, *, num_gpus: int, minutes: int = 60, role: str = "train", one_node: bool = False
    ) -> None:
        """A job that needs so many minutes to be worth a start, and runs for 100 hours."""
        fields = {"name": name, "role": role, "num_gpus": num_gpus, "one_node": one_node}
        job = JobSubmitted.model_validate(fields | {"runtime": "100h", "min_runtime": f"{minutes}m"})
        self.world.submit(job, self.mono)

    def pass_time(self, duration: Micros) -> None:
        self.now += duration
        self.mono += duration

    def ask(self) -> Plan:
        observed = self.world.observe(self.mono, decided=self.decided, p99_ms=self.p99_ms)
        key = (id(self.config), tuple((o.id, o.start, o.end) for o in self.overrides), self.now // DAY)
        if key not in self._timelines:
            self._timelines[key] = around(self.config, self.now, overrides=self.overrides)
        return plan(self.now, self._timelines[key], self.config, observed, self.history)

    def step(self) -> Plan:
        """Plan and apply."""
        planned = self.ask()
        self.decided = max(self.now, self.decided or 0)
        for action in planned.actions:
            self.keys.append(action.key)
            self.world.apply(action, self.mono)
        return planned

    def finish(self, which: Callable[[Replica], bool] = lambda _: True) -> int:
        """End the steps in progress of some replicas; returns how many."""
        ended = 0
        for replica in list(self.world.replicas.values()):
            busy = (Phase.ACQUIRING, Phase.WARMING, Phase.SYNCING, Phase.DRAINING, Phase.CHECKPOINTING, Phase.RELEASING)
            if replica.phase in busy and which(replica):
                self.world.finish(replica.name, replica.since, self.mono)
                ended += 1
        return ended

    def put(self, replica: Replica, **changes: Any) -> None:
        """Change what is observed of a replica."""
        self.world.replicas[replica.name] = replace(replica, **changes)

    def of(self, role: str, *phases: Phase) -> list[Replica]:
        return [r for r in self.world.replicas.values() if r.role == role and r.phase in (phases or (Phase.ACTIVE,))]

    def num(self, role: str, *phases: Phase) -> int:
        return sum(len(r.gpus) for r in self.of(role, *phases))


def kinds(actions: tuple[Action, ...]) -> dict[str, int]:
    """How many actions of each kind, with the role they name."""
    counts: dict[str, int] = {}
    for action in actions:
        kind = type(action).__name__
        counts[kind] = counts.get(kind, 0) + 1
    return counts


MORNING, EVENING = at("2026-11-03T06:00"), at("2026-11-03T22:00")


def bench(before: Micros, boundary: Micros = MORNING, config: PoolConfig | None = None) -> Bench:
    """A settled pool, some time before a boundary, on which everything has run for an hour."""
    start = Bench(config or factory(), boundary - before - HOUR)
    start.settle()
    start.pass_time(HOUR)
    return start


def spread(replicas: Sequence[Replica]) -> int:
    """The most replicas that share a node."""
    return max(Counter(r.gpus[0].node for r in replicas).values())
