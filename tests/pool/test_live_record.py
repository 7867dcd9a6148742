"""The live ledger: sums to the pool's size times the wall time, whatever is seen when, and survives the scheduler."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_worlds import at, small

from vla_rlaif.pool.actions import Drain, Plan, Release
from vla_rlaif.pool.archive import Archive
from vla_rlaif.pool.calendar import around
from vla_rlaif.pool.clock import HOUR, MINUTE, SECOND, Micros
from vla_rlaif.pool.ledger import NOBODY, Ledger
from vla_rlaif.pool.live_clock import LiveClock
from vla_rlaif.pool.observe import Heard, Seen
from vla_rlaif.pool.record import MAX_GAP_S, UNSEEN, Record
from vla_rlaif.pool.replica import Claim, Report, Status
from vla_rlaif.pool.state import Gpu, Node, Observed, Phase, Replica

CONFIG = small()  # 3 nodes of 4 GPUs; day from 06:00, night from 22:00
START = at("2026-11-02T21:00", "UTC")
TIMELINE = around(CONFIG, START)
CLOCK = LiveClock()
NODES = tuple(Node(name=f"node-{i}", healthy=(True,) * 4) for i in range(3))


def replica(
    name: str,
    role: str,
    slot: int,
    phase: Phase,
    *,
    since: Micros = 0,
    acquired: Micros = 0,
    leaving: Micros | None = None,
) -> Replica:
    gpus = (Gpu("node-0", slot),)
    return Replica(name=name, role=role, gpus=gpus, phase=phase, since=since, acquired=acquired, leaving=leaving)


def seen(*replicas: Replica, monotonic: Micros = 0, nodes: tuple[Node, ...] = NODES, took: tuple = ()) -> Seen:
    heard = {}
    for r in replicas:
        claim = Claim(replica=r.name, role=r.role, gpus=r.gpus)
        status = Status(
            **{"claim": claim, "phase": r.phase, "age_s": 0.0, "leaving_s": None, "attempts": 0, "is_over": False},
            **{"took": took, "report": Report(), "gpu_ids": (), "error": None},
        )
        heard[r.name] = Heard(status=status)
    observed = Observed(monotonic=monotonic, nodes=nodes, replicas=replicas)
    return Seen(observed=observed, entries={}, heard=heard)


def new_record() -> Record:
    return Record(CLOCK, Ledger(start=START, num_gpus=12), {(NOBODY, UNSEEN): 12})


def plan_of(*actions: Drain | Release, goals: dict[str, int] | None = None) -> Plan:
    return Plan(
        **{"actions": actions, "next_wakeup": START + HOUR, "reasons": (), "violations": (), "window": "day"},
        **{"goals": goals or {}, "accumulation": {}},
    )


PHASES = st.lists(st.sampled_from(list(Phase)), min_size=0, max_size=4)
STEPS = st.integers(min_value=-5 * SECOND, max_value=40 * MINUTE)


@given(looks=st.lists(st.tuples(STEPS, PHASES, st.booleans()), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_gpu_time_sums_exactly_to_the_pool_times_the_wall(looks: list[tuple[Micros, list[Phase], bool]]) -> None:
    """Random looks: clocks that go back, gaps, boundaries in between, a node that is not there."""
    record, now = new_record(), START
    for step, phases, is_whole in looks:
        now += step
        replicas = [replica(f"r{i}", "serve", i, phase) for i, phase in enumerate(phases)]
        record.book(seen(*replicas, nodes=NODES if is_whole else NODES[:2]), CONFIG, TIMELINE, now)
        assert sum(record.counts.values()) == 12
    latest = record.ledger.now
    assert latest >= now
    assert record.ledger.total == 12 * (latest - START)


def test_time_is_booked_as_the_look_before_found_it_and_split_at_the_boundary() -> None:
    record = new_record()
    record.book(seen(replica("a", "train", 0, Phase.ACTIVE)), CONFIG, TIMELINE, START)
    clock, now = START, at("2026-11-02T22:00", "UTC")
    while clock < now + 10 * MINUTE:  # looks every 20 s: none falls on the boundary
        clock += 20 * SECOND + 1
        record.book(seen(replica("a", "train", 0, Phase.ACTIVE)), CONFIG, TIMELINE, clock)
    assert record.ledger.spent["train", "day", "active"] == HOUR
    assert record.ledger.spent["train", "night", "active"] == clock - now
    assert record.ledger.below["serve"] == clock - START  # 3 by day, 1 at night, and there is none


def test_a_gap_belongs_to_nobody() -> None:
    record = new_record()
    record.book(seen(replica("a", "train", 0, Phase.ACTIVE)), CONFIG, TIMELINE, START)
    later = START + round(MAX_GAP_S * SECOND) + 1
    record.book(seen(replica("a", "train", 0, Phase.ACTIVE)), CONFIG, TIMELINE, later)
    assert record.ledger.by("state") == {("unseen",): 12 * (later - START)}


def test_a_dead_node_counts_as_dead() -> None:
    record = new_record()
    record.book(seen(nodes=NODES[1:]), CONFIG, TIMELINE, START)
    assert record.counts == {(NOBODY, "dead"): 4, (NOBODY, "idle"): 8}


def test_a_handover_lasts_from_the_drain_until_the_newcomer_is_ready() -> None:
    """The trainer drains at 100 s and is gone at 130 s; who got its GPU is synced at 170 s: 70 s."""
    record, s = new_record(), SECOND
    trainer = replica("t", "train", 0, Phase.RELEASING, leaving=100 * s, since=120 * s)
    record.follow(seen(trainer, monotonic=125 * s), CONFIG)
    newcomer = replica("r", "rollout", 0, Phase.ACQUIRING, acquired=128 * s, since=128 * s)
    took = record.follow(seen(newcomer, monotonic=130 * s), CONFIG)
    assert took == [("train", "release", 10 * s)]
    record.follow(seen(replace(newcomer, phase=Phase.SYNCED), monotonic=170 * s), CONFIG)
    [handover] = record.ledger.handovers
    assert (handover.role, handover.taken_from, handover.num_gpus, handover.duration) == ("rollout", "train", 1, 70 * s)


def test_every_step_is_measured_once() -> None:
    record, s = new_record(), SECOND
    first = replica("r", "serve", 0, Phase.ACQUIRING)
    record.follow(Seen(observed=seen(first).observed, entries={}, heard={"r": Heard()}), CONFIG)
    acquired = replace(first, phase=Phase.ACQUIRED, since=3 * s)
    assert record.follow(seen(acquired, monotonic=3 * s), CONFIG) == [("serve", "acquire", 3 * s)]
    warm = seen(replace(first, phase=Phase.WARM, since=9 * s), monotonic=9 * s, took=(("warmup", 6.0),))
    assert record.follow(warm, CONFIG) == [("serve", "warmup", 6 * s)]
    assert record.follow(warm, CONFIG) == []
    other = new_record()  # of the next scheduler
    assert other.follow(warm, CONFIG) == []


def test_a_drain_that_is_cut_short_counts_for_the_lead_and_as_lost_work() -> None:
    record, s = new_record(), SECOND
    record.follow(seen(replica("t", "train", 0, Phase.DRAINING, since=10 * s), monotonic=50 * s), CONFIG)
    kill = Release(replica="t", kill=True, lost=7 * s, reason="")
    record.note(plan_of(kill), TIMELINE, START)
    assert (record.ledger.kills["train"], record.ledger.lost["train"]) == (1, 7 * s)
    assert record.follow(seen(monotonic=51 * s), CONFIG) == [("train", "drain", 40 * s)]


def test_lateness_is_measured_from_the_boundary() -> None:
    record, night = new_record(), at("2026-11-02T22:00", "UTC")
    record.note(plan_of(goals={"rollout": 0}), TIMELINE, night - MINUTE)
    record.note(plan_of(goals={"rollout": 1}), TIMELINE, night + 1)
    record.book(seen(replica("r", "rollout", 0, Phase.ACTIVE)), CONFIG, TIMELINE, night + MINUTE)
    record.note(plan_of(goals={"rollout": 1}), TIMELINE, night + MINUTE)
    [entry] = record.ledger.lateness
    assert (entry.role, entry.boundary, entry.late, entry.arrived) == ("rollout", night, MINUTE, True)


def test_the_next_scheduler_goes_on_with_the_record(tmp_path: Path) -> None:
    first = Archive(tmp_path).open(CLOCK, CONFIG, START)
    archive = Archive(tmp_path)
    for minute in range(3):
        first.book(seen(replica("a", "train", 0, Phase.ACTIVE)), CONFIG, TIMELINE, START + minute * 20 * SECOND)
        first.ledger.kills["train"] += 1
        archive.write(first, {"at": START})
    second = Archive(tmp_path).open(CLOCK, CONFIG, START)
    assert (second.ledger.start, second.ledger.now) == (START, START + 40 * SECOND)
    assert second.ledger.spent == first.ledger.spent
    assert second.counts == first.counts
    assert second.ledger.kills == {"train": 3}
    second.book(seen(), CONFIG, TIMELINE, START + MINUTE)
    assert second.ledger.spent["train", "day", "active"] == MINUTE  # the last look of the first one held until now


def test_what_happened_can_be_drawn_and_tabled(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    with pytest.raises(ValueError, match="no scheduler has looked"):
        archive.history(CONFIG)
    record = archive.open(CLOCK, CONFIG, START)
    record.follow(seen(replica("a", "serve", 0, Phase.ACTIVE)), CONFIG)
    for step in range(60):
        found = seen(replica("a", "serve", 0, Phase.ACTIVE if step < 30 else Phase.DRAINING))
        record.book(found, CONFIG, TIMELINE, START + step * 20 * SECOND)
        archive.write(record, {})
    drain = Drain(replica="a", reason="", within=SECOND, carry_unfinished=False)
    record.note(plan_of(drain), TIMELINE, START)
    archive.write(record, {})
    sim = Archive(tmp_path).history(CONFIG)
    assert sim.ledger.total == 12 * (sim.end - sim.start)
    assert sim.ledger.preemptions == {"serve": 1}
    assert [at - START for at, _ in sim.series] == [0, 30 * 20 * SECOND]
    assert sim.series[0][1] == {("serve", "active"): 1, (NOBODY, "idle"): 11}


def test_a_record_of_another_pool_is_refused(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.write(archive.open(CLOCK, CONFIG, START), {})
    larger = small(lambda data: data["pool"].update(nodes=4))
    with pytest.raises(ValueError, match=r"of a pool of 12 GPUs, this one has 16"):
        archive.open(CLOCK, larger, START)
