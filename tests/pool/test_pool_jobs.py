"""Whom the planner takes GPUs from, where replicas stand, and jobs. The calendar is that of test_pool_planner.py."""

from collections import Counter

from pool_worlds import EVENING, Bench, at, bench, kinds, small, spread

from vla_rlaif.pool.actions import Drain, Reject
from vla_rlaif.pool.calendar import Override
from vla_rlaif.pool.clock import HOUR, MINUTE, SECOND
from vla_rlaif.pool.state import Phase


def test_victims_are_those_who_lose_least():
    pool = bench(12 * HOUR, EVENING)
    # An operator asks for eight GPUs more for serving; the training replicas differ in what they would lose.
    replicas = pool.of("train")
    for i, replica in enumerate(replicas):
        pool.put(replica, saved=pool.mono - i * MINUTE)
    pool.overrides = (Override(id=1, start=pool.now, end=pool.now + 2 * HOUR, targets={"serve": 32}),)
    drained = {a.replica for a in pool.step().actions if isinstance(a, Drain)}
    assert drained == {r.name for r in replicas[:8]}


def test_lower_priorities_give_first():
    pool = bench(4 * HOUR)
    pool.overrides = (Override(id=1, start=pool.now, end=pool.now + HOUR, targets={"serve": 20}),)
    drained = {a.replica.split("-")[0] for a in pool.step().actions if isinstance(a, Drain)}
    assert drained == {"rollout"}


def pairs(data):
    """Training replicas of two GPUs; twelve GPUs on three nodes: serve 3, train 4, rollout 5."""
    data["roles"]["train"]["gpus_per_replica"] = 2
    data["shares"]["day"] = {"serve": {"target": 3}, "train": {"target": 4}, "rollout": {"target": 5}}
    data["shares"]["night"] = data["shares"]["day"]


def test_free_gpus_on_different_nodes_become_a_pair():
    pool = Bench(small(pairs), at("2026-11-03T12:00", "UTC"))
    pool.settle()
    pool.pass_time(HOUR)
    # A training replica dies with its process, and a rollout on another node has taken one of its GPUs.
    lost = pool.of("train")[0]
    other = next(r for r in pool.of("rollout") if r.gpus[0].node != lost.gpus[0].node)
    del pool.world.replicas[lost.name]
    pool.put(other, gpus=lost.gpus[:1])
    assert Counter(g.node for g in (lost.gpus[1], other.gpus[0])) == {lost.gpus[0].node: 1, other.gpus[0].node: 1}
    planned = pool.step()
    (move,) = [a for a in planned.actions if isinstance(a, Drain)]
    assert move.replica.startswith("rollout") and "train needs GPUs on" in move.reason
    pool.settle()
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [3, 4, 5]
    assert all(len({g.node for g in r.gpus}) == 1 for r in pool.of("train"))


def test_a_role_that_is_thick_on_one_node_moves_before_it_shrinks():
    pool = bench(4 * HOUR)
    nodes = {r.gpus[0].node for r in pool.of("serve")}
    guest = next(r for r in pool.of("rollout") if r.gpus[0].node in nodes)
    second = next(r for r in pool.of("serve") if r.gpus[0].node != guest.gpus[0].node)
    # Two of the five on one node: a dead node would leave three, and the minimum is four.
    pool.put(second, gpus=guest.gpus)
    pool.put(guest, gpus=second.gpus)
    planned = pool.step()
    assert any("serve moves: its minimum would not survive" in r for r in planned.reasons)
    leaving = {a.replica.split("-")[0] for a in planned.actions if not isinstance(a, Reject)}
    assert pool.num("serve") == 5 and leaving == {"rollout"}
    for _ in range(3):
        pool.settle()
        pool.pass_time(11 * MINUTE)
    assert pool.num("serve") == 5 and spread(pool.of("serve")) == 1


def test_min_dwell_stops_flapping():
    pool = bench(4 * HOUR)
    more = Override(id=1, start=pool.now, end=pool.now + MINUTE, targets={"serve": 20})
    pool.overrides = (more,)
    pool.pass_time(2 * SECOND)
    planned = pool.ask()
    # A minute is shorter than min_dwell: nobody moves for it.
    assert planned.actions == () and any("skipped but for its minimums" in r for r in planned.reasons)
    pool.overrides = (Override(id=1, start=pool.now, end=pool.now + HOUR, targets={"serve": 20}),)
    pool.settle()
    assert pool.num("serve") == 20
    pool.overrides = ()  # cancelled at once
    pool.pass_time(MINUTE)
    planned = pool.step()
    drains = {a.replica for a in planned.actions if isinstance(a, Drain)}
    old = {r.name for r in pool.of("serve", *Phase) if r.acquired < pool.mono - 10 * MINUTE}
    assert drains <= old and any("stays 9m longer (min_dwell)" in r for r in planned.reasons)
    pool.pass_time(9 * MINUTE)
    pool.settle()
    assert [pool.num(role) for role in ("serve", "train", "rollout")] == [5, 8, 51]


def test_a_role_that_misses_its_latency_grows_one_by_one_up_to_max():
    pool = bench(8 * HOUR, EVENING)
    pool.p99_ms = {"serve": 81.0}  # the objective is 80 ms
    sizes = []
    for _ in range(10):
        planned = pool.step()
        assert any("p99 81 ms is over 80 ms" in r for r in planned.reasons)
        pool.settle()
        sizes.append(pool.num("serve"))
    assert sizes[-1] == 32 == max(sizes)  # max of the day
    pool.pass_time(HOUR)
    pool.p99_ms = {"serve": 60.0}  # calmer, but not by 30 %: it keeps what it has
    pool.settle()
    assert pool.num("serve") == 32
    pool.p99_ms = {"serve": 40.0}
    pool.settle()
    assert pool.num("serve") == 24 and pool.num("train") == 40


def test_free_gpus_stay_free_for_twenty_minutes_rather_than_for_a_start():
    pool = bench(30 * MINUTE, EVENING)
    pool.world.set_health("node-7", range(8), healthy=False, now=pool.mono)
    pool.settle()
    pool.world.set_health("node-7", range(8), healthy=True, now=pool.mono)
    planned = pool.settle()
    # 21:30: train would start, run 20 minutes and need 547.5 s to get out again before 22:00.
    assert any("train does not grow" in r for r in planned.reasons)
    assert pool.num("serve") == 24 and pool.num("train") == 32


# Jobs


def test_a_job_that_fits_takes_the_place_of_standing_replicas():
    pool = bench(10 * HOUR, EVENING)
    pool.submit("eval", num_gpus=8)
    planned = pool.step()
    assert kinds(planned.actions) == {"Drain": 8}
    pool.settle()
    (replica,) = [r for r in pool.of("train") if r.job == "eval"]
    assert len(replica.gpus) == 8 and pool.num("train") == 40
    # It is the last to be given up: standing replicas go first.
    assert not any(isinstance(a, Drain) and a.replica == replica.name for a in pool.step().actions)


def test_a_job_that_does_not_fit_before_the_boundary_waits_with_an_eta():
    pool = bench(90 * MINUTE, EVENING)
    # 60 min + 1.5 x (65 + 365) s = 70 min 45 s fit into 90 minutes, 80 min + 10 min 45 s do not.
    pool.submit("late", num_gpus=16, minutes=80)
    (answer,) = [a for a in pool.step().actions if isinstance(a, Reject)]
    assert answer.eta == at("2026-11-04T06:00") and "fit from Wed 2026-11-04 06:00" in answer.reason
    assert pool.ask().actions == ()  # told once
    pool.submit("early", num_gpus=8, minutes=80)
    assert any(isinstance(a, Drain) for a in pool.ask().actions)  # the night has 8 GPUs too


def test_a_job_that_never_fits_is_told_why():
    pool = bench(90 * MINUTE, EVENING)
    pool.submit("huge", num_gpus=63)
    pool.submit("long", num_gpus=40, minutes=60 * 20)
    answers = {a.job: a for a in pool.step().actions if isinstance(a, Reject)}
    assert answers["huge"].eta is None and answers["long"].eta is None
    assert "needs 63 GPUs of train, which holds 40 at most" in answers["huge"].reason
    assert "no window of the coming week is 20h11m long" in answers["long"].reason


def test_a_job_takes_whole_replicas():
    def pairs(data):
        data["roles"]["train"]["gpus_per_replica"] = 2

    pool = Bench(small(pairs), at("2026-11-03T12:00", "UTC"))
    pool.settle()
    pool.submit("odd", num_gpus=3)
    (answer,) = pool.step().actions
    assert isinstance(answer, Reject) and answer.reason == "asks for 3 GPUs, replicas of train have 2"


def test_a_job_goes_before_standing_replicas_that_have_its_place():
    def one_rollout(data):
        data["shares"]["day"]["rollout"] = {"target": 1}
        data["shares"]["day"]["train"] = {"target": 6}

    pool = Bench(small(one_rollout), at("2026-11-03T12:00", "UTC"))
    pool.settle()
    pool.submit("probe", num_gpus=1, role="rollout", minutes=1)
    pool.pass_time(HOUR)
    pool.settle()
    # There were idle GPUs, so it starts at once; the standing replica leaves when it is ready, and neither comes back.
    assert [r.job for r in pool.of("rollout")] == ["probe"]
    assert sum(key.startswith("acquire:probe") for key in pool.keys) == 1


def test_first_come_first_served():
    pool = bench(10 * HOUR, EVENING)
    pool.submit("b", num_gpus=30)
    pool.pass_time(SECOND)
    pool.submit("a", num_gpus=30, minutes=1)
    planned = pool.step()
    assert [a.job for a in planned.actions if isinstance(a, Reject)] == ["a"]


def test_a_job_on_one_node_when_free_gpus_are_scattered():
    pool = bench(10 * HOUR, EVENING)
    busiest = Counter(r.gpus[0].node for r in pool.of("serve"))
    pool.submit("wide", num_gpus=5, one_node=True)
    planned = pool.step()
    drains = [a for a in planned.actions if isinstance(a, Drain)]
    nodes = {pool.world.replicas[a.replica].gpus[0].node for a in drains}
    assert len(drains) == 5 and len(nodes) == 1 and busiest[nodes.pop()] == 3
    pool.settle()
    (replica,) = [r for r in pool.of("train") if r.job == "wide"]
    assert len({g.node for g in replica.gpus}) == 1 and pool.num("train") == 40
    pool.submit("wider", num_gpus=6, one_node=True)
    assert any("no node can give it 6 GPUs" in r for r in pool.ask().reasons)  # serve has 3 of 8 on every node


def test_a_boundary_takes_jobs_last_and_puts_them_back_into_the_queue():
    pool = bench(10 * HOUR, EVENING)
    pool.submit("eval", num_gpus=16)
    pool.settle()
    assert pool.num("train") == 40
    pool.pass_time(EVENING - pool.now + MINUTE)
    pool.settle()
    # The night's 8 GPUs have no room for a job of 16: it was saved, and waits for the morning.
    assert pool.num("train") == 8 and not any(r.job for r in pool.of("train"))
    assert pool.world.jobs["eval"].eta == at("2026-11-04T06:00")
