"""The order in which steps are gathered, with which weights, and what is raised where."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from vla_rlaif.gather import Gathered
from vla_rlaif.parts import Acting
from vla_rlaif.pipeline import Pipeline
from vla_rlaif.types import Batch, Observation

NOTHING = Batch(
    obs=Observation(images={}, state=np.zeros((0, 1), np.float32), instruction=()),
    trace={},
    executed=np.zeros(0, np.int64),
    advantage=np.zeros(0, np.float32),
    mask=np.zeros(0, bool),
    num_valid=0.0,
)


def gathered(step: int) -> Gathered:
    metrics = {"episodes/ordered": 4.0, "step": float(step)}
    return Gathered(batch=NOTHING, metrics=metrics, preferences={}, shards_read={}, recorded=None)


def acting(step: int) -> Acting:
    return Acting(step=step, version=step, trained=None)


def run(
    *,
    ahead: int,
    begin: int = 0,
    end: int = 7,
    first: int = 0,
    gather: Callable[[int], object] = lambda step: None,
    timeout_s: float = 20.0,
) -> list[tuple[int, int]]:
    """(step, number of updates of the weights that it was played with), in the order in which they were gathered."""
    done, busy = [], threading.Lock()

    def gather_one(step: int, acting: Acting) -> Gathered:
        with busy:
            gather(step)
            done.append((step, acting.step))
        return gathered(step)

    def publish(step: int) -> Acting:
        assert busy.acquire(blocking=False), "weights are published while something is played"
        busy.release()
        return acting(step)

    with Pipeline(gather_one, publish, end=end, ahead=ahead, acting=acting(first), timeout_s=timeout_s) as pipeline:
        for step in range(begin, end):
            assert pipeline.take(step).metrics["step"] == step
    return done


@pytest.mark.parametrize(
    ("ahead", "acted"),
    [
        (0, [0, 1, 2, 3, 4, 5, 6]),
        (1, [0, 0, 1, 2, 3, 4, 5]),
        (2, [0, 0, 0, 2, 2, 4, 4]),
        (4, [0, 0, 0, 0, 0, 4, 4]),
    ],
)
def test_who_acts_with_what_depends_on_the_step_only(ahead, acted):
    """Up to ``ahead`` steps are played with each publication; the last of them is ``ahead`` updates old."""
    rng = np.random.default_rng(0)
    assert run(ahead=ahead, gather=lambda step: time.sleep(rng.uniform(0, 0.005))) == list(enumerate(acted))


@pytest.mark.parametrize(
    ("ahead", "first", "acted"),
    [
        (1, 2, [2, 3, 4, 5]),  # step 3 was played with the weights of 2 updates when it was first played
        (2, 2, [2, 2, 4, 4]),  # so were steps 3 and 4
        (2, 3, [3, 3, 3, 5]),  # the checkpoint of a sequential run: nothing was ahead
        (1, 0, [3, 3, 4, 5]),  # of a run with more steps ahead: those weights are too old now
        (0, 2, [3, 4, 5, 6]),
    ],
)
def test_a_resumed_run_goes_on_with_the_weights_that_acted(ahead, first, acted):
    assert run(ahead=ahead, begin=3, end=7, first=first) == list(enumerate(acted, start=3))


def test_the_next_step_is_played_while_this_one_is_trained_on():
    """Both sides of a barrier are reached only if they run at the same time."""
    both = threading.Barrier(2, timeout=20)

    def gather(step: int, acting: Acting) -> Gathered:
        if step:
            both.wait()
        return gathered(step)

    with Pipeline(gather, acting, end=4, ahead=1, acting=acting(0), timeout_s=20.0) as pipeline:
        for step in range(4):
            pipeline.take(step)
            if step < 3:
                both.wait()  # the update


def test_resting_waits_for_what_is_played_and_keeps_it():
    begun, may_end = threading.Event(), threading.Event()

    def gather(step: int, acting: Acting) -> Gathered:
        if step == 1:
            begun.set()
            assert may_end.wait(20)
        return gathered(step)

    with Pipeline(gather, acting, end=3, ahead=1, acting=acting(0), timeout_s=20.0) as pipeline:
        pipeline.take(0)
        assert begun.wait(20) and pipeline.num_carried == 0
        threading.Timer(0.05, may_end.set).start()
        pipeline.rest()
        assert may_end.is_set() and pipeline.num_carried == 4
        assert pipeline.take(1).metrics["step"] == 1


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_error_is_raised_where_its_step_is_taken_with_its_own_traceback(ahead):
    def breaks_at_step_two(step: int) -> None:
        if step == 2:
            raise ValueError("the reward model is out of order")

    with pytest.raises(ValueError, match="out of order") as raised:
        run(ahead=ahead, gather=breaks_at_step_two)
    assert "breaks_at_step_two" in [entry.name for entry in raised.traceback]


def test_resting_does_not_wait_for_steps_that_an_error_has_prevented():
    def gather(step: int, acting: Acting) -> Gathered:
        if step == 1:
            raise ValueError("the env is gone")
        return gathered(step)

    with Pipeline(gather, acting, end=9, ahead=3, acting=acting(0), timeout_s=60.0) as pipeline:
        pipeline.take(0)
        with pytest.raises(ValueError, match="the env is gone"):
            pipeline.rest()


def test_a_hung_env_is_an_error_and_does_not_keep_the_run_from_ending():
    release, begun = threading.Event(), time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"episodes of step 1 were not there after 0\.2 s \(loop\.timeout_s\)"):
            run(ahead=1, gather=lambda step: release.wait(30) if step else None, timeout_s=0.2)
        assert time.monotonic() - begun < 10
    finally:
        release.set()


def test_leaving_early_waits_for_the_episodes_in_play_and_drops_the_rest():
    ended, begun = [], threading.Event()

    def gather(step: int, acting: Acting) -> Gathered:
        if step == 1:
            begun.set()
            time.sleep(0.1)
        ended.append(step)
        return gathered(step)

    with Pipeline(gather, acting, end=9, ahead=4, acting=acting(0), timeout_s=20.0) as pipeline:
        pipeline.take(0)
        assert begun.wait(20)
    assert ended == [0, 1]
