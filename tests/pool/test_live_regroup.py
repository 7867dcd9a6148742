"""Which training process runs on which replicas: cases from the life of a run."""

from dataclasses import replace

import pytest

from vla_rlaif.pool.regroup import Spread, leavers, regroup
from vla_rlaif.pool.replica import Claim, Halt, Launch, Order, Report, RunReport, Status
from vla_rlaif.pool.state import Gpu, Phase
from vla_rlaif.pool.work import Division


def divide(num_gpus: int) -> Division | None:
    return Division(devices=num_gpus, micro_batches=8 // num_gpus) if num_gpus in (2, 4, 8) else None


SPREAD = Spread(divide=divide, across_nodes=False)


def member(name: str, phase: Phase = Phase.ACTIVE, *runs: RunReport, node: str = "n0", first: int = 0) -> Status:
    """A replica of 2 GPUs."""
    gpus = (Gpu(node, first), Gpu(node, first + 1))
    return Status(
        claim=Claim(replica=name, role="train", gpus=gpus),
        phase=phase,
        age_s=1.0,
        leaving_s=None,
        attempts=0,
        is_over=False,
        took=(),
        report=Report(runs=runs),
        gpu_ids=(first, first + 1),
        error=None,
    )


def run(*members: str, serial: int = 1, is_alive: bool = True, failures: int = 0, ended_s: float = 0.0) -> RunReport:
    return RunReport(serial=serial, members=members, is_alive=is_alive, num_failures=failures, ended_s=ended_s)


def orders(*statuses: Status, is_finished: bool = False, spread: Spread = SPREAD) -> list[Order]:
    return regroup(statuses, spread, is_finished=is_finished)


def test_a_run_starts_on_all_active_replicas() -> None:
    assert orders(member("b", first=2), member("a")) == [
        Launch(replica="a", serial=1, members=("a", "b"), devices=4, visible=(0, 1, 2, 3), micro_batches=2)
    ]


def test_nothing_to_do_while_the_right_process_runs() -> None:
    assert orders(member("a", Phase.ACTIVE, run("a", "b")), member("b", first=2)) == []


@pytest.mark.parametrize("phase", [Phase.ACQUIRING, Phase.ACQUIRED, Phase.WARMING])
def test_a_run_waits_for_newcomers_that_are_starting(phase: Phase) -> None:
    assert orders(member("a"), member("b", phase, first=2)) == []


def test_a_newcomer_that_waits_for_its_window_is_not_waited_for() -> None:
    [launch] = orders(member("a"), member("b", Phase.WARM, first=2))
    assert isinstance(launch, Launch) and launch.members == ("a",)


def test_growth_starts_the_new_process_and_halts_the_old() -> None:
    launch, halt = orders(member("a", Phase.ACTIVE, run("a")), member("b", first=2))
    assert isinstance(launch, Launch) and (launch.members, launch.serial) == (("a", "b"), 2)
    assert halt == Halt(replica="a", serial=1)


def test_a_scheduler_killed_between_the_two_is_made_up_for() -> None:
    """The new process waits for the run's lock; the next scheduler only halts the old one."""
    both = member("a", Phase.ACTIVE, run("a"), run("a", "b", serial=2))
    assert orders(both, member("b", first=2)) == [Halt(replica="a", serial=1)]


def test_a_replica_that_drains_ends_the_process_at_once_also_while_others_start() -> None:
    old = member("a", Phase.ACTIVE, run("a", "b"))
    launch, halt = orders(old, member("b", Phase.DRAINING, first=2), member("c", Phase.WARMING, first=4))
    assert isinstance(launch, Launch) and launch.members == ("a",)
    assert halt == Halt(replica="a", serial=1)


def test_a_leader_that_drains_hands_the_run_over() -> None:
    launch, halt = orders(member("a", Phase.DRAINING, run("a", "b")), member("b", first=2))
    assert isinstance(launch, Launch) and (launch.replica, launch.members) == ("b", ("b",))
    assert halt == Halt(replica="a", serial=1)


def test_when_all_drain_nothing_is_started() -> None:
    assert orders(member("a", Phase.DRAINING, run("a"))) == [Halt(replica="a", serial=1)]


def test_a_finished_run_is_not_started_again() -> None:
    assert orders(member("a", Phase.ACTIVE, run("a", is_alive=False)), is_finished=True) == []


def test_a_process_that_failed_is_started_again_but_not_at_once() -> None:
    failed = run("a", is_alive=False, failures=1, ended_s=4.0)
    assert orders(member("a", Phase.ACTIVE, failed)) == []
    [launch] = orders(member("a", Phase.ACTIVE, replace(failed, ended_s=6.0)))
    assert isinstance(launch, Launch) and launch.serial == 2
    assert orders(member("a", Phase.ACTIVE, replace(failed, ended_s=6.0, num_failures=2))) == []  # longer each time


def test_of_replicas_that_cannot_all_be_used_those_that_train_go_on() -> None:
    """6 GPUs are no size of this run; the two that train do not make room for another one."""
    assert orders(member("a"), member("b", Phase.ACTIVE, run("b", "c"), first=2), member("c", first=4)) == []
    [launch] = orders(member("a"), member("b", first=2), member("c", first=4))
    assert isinstance(launch, Launch) and launch.members == ("a", "b")


def test_a_process_stays_on_one_node_unless_gpus_are_numbers() -> None:
    there = [member("a", node="n1"), member("b", first=2), member("c", first=4)]
    [launch] = orders(*there)
    assert isinstance(launch, Launch) and (launch.members, launch.visible) == (("b", "c"), (2, 3, 4, 5))
    [launch] = orders(*there, member("d", first=6), spread=replace(SPREAD, across_nodes=True))
    assert isinstance(launch, Launch) and launch.members == ("a", "b", "c", "d")


def test_replicas_leave_when_no_process_uses_them_also_none_that_waits() -> None:
    leaving = member("b", Phase.DRAINING, first=2)
    assert leavers([member("a", Phase.ACTIVE, run("a")), leaving])[0].replica == "b"
    assert leavers([member("a", Phase.ACTIVE, run("a"), run("a", "b", serial=2)), leaving]) == []
    assert leavers([member("a", Phase.ACTIVE, run("a", "b"))]) == []
