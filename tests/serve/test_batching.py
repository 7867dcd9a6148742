"""The batching rule, with the clock in hand; histories and the observation they make."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import SPEC, observation, pack, settings

from vla_rlaif.rollout import windowed
from vla_rlaif.serve.batching import BatchQueue, batch_sizes
from vla_rlaif.serve.requests import Frame, RequestReader
from vla_rlaif.serve.robot import Robot, observation_of
from vla_rlaif.types import Observation


def queue(**changes) -> BatchQueue[str]:
    return BatchQueue(**{"max_batch": 3, "max_wait_s": 0.01, "max_queue": 5, **changes})


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_batch_sizes(largest, sizes):
    assert batch_sizes(largest, fixed=False) == sizes
    assert batch_sizes(largest, fixed=True) == (largest,)


def test_a_batch_waits_for_others_but_not_long():
    q = queue()
    assert q.wait_s(0.0, robots=9) is None
    q.offer("a", now=1.0, deadline=2.0)
    q.offer("b", now=1.004, deadline=2.0)
    assert q.wait_s(1.004, robots=9) == pytest.approx(0.006)  # counted from the oldest
    assert q.wait_s(1.02, robots=9) == 0
    assert q.take(1.02) == ["a", "b"]
    assert q.wait_s(1.02, robots=9) is None


def test_a_full_batch_does_not_wait_and_the_rest_stays():
    q = queue()
    for name in "abcd":
        q.offer(name, now=1.0, deadline=2.0)
    assert q.wait_s(1.0, robots=9) == 0
    assert q.take(1.0) == ["a", "b", "c"]
    assert q.wait_s(1.0, robots=9) == pytest.approx(0.01)
    assert q.take(1.01) == ["d"]


def test_when_all_robots_have_asked_nobody_waits():
    q = queue()
    q.offer("a", now=1.0, deadline=2.0)
    assert q.wait_s(1.0, robots=2) == pytest.approx(0.01)
    q.offer("b", now=1.0, deadline=2.0)
    assert q.wait_s(1.0, robots=2) == 0


def test_a_full_queue_refuses():
    q = queue()
    assert [q.offer(name, now=0.0, deadline=9.0) for name in "abcdef"] == [True] * 5 + [False]
    q.withdraw("b")
    assert q.offer("g", now=0.0, deadline=9.0)
    assert q.take(0.0) + q.take(0.0) == ["a", "c", "d", "e", "g"]


def test_the_expired_are_in_no_batch_and_take_no_place_in_one():
    q = queue()
    for name, deadline in zip("abcde", (1.0, 5.0, 2.0, 5.0, 5.0), strict=True):
        q.offer(name, now=0.0, deadline=deadline)
    assert q.take(2.0) == ["b", "d", "e"]  # a deadline at this very instant has passed
    assert len(q) == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=30), st.integers(1, 5))
def test_each_admitted_item_leaves_once_in_order(items, max_batch):
    """Whatever the arrivals and deadlines: batches are small enough, in order, and hold nobody past the deadline."""
    q: BatchQueue[int] = BatchQueue(max_batch=max_batch, max_wait_s=0.0, max_queue=10)
    arrivals = sorted((float(at), float(at + life), i) for i, (at, life) in enumerate(items))
    deadlines = {i: deadline for _, deadline, i in arrivals}
    admitted = [i for at, deadline, i in arrivals if q.offer(i, now=at, deadline=deadline)]
    taken: list[int] = []
    for now in range(0, 60, 3):
        batch = q.take(float(now))
        assert len(batch) <= max_batch and all(deadlines[i] > now for i in batch)
        taken += batch
    assert len(q) == 0 and taken == [i for i in admitted if i in taken] and len(set(taken)) == len(taken)


def frames(num: int) -> list[Frame]:
    reader = RequestReader(SPEC, settings())
    read = [reader.read(pack(observation(seed))).frame for seed in range(num)]
    return [frame for frame in read if frame is not None]


def rows(frame: Frame) -> Observation:
    images = {camera: image[None] for camera, image in frame.images.items()}
    return Observation(images=images, state=frame.state[None], instruction=(frame.instruction,))


def assert_equal(a: Observation, b: Observation) -> None:
    assert a.instruction == b.instruction and a.images.keys() == b.images.keys()
    for camera in a.images:
        np.testing.assert_array_equal(a.images[camera], b.images[camera])
    np.testing.assert_array_equal(a.state, b.state)
    assert (a.frame_ok is None) == (b.frame_ok is None)
    if a.frame_ok is not None and b.frame_ok is not None:
        np.testing.assert_array_equal(a.frame_ok, b.frame_ok)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_history_is_the_one_that_rollouts_make(window):
    robot, seen = Robot(name="", seed=0, window=window), []
    for frame in frames(5):
        seen.append(rows(frame))
        assert_equal(observation_of([robot.view(frame)], 1), windowed(seen[-window:], window))
        robot.answered(frame)


def test_only_what_was_answered_is_remembered():
    first, second, third = frames(3)
    robot = Robot(name="", seed=0, window=2)
    robot.answered(first)
    before = robot.view(second).seed
    robot.view(third)  # no answer: overloaded, say
    assert robot.view(second).frames == (first, second) and robot.view(second).seed == before
    robot.answered(second)
    assert robot.view(third).seed != before and robot.decision == 2
    robot.reset()
    assert robot.view(third).frames == (third, third) and robot.view(third).num_repeats == 1 and robot.decision == 0


def test_noise_is_a_stream_of_its_own_for_each_robot():
    (frame,) = frames(1)
    seeds = {Robot(name=n, seed=s, window=1).view(frame).seed for n in ("", "a", "b") for s in (0, 1)}
    assert len(seeds) == 6
    assert Robot(name="a", seed=1, window=1).view(frame).seed == Robot(name="a", seed=1, window=1).view(frame).seed


def test_padding_repeats_a_row():
    a, b, c = frames(3)
    robots = [Robot(name=str(i), seed=0, window=2) for i in range(2)]
    robots[0].answered(c)
    padded = observation_of([robots[0].view(a), robots[1].view(b)], 4)
    assert padded.frame_ok is not None
    assert padded.frame_ok.tolist() == [[True, True], [False, True], [False, True], [False, True]]
    np.testing.assert_array_equal(padded.state, [[c.state, a.state]] + 3 * [[b.state, b.state]])
