"""The planner on simulated GPUs. The factory has a handover at 06:00 (from 05:55) and one at 22:00 (from 21:49)."""

import json

import pytest
from pool_worlds import at, factory, small

from vla_rlaif.pool.actions import Acquire, Admit, Reject
from vla_rlaif.pool.calendar import Override
from vla_rlaif.pool.clock import DAY, HOUR, MINUTE, zone_of
from vla_rlaif.pool.physics import Physics
from vla_rlaif.pool.simulate import Edit, simulate
from vla_rlaif.pool.trace import (
    EVENT,
    ClockStep,
    Event,
    GpuDown,
    GpuUp,
    Load,
    NodeDown,
    NodeUp,
    Timed,
    node_failures,
    read_trace,
    write_trace,
)


def event(**fields) -> Event:
    """As a line of a trace says it."""
    return EVENT.validate_python(fields)


EVENING, MIDNIGHT = at("2026-11-03T21:00"), at("2026-11-03T00:00")
UTC_DAY = at("2026-11-03T05:00", "UTC")


def test_the_example_with_a_node_failure_a_day():
    config, start = factory(), at("2026-11-01T12:00")
    events = node_failures(config, start=start, end=start + 2 * DAY, per_day=1.0, repair=HOUR, seed=1)
    assert sum(isinstance(e.event, NodeDown) for e in events) == 2
    run = simulate(config, start=start, days=2.0, events=events)
    assert run.ledger.total == 64 * 2 * DAY
    assert run.ledger.useful_share >= 0.95
    assert run.ledger.below["serve"] == 0
    assert run.ledger.by("state")["dead",] == 2 * 8 * HOUR
    # What a failure costs is training since its last checkpoint, an hour ago at most.
    assert 0 < run.ledger.lost["train"] <= 2 * 8 * HOUR


def test_without_failures_nothing_is_lost_at_any_boundary():
    run = simulate(factory(), start=MIDNIGHT, days=1.0)
    ledger = run.ledger
    assert ledger.useful_share > 0.98 and not ledger.below and not ledger.kills and not ledger.lost and not run.breaches
    # In the morning serve and train are ready; in the evening rollout waits for the GPUs that serve keeps until 22:00.
    assert {t.late for t in ledger.lateness if t.role in ("serve", "train")} == {0}
    assert all(t.arrived and 0 < t.late < 3 * MINUTE for t in ledger.lateness if t.role == "rollout")
    # Every drained rollout handed its unfinished group over.
    assert ledger.carried["rollout"] == ledger.preemptions["rollout"] == 51


def test_the_same_seed_gives_the_same_run():
    runs = [simulate(small(), start=UTC_DAY, days=1.0, physics=Physics(seed=s)) for s in (3, 3, 4)]
    assert runs[0].log == runs[1].log and runs[0].ledger.spent == runs[1].ledger.spent
    assert runs[0].log != runs[2].log


def test_slow_and_failed_checkpoints_cost_work_but_no_minimum():
    bad = Physics(slow_checkpoints=0.5, failed_checkpoints=0.3, seed=2)
    run = simulate(small(), start=UTC_DAY, days=3.0, physics=bad)
    assert run.ledger.kills["train"] > 0 and run.ledger.lost["train"] > 0
    assert run.ledger.below["serve"] == 0 and run.ledger.total == 12 * 3 * DAY
    # On its own a replica is killed after the budget of its way out, 1.5 x (60 + 60 + 5) s; nothing hangs on.
    assert max(b.end - b.start for b in run.breaches) < 10 * MINUTE if run.breaches else True


def test_a_scheduler_that_is_down_through_a_handover():
    events = [Timed(at("2026-11-03T05:50"), event(type="scheduler_down", duration="8m"))]
    run = simulate(factory(), start=at("2026-11-03T05:00"), days=2 / 24, events=events)
    keys = [action.key for _, action in run.log]
    assert len(keys) == len(set(keys))
    # It is back at 05:58, too late for the morning: serve's minimum is missed for as long as a start takes.
    (breach,) = [b for b in run.breaches if b.role == "serve"]
    assert breach.start == at("2026-11-03T06:00") and breach.end - breach.start < 3 * MINUTE
    quiet = simulate(
        factory(), start=at("2026-11-03T01:00"), days=2 / 24, events=[Timed(at("2026-11-03T01:30"), events[0].event)]
    )
    assert not quiet.ledger.below and not quiet.log


def test_clock_steps_move_nothing_twice():
    evening = at("2026-11-03T21:45")
    steps = [
        Timed(at("2026-11-03T21:55"), ClockStep(seconds=-5.0)),
        Timed(at("2026-11-03T22:00:01"), ClockStep(seconds=-5.0)),
        Timed(at("2026-11-03T22:00:09"), ClockStep(seconds=10.0)),
    ]
    run = simulate(factory(), start=evening, days=1 / 24, events=steps)
    keys = [action.key for _, action in run.log]
    assert len(keys) == len(set(keys)) and not run.ledger.below
    assert sum(isinstance(a, Acquire) and a.role == "serve" for _, a in run.log) == 0
    ahead = simulate(factory(), start=EVENING, days=1 / 24, events=[Timed(EVENING + MINUTE, ClockStep(seconds=7200.0))])
    keys = [action.key for _, action in ahead.log]
    # Night begins an hour early for the scheduler, and nothing is killed: drains take the time they take.
    assert len(keys) == len(set(keys)) and not ahead.ledger.kills


def test_a_weight_sync_over_the_boundary():
    events = [Timed(at("2026-11-03T05:55:00"), event(type="weight_sync", duration="9s"))]
    run = simulate(factory(), start=at("2026-11-03T05:00"), days=2 / 24, events=events)
    assert not run.ledger.below and not run.ledger.kills
    hangs = simulate(
        factory(),
        start=at("2026-11-03T05:00"),
        days=2 / 24,
        events=[Timed(events[0].at, event(type="weight_sync", duration="1h"))],
    )
    aborts = [a for _, a in hangs.log if a.key.startswith("abort:rollout")]
    assert len(aborts) == 51 and not hangs.ledger.below


def test_a_calendar_edited_in_a_handover():
    stay = factory(exceptions=[{"from": "2026-11-03T22:00", "to": "2026-11-04T06:00", "use": "day"}])
    run = simulate(factory(), start=EVENING, days=4 / 24, edits=[Edit(at=at("2026-11-03T21:52"), config=stay)])
    keys = [action.key for _, action in run.log]
    assert len(keys) == len(set(keys)) and not run.ledger.below and not run.ledger.kills
    assert run.series[-1][1] == {("serve", "active"): 24, ("train", "active"): 40}


def test_an_override_holds_and_ends():
    override = Override(id=1, start=EVENING - 3 * HOUR, end=EVENING - HOUR, targets={"serve": 32}, note="fair")
    run = simulate(factory(), start=EVENING - 4 * HOUR, days=4 / 24, overrides=[override])
    most = max(counts.get(("serve", "active"), 0) for _, counts in run.series)
    assert most == 32 and run.series[-1][1] == {("serve", "active"): 24, ("train", "active"): 40}


def test_jobs_run_to_their_end_and_go_on_after_a_preemption():
    work = event(type="job", name="eval", role="train", num_gpus=16, runtime="20h", min_runtime="1h")
    run = simulate(factory(), start=EVENING - 12 * HOUR, days=1.4, events=[Timed(EVENING - 11 * HOUR, work)])
    starts = [t for t, a in run.log if isinstance(a, Acquire) and a.job == "eval"]
    (answer,) = [a for _, a in run.log if isinstance(a, Reject)]
    # 16 of the day's 40 GPUs; the night has 8, so it is saved in the evening and goes on in the morning.
    assert len(starts) == 2 and starts[0] < EVENING < starts[1] and answer.eta == at("2026-11-04T06:00")
    assert starts[1] - at("2026-11-04T06:00") < 15 * MINUTE
    first = next(t for t, a in run.log if isinstance(a, Admit) and a.replica.startswith("eval"))
    drained = next(t for t, a in run.log if a.key.startswith("drain:eval"))
    over = max(t for t, a in run.log if a.key.startswith("release:eval") or a.key.startswith("admit:eval"))
    # It ran from its start to the evening's drain; what is left of 20 hours fits into the next day.
    assert 11 * HOUR < drained - first < 12 * HOUR and over < EVENING + DAY


def test_latency_under_load_and_the_growth_against_it():
    config = factory()
    # 20 GPUs' worth of requests on 24 serving GPUs: 20 ms / (1 - 20/24) = 120 ms, over the objective of 80 ms.
    # 28 GPUs: 20 / (1 - 20/28) = 70 ms.
    run = simulate(
        config,
        start=at("2026-11-03T12:00"),
        days=0.2,
        events=[Timed(at("2026-11-03T12:30"), Load(role="serve", gpus=20))],
    )
    assert run.series[-1][1][("serve", "active")] == 27  # 20 / (1 - 20/27) = 77 ms
    outside, inside = run.ledger.p99_ms(in_transition=False), run.ledger.p99_ms(in_transition=True)
    assert outside is not None and 77 < outside < 120 and inside == pytest.approx(120)


def test_one_gpu_dies_and_comes_back():
    events = [
        Timed(UTC_DAY + HOUR, GpuDown(node="node-1", slot=2)),
        Timed(UTC_DAY + 3 * HOUR, GpuUp(node="node-1", slot=2)),
    ]
    run = simulate(small(), start=UTC_DAY, days=0.25, events=events)
    assert run.ledger.by("state")["dead",] == 2 * HOUR and run.ledger.total == 12 * 6 * HOUR
    assert sum(run.series[-1][1].values()) == 12 and ("", "idle") not in run.series[-1][1]


def test_traces_are_read_back_equal(tmp_path):
    zone = zone_of("Europe/Berlin")
    events = [
        Timed(EVENING, NodeDown(node="node-3")),
        Timed(EVENING + MINUTE, NodeUp(node="node-3")),
        Timed(EVENING + 2 * MINUTE, GpuDown(node="node-3", slot=7)),
        Timed(EVENING + 3 * MINUTE, event(type="job", name="j", role="train", num_gpus=8, runtime="1h", one_node=True)),
        Timed(EVENING + 4 * MINUTE, Load(role="serve", gpus=3.5)),
        Timed(EVENING + 5 * MINUTE, ClockStep(seconds=-5.0)),
        Timed(EVENING + 6 * MINUTE, event(type="scheduler_down", duration="90s")),
        Timed(EVENING + 7 * MINUTE, event(type="weight_sync", duration="1500ms")),
    ]
    path = tmp_path / "trace.jsonl"
    write_trace(path, events, zone)
    assert read_trace(path, zone) == events
    path.write_text('{"at": "2026-11-03T21:00", "type": "node_down", "node": "node-3"}\n\n')
    assert read_trace(path, zone) == events[:1]  # wall clock of the zone; empty lines do not count


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"trace.jsonl:1: not JSON"),
        ("[]", 'an event is an object with "at"'),
        (json.dumps({"type": "node_down", "node": "n"}), 'an event is an object with "at"'),
        (json.dumps({"at": "soon", "type": "node_down", "node": "n"}), r"trace.jsonl:1: at: "),
        (json.dumps({"at": "2026-11-03T21:00", "type": "fire"}), "does not match any of the expected tags"),
        (json.dumps({"at": "2026-11-03T21:00", "type": "load", "role": "serve"}), r"load\.gpus: Field required"),
    ],
)
def test_mistakes_in_a_trace_are_told_with_their_line(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_trace(path, zone_of("UTC"))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (NodeDown(node="node-8"), "names node-8; the nodes are node-0 to node-7"),
        (GpuDown(node="node-0", slot=8), "names GPU 8; a node has GPUs 0 to 7"),
        (Load(role="srve", gpus=1), "names the role srve; the roles are serve, train, rollout"),
    ],
)
def test_a_trace_of_another_pool_is_refused(event, message):
    with pytest.raises(ValueError, match=message):
        simulate(factory(), start=EVENING, days=0.1, events=[Timed(EVENING, event)])


def test_failures_are_the_same_for_every_calendar():
    arguments = {"start": EVENING, "end": EVENING + 30 * DAY, "per_day": 0.5, "repair": 3 * HOUR, "seed": 9}
    events = node_failures(factory(), **arguments)
    assert (
        events
        == node_failures(factory(exceptions=[]), **arguments)
        != node_failures(factory(), **(arguments | {"seed": 1}))
    )
    downs = [e.at for e in events if isinstance(e.event, NodeDown)]
    assert len(downs) == 15 and all(
        EVENING + i * 2 * DAY <= t < EVENING + (i + 1) * 2 * DAY for i, t in enumerate(downs)
    )
