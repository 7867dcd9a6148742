"""Idle shares by a clock that is set by hand."""

import pytest

from vla_rlaif.timing import IdleMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_pool_is_idle_while_none_of_its_work_runs():
    clock = Clock()
    meter = IdleMeter(clock)
    with meter.working("rollout"):
        clock.now += 3
    with meter.working("learner"):
        clock.now += 1
    assert meter.metrics() == {"time/step_s": 4.0, "idle/rollout": 0.25, "idle/learner": 0.75}


def test_work_that_crosses_the_line_counts_on_both_sides():
    """Rollouts run for 10 s, the line comes after 4: 4 of 4 s, then 6 of 8."""
    clock = Clock()
    meter = IdleMeter(clock)
    with meter.working("rollout"):
        clock.now += 4
        assert meter.metrics() == {"time/step_s": 4.0, "idle/rollout": 0.0}
        clock.now += 6
    clock.now += 2
    assert meter.metrics() == {"time/step_s": 8.0, "idle/rollout": pytest.approx(0.25)}


def test_a_pool_that_did_nothing_is_wholly_idle():
    clock = Clock()
    meter = IdleMeter(clock)
    with meter.working("learner"):
        clock.now += 1
    meter.metrics()
    clock.now += 5
    assert meter.metrics() == {"time/step_s": 5.0, "idle/learner": 1.0}
