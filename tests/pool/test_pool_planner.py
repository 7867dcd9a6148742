"""The planner on a pool whose steps end when the test says so. By default: the factory, Tuesday 3 November 2026.

At 06:00 night (serve 5 with its spare, train 8, rollout 51) becomes day (24, 40, 0); the lead is 300 s. At 22:00 day
becomes night; the lead is 660 s.
"""

from collections import Counter

import pytest
from pool_worlds import EVENING, MORNING, Bench, at, bench, factory, kinds, small, spread

from vla_rlaif.pool.actions import Acquire, Admit, Checkpoint, Drain, Reject, Release, Sync
from vla_rlaif.pool.calendar import Override
from vla_rlaif.pool.clock import HOUR, MINUTE, SECOND
from vla_rlaif.pool.state import Phase


def test_a_settled_pool_holds_its_shares_and_stays():
    pool = bench(4 * HOUR)
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [5, 8, 51]
    assert spread(pool.of("serve")) == 1
    planned = pool.ask()
    assert planned.actions == () and planned.violations == () and planned.window == "night"
    # The next plan is due in an hour at the latest, or when the next handover comes close.
    assert planned.next_wakeup == pool.now + HOUR


def test_serving_is_ready_before_the_boundary():
    pool = bench(301 * SECOND)
    assert pool.ask().actions == ()
    pool.pass_time(SECOND)
    assert kinds(pool.step().actions) == {"Drain": 51}
    assert all(a.carry_unfinished for a in pool.ask().actions if isinstance(a, Drain))
    pool.pass_time(60 * SECOND)
    pool.finish()  # drained
    assert kinds(pool.step().actions) == {"Release": 51}
    pool.finish()
    planned = pool.step()
    assert kinds(planned.actions) == {"Acquire": 51}
    acquired = Counter(a.role for a in planned.actions if isinstance(a, Acquire))
    assert acquired == {"serve": 19, "train": 32}
    for _ in range(4):  # warm, sync
        pool.finish()
        pool.step()
    # Serve is active before the boundary and on the committed weights; train is ready and waits for its window.
    assert pool.now < MORNING and pool.num("serve") == 24 and pool.num("train") == 8
    assert all(r.version == pool.world.version for r in pool.of("serve"))
    assert pool.num("train", Phase.WARM) == 32
    pool.pass_time(MORNING - pool.now)
    assert kinds(pool.step().actions) == {"Admit": 32}
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [24, 40, 0]


def test_serving_shrinks_only_after_the_boundary_and_keeps_one_replica_a_node():
    pool = bench(0, EVENING)
    pool.settle()
    pool.pass_time(10 * MINUTE)
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [5, 8, 51]
    assert spread(pool.of("serve")) == 1
    pool = bench(659 * SECOND, EVENING)
    drained = {a.replica.split("-")[0] for a in pool.step().actions if isinstance(a, Drain)}
    assert drained == {"train"}
    pool.finish()
    for _ in range(8):
        pool.step()
        pool.finish()
    assert pool.num("serve") == 24
    pool.pass_time(EVENING - pool.now)
    drains = [a for a in pool.step().actions if isinstance(a, Drain)]
    assert len(drains) == 19 and pool.num("serve") == 5 and spread(pool.of("serve")) == 1


def test_a_training_replica_is_released_only_with_a_verified_checkpoint():
    pool = bench(660 * SECOND, EVENING)
    assert kinds(pool.step().actions) == {"Drain": 32}
    pool.pass_time(200 * SECOND)
    pool.finish()
    assert kinds(pool.step().actions) == {"Checkpoint": 32}
    assert pool.ask().actions == ()
    pool.pass_time(40 * SECOND)
    pool.finish()
    released = [a for a in pool.step().actions if isinstance(a, Release)]
    assert len(released) == 32 and not any(a.kill for a in released)


def test_the_batch_is_kept_at_every_size():
    import yaml
    from pool_worlds import FACTORY

    from vla_rlaif.pool.config import parse_pool

    data = yaml.safe_load(FACTORY.read_text())
    data["roles"]["train"] |= {"gpus_per_replica": 2, "global_batch": 240}
    for window, num_gpus in (("weekend", 20), ("line_stop", 60)):
        data["shares"][window]["train"] = {"target": num_gpus}
    day = Bench(parse_pool(data, source="test"), MORNING).settle()
    night = Bench(parse_pool(data, source="test"), EVENING).settle()
    # 40 GPUs are 20 replicas of 12 micro-batches, 8 GPUs are 4 of 60: always 240.
    assert (day.accumulation, night.accumulation) == ({"train": 12}, {"train": 60})


# What goes wrong on the way out


def leaving(phase, *, config=None):
    """One training replica of the evening's handover brought into a phase, the others still draining."""
    pool = bench(660 * SECOND, EVENING, config)
    pool.step()
    replica = pool.of("train", Phase.DRAINING)[0]
    if phase is not Phase.DRAINING:
        pool.pass_time(100 * SECOND)
        pool.finish(lambda r: r.name == replica.name)
        pool.step()
    return pool, pool.world.replicas[replica.name]


def only(planned, replica):
    return [a for a in planned.actions if not isinstance(a, Reject) and a.replica == replica.name]


def test_a_drain_past_its_deadline_is_killed_and_the_loss_is_counted():
    pool, replica = leaving(Phase.DRAINING)
    # The whole way out has 1.5 x 365 = 547.5 s; checkpoint 60 and release 5 must still fit: 482.5 s.
    pool.pass_time(482 * SECOND)
    assert only(pool.ask(), replica) == []
    pool.pass_time(SECOND)
    (action,) = only(pool.ask(), replica)
    assert isinstance(action, Release) and action.kill
    # One GPU, saved when it began to work: an hour and 483 s ago.
    assert action.lost == HOUR + 483 * SECOND
    assert "overran by 0.5s; back to the last good checkpoint" in action.reason


def test_a_checkpoint_slower_than_the_lead_is_killed():
    pool, replica = leaving(Phase.CHECKPOINTING)
    assert replica.phase is Phase.CHECKPOINTING
    pool.pass_time(442 * SECOND)  # 542 s after the start of the drain; 547.5 - 5 s for the release
    assert only(pool.ask(), replica) == []
    pool.pass_time(SECOND)
    (action,) = only(pool.ask(), replica)
    assert isinstance(action, Release) and action.kill and action.lost > 0


def test_a_failed_or_corrupt_checkpoint_is_written_again_while_there_is_time():
    pool, replica = leaving(Phase.CHECKPOINTING)
    pool.put(replica, phase=Phase.UNSAVED, attempts=1)
    (action,) = only(pool.step(), replica)
    assert isinstance(action, Checkpoint) and action.attempt == 1
    failed = pool.world.replicas[replica.name]
    pool.pass_time(400 * SECOND)
    pool.put(failed, phase=Phase.UNSAVED, attempts=2)
    (action,) = only(pool.step(), replica)  # 500 s are gone, and a checkpoint may take 1.5 x 60 s
    assert isinstance(action, Release) and action.kill and "2 checkpoints failed" in action.reason


def test_on_overrun_wait_keeps_the_gpus_and_complains():
    pool, replica = leaving(Phase.CHECKPOINTING, config=factory(transition={"on_overrun": "wait"}))
    pool.put(replica, phase=Phase.UNSAVED, attempts=3, since=pool.mono)
    pool.pass_time(500 * SECOND)
    pool.put(pool.world.replicas[replica.name], since=pool.mono)
    planned = pool.ask()
    assert only(planned, replica) == []
    assert any("cannot write a good checkpoint" in v.reason for v in planned.violations)
    pool.pass_time(MINUTE)  # disk space may have been made: it is tried again once a minute
    (action,) = only(pool.ask(), replica)
    assert isinstance(action, Checkpoint)


def test_a_node_dies_while_draining():
    pool, replica = leaving(Phase.DRAINING)
    node = replica.gpus[0].node
    before = {r.name for r in pool.world.replicas.values() if r.gpus[0].node == node}
    pool.world.set_health(node, range(8), healthy=False, now=pool.mono)
    planned = pool.step()
    buried = {a.replica for a in planned.actions if isinstance(a, Release) and a.kill}
    assert buried == before
    assert all(action.replica not in before for action in planned.actions if not isinstance(action, Release | Reject))
    pool.settle()
    assert all(r.gpus[0].node != node for r in pool.world.replicas.values())


def test_a_weight_sync_in_flight_ends_before_the_release():
    pool = bench(300 * SECOND)
    replica = pool.of("rollout")[0]
    pool.put(replica, syncing_since=pool.mono)
    pool.step()
    pool.finish()
    drained = pool.world.replicas[replica.name]
    assert drained.phase is Phase.DRAINED and drained.syncing_since is not None
    planned = pool.ask()
    assert only(planned, replica) == [] and len([a for a in planned.actions if isinstance(a, Release)]) == 50
    # The sync ends in time: released.
    pool.put(drained, syncing_since=None)
    assert isinstance(only(pool.ask(), replica)[0], Release)
    # Or it hangs, 1.5 x 10 s: aborted, and released after that.
    pool.put(drained, syncing_since=pool.mono)
    pool.pass_time(16 * SECOND)
    (abort,) = only(pool.step(), replica)
    assert isinstance(abort, Sync) and abort.abort
    assert isinstance(only(pool.ask(), replica)[0], Release)


def test_a_newcomer_in_the_middle_of_a_sync_is_given_up_in_order():
    pool = bench(300 * SECOND)
    for _ in range(5):
        pool.step()
        pool.finish(lambda r: r.phase is not Phase.SYNCING)
    syncing = pool.of("serve", Phase.SYNCING)
    assert len(syncing) == 19
    # The operator cancels the day: the night goes on.
    pool.config = factory(exceptions=[{"from": "2026-11-03T06:00", "to": "2026-11-03T22:00", "use": "night"}])
    aborts = [a for a in pool.step().actions if isinstance(a, Sync) and a.abort]
    assert {a.replica for a in aborts} == {r.name for r in syncing}
    releases = {a.replica for a in pool.step().actions if isinstance(a, Release)}
    assert {r.name for r in syncing} <= releases


def test_start_ups_that_hang_are_given_up_and_tried_again():
    pool = bench(300 * SECOND)
    while not pool.of("serve", Phase.WARMING):
        pool.step()
        pool.finish(lambda r: r.phase is not Phase.WARMING)
    hanging = pool.of("serve", Phase.WARMING)[0]
    pool.pass_time(181 * SECOND)  # 1.5 x 120 s
    (action,) = only(pool.step(), hanging)
    assert isinstance(action, Release) and action.kill and action.lost == 0
    pool.settle()
    assert pool.num("serve") == 24 and hanging.name not in pool.world.replicas


def test_syncs_that_fail_again_and_again_cost_the_replica():
    pool = bench(300 * SECOND)
    while not pool.of("serve", Phase.SYNCING):
        pool.step()
        pool.finish(lambda r: r.phase is not Phase.SYNCING)
    replica = pool.of("serve", Phase.SYNCING)[0]
    keys = []
    for _ in range(3):
        pool.pass_time(16 * SECOND)
        for _ in range(2):
            keys += [a.key for a in only(pool.step(), replica)]
    name, version = replica.name, pool.world.version
    assert keys == [
        *(f"abort:{name}:{version}:0", f"sync:{name}:{version}:1"),
        *(f"abort:{name}:{version}:1", f"sync:{name}:{version}:2"),
        *(f"abort:{name}:{version}:2", f"kill:{name}:3"),
    ]


# Clocks and restarts


def test_the_clock_goes_back_over_a_boundary():
    pool = bench(2 * SECOND, EVENING)
    pool.step()
    pool.pass_time(4 * SECOND)  # 22:00:02
    assert {type(a) for a in pool.step().actions if a.key.startswith("drain:serve")} == {Drain}
    keys = set(pool.keys)
    pool.now -= 5 * SECOND  # 21:59:57, while the monotonic clock goes on
    planned = pool.step()
    assert not any(isinstance(a, Acquire) and a.role == "serve" for a in planned.actions)
    assert keys.isdisjoint(a.key for a in planned.actions)
    assert any("the clock went back by 5s: what was decided stays" in r for r in planned.reasons)
    # A clock that was two hours ahead is another matter: it is followed.
    pool.now -= 2 * HOUR
    assert pool.ask().goals["serve"] == 24


def test_the_clock_jumps_two_hours_ahead_in_a_handover():
    pool = bench(300 * SECOND)
    pool.step()
    assert pool.num("rollout", Phase.DRAINING) == 51
    pool.now += 2 * HOUR  # 07:55, or the machine slept: the monotonic clock did not move
    planned = pool.step()
    # Nothing is killed for having drained "two hours"; but the day needs 16 serving GPUs now, and has 5 of them.
    assert [v.role for v in planned.violations] == ["serve"]
    kills = [a for a in planned.actions if isinstance(a, Release) and a.kill]
    assert len(kills) == 11 and all(a.reason == "serve is below its minimum of 16 GPUs" for a in kills)
    pool.settle()
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [24, 40, 0]
    assert len(pool.keys) == len(set(pool.keys))


def test_a_restarted_scheduler_repeats_nothing():
    pool = bench(300 * SECOND)
    for _ in range(4):
        pool.step()
        pool.finish(lambda r: hash(r.gpus) % 2 == 0)
    before = pool.ask()
    pool.decided = None  # all that a scheduler had in memory
    assert pool.ask() == before
    pool.settle()
    assert len(pool.keys) == len(set(pool.keys))


def test_a_calendar_that_is_edited_in_a_handover():
    pool = bench(660 * SECOND, EVENING)
    pool.step()
    assert pool.num("train", Phase.DRAINING) == 32
    pool.config = factory(exceptions=[{"from": "2026-11-03T22:00", "to": "2026-11-04T06:00", "use": "day"}])
    assert pool.ask().actions == ()  # what drains cannot be called back
    pool.settle()
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [24, 40, 0]
    assert len(pool.keys) == len(set(pool.keys))


def test_a_role_that_the_edited_config_lacks_keeps_its_gpus():
    pool = bench(4 * HOUR)

    def without_rollout(data):
        del data["roles"]["rollout"], data["shares"]["night"]["rollout"]

    pool.config = small(without_rollout)
    planned = pool.ask()
    lost = [v for v in planned.violations if v.role == "rollout"]
    assert len(lost) == 51 and "has a role that the config lacks" in lost[0].reason
    assert not any(a.key.split(":")[1].startswith("rollout") for a in planned.actions)


def test_an_override_shows_in_the_reasons_and_ends():
    start = at("2026-11-03T10:00")
    override = Override(id=3, start=start, end=start + 2 * HOUR, targets={"serve": 32}, note="trade fair")
    pool = Bench(factory(), start, overrides=(override,))
    planned = pool.settle()
    assert planned.goals == {"serve": 32, "train": 32, "rollout": 0}
    assert "day by override 3: trade fair, until Tue 2026-11-03 12:00" in planned.reasons
    pool.pass_time(2 * HOUR)
    planned = pool.settle()
    assert planned.goals == {"serve": 24, "train": 40, "rollout": 0} and not any(
        "override" in r for r in planned.reasons
    )


# Minimums, victims, flapping


def test_a_dead_node_leaves_the_minimum_and_the_spare_comes_back():
    pool = bench(4 * HOUR)
    node = pool.of("serve")[0].gpus[0].node
    pool.world.set_health(node, range(8), healthy=False, now=pool.mono)
    assert pool.num("serve") == 4
    planned = pool.step()
    assert [v.role for v in planned.violations if v.role == "serve"] == []
    pool.settle()
    # 56 GPUs: serve 5 again, train 8, rollout 43; the spare is on a node of its own.
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [5, 8, 43]
    assert spread(pool.of("serve")) == 1


def test_below_its_minimum_a_role_takes_gpus_at_once():
    pool = bench(4 * HOUR)
    for node in {r.gpus[0].node for r in pool.of("serve")[:3]}:
        pool.world.set_health(node, range(8), healthy=False, now=pool.mono)
    assert pool.num("serve") == 2
    planned = pool.step()
    serve = next(v for v in planned.violations if v.role == "serve")
    assert (serve.minimum, serve.active) == (4, 2)
    kills = [a for a in planned.actions if isinstance(a, Release) and "serve is below" in a.reason]
    assert {a.replica.split("-")[0] for a in kills} == {"rollout"} and len(kills) == 2
    pool.settle()
    assert pool.num("serve") == 5 and spread(pool.of("serve")) == 1


def test_a_pool_smaller_than_its_minimums_sheds_and_reports():
    pool = bench(4 * HOUR)
    for i in range(1, 8):
        pool.world.set_health(f"node-{i}", range(8), healthy=False, now=pool.mono)
    planned = pool.settle()
    # Eight GPUs for minimums of 4 + 8: serve has its four, train the other four.
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [4, 4, 0]
    (violation,) = planned.violations
    assert (violation.role, violation.minimum, violation.active) == ("train", 8, 4)
    assert "only 4 of the healthy GPUs are left for it by priority" in violation.reason


def test_no_gpus_at_all():
    pool = bench(4 * HOUR)
    for i in range(8):
        pool.world.set_health(f"node-{i}", range(8), healthy=False, now=pool.mono)
    planned = pool.settle()
    assert {v.role: v.active for v in planned.violations} == {"serve": 0, "train": 0}
    for i in range(8):
        pool.world.set_health(f"node-{i}", range(8), healthy=True, now=pool.mono)
    pool.settle()
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [5, 8, 51]


def test_one_dead_gpu_of_64():
    pool = bench(4 * HOUR)
    gpu = pool.of("rollout")[0].gpus[0]
    pool.world.set_health(gpu.node, (gpu.slot,), healthy=False, now=pool.mono)
    pool.settle()
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [5, 8, 50]


@pytest.mark.parametrize("moment", ["2026-11-03T06:00", "2026-11-06T22:00", "2026-11-02T13:00", "2026-12-24T00:00"])
def test_every_boundary_of_the_example_ends_with_its_shares(moment):
    pool = bench(20 * MINUTE, at(moment))
    while pool.now < at(moment) + 15 * MINUTE:
        pool.settle()
        pool.pass_time(MINUTE)
    planned = pool.settle()
    assert {role: pool.num(role) for role in pool.config.roles} == planned.goals
    assert any(isinstance(a, Admit) for a in planned.actions) is False and planned.violations == ()
    assert len(pool.keys) == len(set(pool.keys))
