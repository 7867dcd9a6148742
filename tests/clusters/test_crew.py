"""Work is dealt out, done again or lost; the dead come back a bounded number of times. On threads."""

import threading
import time
from functools import partial

import crew_work
import pytest

from vla_rlaif.dist.answers import WorkerError, WorkerFailure, WorkerLate, WorkerLost
from vla_rlaif.dist.crew import MAX_TRIES, Crew, CrewSettings
from vla_rlaif.dist.thread_cluster import ThreadCluster


@pytest.fixture
def crew():
    cluster = ThreadCluster(max_restarts=2)
    made = []

    def start(num=2, *, work_s=10.0, start_s=10.0, **more):
        group = cluster.start("reward", crew_work.make, num)
        more = {"bring_up": lambda handle: None, **more}
        made.append(Crew(group, CrewSettings(work_s=work_s, start_s=start_s), **more))
        return made[-1]

    crew_work.GATES.clear()
    yield start
    for gate in crew_work.GATES.values():
        gate.set()
    cluster.close()


def gate(name):
    crew_work.GATES[name] = threading.Event()
    crew_work.GATES[f"{name} reached"] = threading.Event()


def when_reached(name, then):
    """In a thread: ``then()`` as soon as a worker is at the gate."""

    def wait():
        assert crew_work.GATES[f"{name} reached"].wait(10)
        then()

    threading.Thread(target=wait, daemon=True).start()


def test_results_are_in_the_order_of_the_work(crew):
    works = [partial(crew_work.square, value=i) for i in range(7)]
    assert crew(3).all_of(works, "squaring") == [0, 1, 4, 9, 16, 25, 36]


def test_workers_work_at_the_same_time(crew):
    barrier = threading.Barrier(3)
    works = [partial(crew_work.meet, barrier=barrier)] * 3
    assert sorted(crew(3).all_of(works, "meeting")) == ["reward/0", "reward/1", "reward/2"]


def test_pure_work_of_a_dead_worker_is_done_by_another(crew):
    team = crew(2)
    gate("a")
    when_reached("a", team.group.handles[0].kill)
    works = [partial(crew_work.hold, gate="a"), *[partial(crew_work.square, value=i) for i in range(4)]]
    first, *rest = team.all_of(works, "work")
    assert first in ("reward/0", "reward/1")
    assert rest == [0, 1, 4, 9]
    assert (team.num_died, team.num_hung) == (1, 0)


def test_other_work_of_a_dead_worker_is_lost_and_the_rest_goes_on(crew):
    team = crew(2)
    gate("a")
    when_reached("a", team.group.handles[0].kill)
    works = [partial(crew_work.hold, gate="a"), *[partial(crew_work.square, value=i) for i in range(4)]]
    first, *rest = team.deal(works, "work", again=False)
    assert isinstance(first, WorkerLost) and first.worker == "reward/0"
    assert rest == [0, 1, 4, 9]


def test_a_worker_that_is_late_is_ended_and_comes_back(crew):
    team = crew(1, work_s=0.3)
    gate("a")
    begun = time.monotonic()
    [late] = team.deal([partial(crew_work.hold, gate="a")], "holding", again=False)
    assert isinstance(late, WorkerLate) and time.monotonic() - begun < 20
    assert "did not finish holding within 0.3 s" in str(late)
    assert team.all_of([crew_work.who], "saying who it is") == [("reward/0", 1)]
    assert (team.num_died, team.num_hung) == (0, 1)


def test_a_worker_that_died_idle_costs_nothing(crew):
    team = crew(2)
    team.group.handles[1].kill()
    found = team.deal([crew_work.who] * 5, "saying who it is", again=False)
    assert not [one for one in found if isinstance(one, WorkerFailure)]
    assert team.num_died == 1


def test_work_that_raises_ends_it_with_the_traceback_last(crew):
    with pytest.raises(WorkerError) as caught:
        crew(2).all_of([partial(crew_work.square, value=2), crew_work.fail], "adding up")
    lines = str(caught.value).splitlines()
    assert lines[-1] == "ArithmeticError: the sum is wrong"
    assert any('raise ArithmeticError("the sum is wrong")' in line for line in lines)


def test_work_that_kills_its_workers_is_given_up(crew):
    """Pure work is tried MAX_TRIES = 3 times, here by workers that never come to an end of it."""
    team = crew(3, work_s=0.2)
    gate("a")
    with pytest.raises(WorkerLate):
        team.all_of([partial(crew_work.hold, gate="a", everyone=True)], "holding")
    assert team.num_hung == MAX_TRIES


def test_a_worker_is_restarted_a_bounded_number_of_times(crew):
    """max_restarts is 2: incarnations 0, 1 and 2 may be lost, then the run ends."""
    team = crew(1)
    for incarnation in range(3):
        assert team.all_of([crew_work.who], "saying who it is") == [("reward/0", incarnation)]
        team.group.handles[0].kill()
    with pytest.raises(WorkerLost, match="restarted 2 times"):
        team.all_of([crew_work.who], "saying who it is")


def test_a_new_incarnation_is_brought_up_before_it_gets_work(crew):
    brought = []
    team = crew(1, bring_up=lambda handle: brought.append((handle.name, handle.incarnation)))
    team.group.handles[0].kill()
    assert team.all_of([crew_work.who], "saying who it is") == [("reward/0", 1)]
    assert brought == [("reward/0", 1)]


def test_one_that_cannot_be_brought_up_is_restarted(crew):
    tries = []

    def bring_up(handle):
        tries.append(handle.incarnation)
        if handle.incarnation == 1:
            raise WorkerLost(handle.name, "it died again")

    team = crew(1, bring_up=bring_up)
    team.group.handles[0].kill()
    assert team.all_of([crew_work.who], "saying who it is") == [("reward/0", 2)]
    assert tries == [1, 2]


def test_the_unfit_get_no_work(crew):
    fit = {"reward/1"}
    team = crew(2, is_fit=lambda handle: handle.name in fit, bring_up=lambda handle: time.sleep(0.5))
    assert {name for name, _ in team.all_of([crew_work.who] * 4, "saying who it is")} == {"reward/1"}


def test_waiting_for_workers_has_a_deadline(crew):
    team = crew(1, start_s=0.3, is_fit=lambda handle: False, bring_up=lambda handle: time.sleep(0.1))
    with pytest.raises(WorkerLate, match="any worker of reward did not finish its restart, to go on with asking"):
        team.all_of([crew_work.who], "asking")
