"""Shares, spares, lead times: numbers are worked out in the comments."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_worlds import at, factory, small

from vla_rlaif.pool.calendar import around
from vla_rlaif.pool.clock import MINUTE, SECOND
from vla_rlaif.pool.config import NO_SHARE, Role, Share
from vla_rlaif.pool.goals import Outlook, allocate, minimums, wants, with_spare
from vla_rlaif.pool.history import COLD, Leads, Recorder, Step, percentile

SERVE = Role(priority=1, preemptible=False)


def outlook(config, now, history=COLD, capacity=None, num_nodes=None):
    return Outlook(
        config,
        around(config, now),
        now,
        capacity=config.pool.num_gpus if capacity is None else capacity,
        num_nodes=config.pool.nodes if num_nodes is None else num_nodes,
        leads=Leads(config, history),
    )


def shares(**roles):
    return {name: roles.get(name, NO_SHARE) for name in ("serve", "train", "rollout")}


@pytest.mark.parametrize(
    ("minimum", "num_nodes", "spared"),
    [
        (4, 8, 5),  # one on each of five nodes: a dead node leaves four
        (2, 8, 3),
        (16, 8, 19),  # 3 + 3 + 3 + 2 + ...: a dead node takes 3
        (7, 8, 8),
        (8, 8, 10),  # 9 would be 2 on one node
        (0, 8, 0),
        (4, 1, 4),  # nothing survives the only node
        (3, 2, 6),
    ],
)
def test_spares_survive_the_loss_of_a_node(minimum, num_nodes, spared):
    assert with_spare(SERVE, minimum, num_nodes) == spared


def test_spares_are_whole_replicas_and_only_for_roles_that_need_them():
    # Replicas of 2 GPUs: 4 GPUs are 2 replicas, so 3 replicas on 3 nodes survive.
    assert with_spare(Role(priority=1, preemptible=False, gpus_per_replica=2), 4, 8) == 6
    assert with_spare(Role(priority=1, preemptible="checkpoint"), 4, 8) == 4
    assert with_spare(Role(priority=1, preemptible="checkpoint", survives_node_loss=True), 4, 8) == 5
    assert with_spare(Role(priority=1, preemptible=False, survives_node_loss=False), 4, 8) == 4


def test_the_shares_of_the_example():
    config, goals = factory(), {}
    for window in config.shares:
        held = {role: config.share(window, role) for role in config.roles}
        goals[window] = tuple(allocate(config, held, capacity=64, num_nodes=8).values())
    # serve, train, rollout. At night and at weekends serve has one spare, taken from the lowest priority.
    assert goals == {"day": (24, 40, 0), "night": (5, 8, 51), "weekend": (3, 22, 39), "line_stop": (3, 61, 0)}


def test_63_of_64_gpus():
    config = factory()
    held = {role: config.share("day", role) for role in config.roles}
    assert allocate(config, held, capacity=63, num_nodes=8) == {"serve": 24, "train": 39, "rollout": 0}


def test_left_over_gpus_go_up_to_max_by_priority():
    config = factory()
    held = shares(serve=Share(target=4, max=10), train=Share(target=4, max=8), rollout=Share(target=1, max=64))
    assert allocate(config, held, capacity=20, num_nodes=8) == {"serve": 10, "train": 8, "rollout": 2}


def test_a_pool_smaller_than_the_minimums_sheds_by_priority():
    config = factory()
    held = shares(serve=Share(min=16, target=24), train=Share(min=8, target=8), rollout=Share(min=4, target=4))
    assert allocate(config, held, capacity=20, num_nodes=3) == {"serve": 16, "train": 4, "rollout": 0}
    assert allocate(config, held, capacity=10, num_nodes=2) == {"serve": 10, "train": 0, "rollout": 0}
    assert minimums(config, held, 26) == {"serve": 16, "train": 8, "rollout": 2}


@settings(max_examples=80, deadline=None)
@given(data=st.data(), capacity=st.integers(0, 40))
def test_allocations_fit_and_respect_priorities(data, capacity):
    config, held = factory(), {}
    for role in config.roles:
        least = data.draw(st.integers(0, 12))
        target = data.draw(st.integers(least, 20))
        held[role] = Share(min=least, target=target, max=data.draw(st.none() | st.integers(target, 30)))
    goals = allocate(config, held, capacity=capacity, num_nodes=5)
    assert sum(goals.values()) <= capacity
    if capacity >= sum(share.min for share in held.values()):
        assert all(goals[role] >= held[role].min for role in held)
    # GPUs stay idle only when everybody has all it may have.
    if sum(goals.values()) < capacity:
        assert all(goals[r] >= held[r].most for r in held)
    # A role is below its target only if lower priorities have no more than their minimum.
    below = [r for r in config.ranked if goals[r] < held[r].target]
    if below:
        lower = config.ranked[config.ranked.index(below[0]) + 1 :]
        assert all(goals[r] <= held[r].min for r in lower)


def test_leads_are_safety_times_the_steps():
    leads = Leads(factory(), COLD)
    # rollout: drain 60 + release 5; serve: acquire 5 + warmup 120 + sync 10. 1.5 x 200 s.
    assert leads.handover("rollout", "serve") == 300 * SECOND
    # train: drain 300 + checkpoint 60 + release 5; rollout: acquire 5 + warmup 60 + sync 10. 1.5 x 440 s.
    assert leads.handover("train", "rollout") == 660 * SECOND


def recorded(role: str, step: Step, *seconds: int) -> Recorder:
    return Recorder([(role, step, s * SECOND) for s in seconds])


def test_measured_times_replace_declared_ones():
    recorder = recorded("rollout", "drain", 10, 20, 30, 40)
    assert recorder.history().p95 == {}  # four samples say nothing about a tail
    recorder.add("rollout", "drain", 50 * SECOND)
    history = recorder.history()
    assert history.p95 == {("rollout", "drain"): 50 * SECOND}
    assert Leads(factory(), history).handover("rollout", "serve") == 285 * SECOND  # 1.5 x (200 - 60 + 50)
    # A start that is fast on average is not killed for being as slow as declared.
    fast = recorded("serve", "warmup", *[1] * 9).history()
    assert Leads(factory(), fast).timeout("serve", "warmup") == 180 * SECOND


def test_percentiles_are_nearest_rank():
    # 20 samples: 95 % is the 19th. 21 samples: 0.95 x 21 = 19.95, so the 20th.
    assert percentile(range(1, 21), 0.95) == 19
    assert percentile(range(1, 22), 0.95) == 20
    assert percentile([7], 0.5) == 7


def test_handovers_begin_before_the_boundary():
    config = factory()
    boundary = at("2026-11-03T06:00")
    before = wants(outlook(config, boundary - 301 * SECOND), boundary - 301 * SECOND, 64)
    assert before.want == {"serve": 5, "train": 8, "rollout": 51} and before.floor["serve"] == 4
    lead = wants(outlook(config, boundary - 300 * SECOND), boundary - 300 * SECOND, 64)
    assert lead.want == {"serve": 24, "train": 40, "rollout": 0}
    # What serve will need at the boundary may not be drained any more; train has no minimum by day.
    assert lead.floor == {"serve": 16, "train": 8, "rollout": 0}
    assert boundary - 300 * SECOND in before.wakeups


def test_who_may_not_be_preempted_keeps_its_gpus_until_the_boundary():
    config = factory()
    boundary = at("2026-11-02T22:00")
    lead = wants(outlook(config, boundary - MINUTE), boundary - MINUTE, 64)
    assert lead.want == {"serve": 24, "train": 8, "rollout": 51}
    assert wants(outlook(config, boundary), boundary, 64).want == {"serve": 5, "train": 8, "rollout": 51}
    # Newcomers of the next window may be warm, not active, before it begins: by day rollout has 8 at most.
    assert lead.limit["rollout"] == 8


def test_a_window_shorter_than_the_lead_is_skipped_but_for_its_minimums():
    stop = {"from": "2026-11-04T13:00", "to": "2026-11-04T13:09", "use": "line_stop"}
    config = factory(exceptions=[stop])
    view = outlook(config, at("2026-11-04T12:00"))
    # From day to line_stop: serve (drain 30 + release 5) gives to train (acquire 5 + warmup 60): 1.5 x 100 s fit into
    # nine minutes, but min_dwell is ten.
    assert view.goals(view.first + 1) == view.goals(view.first) == {"serve": 24, "train": 40, "rollout": 0}
    assert "line_stop from Wed 2026-11-04 13:00 lasts 9m" in view.notes[0]
    config = factory(exceptions=[stop | {"to": "2026-11-04T13:11"}], transition={"min_dwell": "1m"})
    view = outlook(config, at("2026-11-04T12:00"))
    # Eleven minutes are long enough for the handover, but not for train's min_runtime of 20.
    assert view.goals(view.first + 1) == {"serve": 24, "train": 40, "rollout": 0}
    assert "train will not grow for line_stop" in view.notes[0]
    config = factory(exceptions=[stop | {"to": "2026-11-04T14:00"}])
    view = outlook(config, at("2026-11-04T12:00"))
    assert view.goals(view.first + 1) == {"serve": 3, "train": 61, "rollout": 0}


def test_a_short_window_still_gets_its_minimums():
    more = factory().shares | {"visit": {"serve": Share(min=40, target=48)}}
    stop = {"from": "2026-11-04T13:00", "to": "2026-11-04T13:05", "use": "visit"}
    config = factory(exceptions=[stop], shares={w: {r: s.model_dump() for r, s in x.items()} for w, x in more.items()})
    view = outlook(config, at("2026-11-04T12:00"))
    # 40 survive a dead node if 46 are spread over 8 nodes (6 on the fullest); train keeps what is left of its 40.
    assert view.goals(view.first + 1) == {"serve": 46, "train": 18, "rollout": 0}
    # The same answer from within the window and after it, so that nobody is sent back and forth.
    inside = outlook(config, at("2026-11-04T13:02"))
    assert inside.goals(inside.first) == {"serve": 46, "train": 18, "rollout": 0}


def test_lower_priorities_lend_gpus_for_a_minimum_at_the_boundary():
    """At 06:00 serve gives five GPUs, but not before; train's minimum of two must be there at that moment."""

    def change(data):
        data["shares"]["night"] = {"serve": {"min": 3, "target": 3}, "train": {"target": 0}, "rollout": {"target": 9}}
        data["shares"]["day"] = {"serve": {"target": 0}, "train": {"min": 2, "target": 4}, "rollout": {"target": 8}}

    config, boundary = small(change), at("2026-11-03T06:00", "UTC")
    lead = wants(outlook(config, boundary - MINUTE), boundary - MINUTE, 12)
    # Night: serve 5 (3 survive the loss of one of three nodes), rollout 7. Day: train 4, rollout 8.
    assert lead.want == {"serve": 5, "train": 4, "rollout": 5} and lead.floor == {"serve": 3, "train": 2, "rollout": 0}
    assert wants(outlook(config, boundary), boundary, 12).want == {"serve": 0, "train": 4, "rollout": 8}


def test_small_pools_have_goals_too():
    view = outlook(small(), at("2026-11-04T12:00", "UTC"), capacity=0, num_nodes=0)
    assert view.goals(view.first) == {"serve": 0, "train": 0, "rollout": 0}
