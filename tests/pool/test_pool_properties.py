"""What must hold whatever happens: random calendars, random failures, and steps that end in any order."""

import copy
import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from pool_worlds import SMALL, Bench, at

from vla_rlaif.pool.actions import Acquire, Admit, Drain, Release
from vla_rlaif.pool.clock import DAY, HOUR, MINUTE, SECOND
from vla_rlaif.pool.config import parse_pool
from vla_rlaif.pool.physics import Physics
from vla_rlaif.pool.simulate import simulate
from vla_rlaif.pool.state import Gpu, Phase
from vla_rlaif.pool.trace import NodeDown, NodeUp, Timed

RELAXED = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Stage.explicit, Stage.reuse, Stage.generate],  # an example is small already, and each takes a second
)
START = at("2026-03-27T05:00", "Europe/Berlin")


@st.composite
def pools(draw) -> dict:
    """Three nodes of four GPUs, two or three windows a day, shares that fit 12 GPUs. As a mapping: see parse_pool."""
    hours = sorted(draw(st.sets(st.integers(0, 23), min_size=2, max_size=3)))
    names = ["a", "b", "c"][: len(hours)]
    data = copy.deepcopy(SMALL)
    data["timezone"] = draw(st.sampled_from(["Europe/Berlin", "Australia/Lord_Howe"]))
    data["windows"] = [
        {"name": n, "days": "mon-sun", "start": f"{h:02}:00", "end": f"{hours[(i + 1) % len(hours)]:02}:00"}
        for i, (n, h) in enumerate(zip(names, hours, strict=True))
    ]
    data["shares"] = {}
    for name in names:
        least = draw(st.integers(0, 4))
        serve = draw(st.integers(least, 6))
        train = draw(st.integers(0, 11 - max(serve, 6)))
        data["shares"][name] = {
            "serve": {"min": least, "target": serve},
            "train": {"min": draw(st.integers(0, min(train, 2))), "target": train},
            "rollout": {"target": max(12 - serve - train, 0)},
        }
    return data


def check(pool: Bench, floors: dict[str, int]) -> None:
    """One plan: pure, on free GPUs only, each key once, and no drain takes a role below its minimum."""
    before = {role: pool.num(role) for role in pool.config.roles}
    held = {gpu for r in pool.world.replicas.values() for gpu in r.gpus}
    healthy = {Gpu(n.name, i) for n in pool.world._look() for i, ok in enumerate(n.healthy) if ok}
    first, known = pool.ask(), set(pool.keys)
    assert first == pool.ask()
    planned = pool.step()
    assert planned.actions == first.actions
    new = [a.key for a in planned.actions]
    assert known.isdisjoint(new) and len(new) == len(set(new))
    taken = [gpu for a in planned.actions if isinstance(a, Acquire) for gpu in a.gpus]
    assert len(taken) == len(set(taken)) and set(taken) <= healthy - held
    admitted = {a.replica for a in planned.actions if isinstance(a, Admit)}
    drained = Counter(
        pool.world.replicas[a.replica].role
        for a in planned.actions
        if isinstance(a, Drain) and a.replica not in admitted
    )
    for role, minimum in floors.items():
        if drained[role] and not any(isinstance(a, Release) and a.kill for a in planned.actions):
            assert pool.num(role) >= min(minimum, before[role])
    for replica in pool.of("serve"):
        assert replica.version == pool.world.version
    assert planned.next_wakeup > pool.now
    # What was applied is not planned again; what it made possible may follow, and comes to an end.
    for _ in range(6):
        known = set(pool.keys)
        planned = pool.step()
        assert known.isdisjoint(a.key for a in planned.actions)
    assert planned.actions == ()


@RELAXED
@given(data=pools(), seed=st.integers(0, 10_000), offset=st.integers(0, 24 * 60))
def test_plans_are_safe_and_idempotent_in_any_order_of_events(data, seed, offset):
    config, rng = parse_pool(data, source="test"), random.Random(seed)
    pool = Bench(config, START + offset * MINUTE)
    pool.settle()
    down: str | None = None
    for _ in range(10):
        pool.pass_time(rng.choice([SECOND, 30 * SECOND, 2 * MINUTE, 20 * MINUTE, 3 * HOUR]))
        pool.finish(lambda _: rng.random() < 0.6)
        event = rng.random()
        if event < 0.08 and down is None:
            down = rng.choice(["node-0", "node-1", "node-2"])
            pool.world.set_health(down, range(4), healthy=False, now=pool.mono)
        elif event < 0.2 and down is not None:
            pool.world.set_health(down, range(4), healthy=True, now=pool.mono)
            down = None
        elif event < 0.25:
            pool.now -= 5 * SECOND
        elif event < 0.3:
            pool.now += 2 * HOUR
        elif event < 0.4:
            pool.decided = None
        elif event < 0.5:
            pool.world.version += 1
            for replica in pool.of("serve"):
                pool.put(replica, version=pool.world.version)
        planned = pool.ask()
        check(pool, {r: config.share(planned.window, r).min for r in config.roles})
    # When it calms down, every role has what the calendar says, and nothing else moves.
    if down is not None:
        pool.world.set_health(down, range(4), healthy=True, now=pool.mono)
    pool.now = max(pool.now, pool.decided or 0)
    for _ in range(3):
        pool.settle()
        pool.pass_time(11 * MINUTE)
    planned = pool.settle()
    if planned.next_wakeup - pool.now > 20 * MINUTE:
        assert {r: pool.num(r) + pool.num(r, Phase.SYNCED, Phase.WARM) for r in config.roles} == planned.goals


@RELAXED
@given(data=pools(), seed=st.integers(0, 10_000), failures=st.integers(0, 3))
def test_minimums_hold_through_every_boundary_and_one_dead_node(data, seed, failures):
    """Serving survives any one node at a time; what can be preempted keeps its minimum while nothing dies."""
    config, rng, events, at_ = parse_pool(data, source="test"), random.Random(seed), [], START
    for _ in range(failures):
        at_ += rng.randrange(2 * HOUR, 9 * HOUR)
        node = rng.choice(["node-0", "node-1", "node-2"])
        events += [Timed(at_, NodeDown(node=node)), Timed(at_ + HOUR, NodeUp(node=node))]
        at_ += HOUR
    run = simulate(config, start=START, days=1.5, physics=Physics(seed=seed), events=events)
    assert run.ledger.total == 12 * run.ledger.now - 12 * START == 12 * round(1.5 * DAY)
    assert sum(run.ledger.by("role", "window").values()) == run.ledger.total
    assert all(type(spent) is int for spent in run.ledger.spent.values())
    # Six GPUs at most are enough for a minimum of four: with its spare serve has 6 on three nodes.
    assert run.ledger.below["serve"] == 0
    if not failures:
        assert not run.ledger.below and not run.breaches
        assert not run.ledger.kills and not run.ledger.lost
        # Up to its target serve may be late where it has to change nodes first.
        assert all(t.late < 5 * MINUTE for t in run.ledger.lateness if t.role == "serve")
