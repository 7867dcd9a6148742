"""Pairs drawn one at a time."""

import time
from collections import Counter

import numpy as np
import pytest
from desks import ids, listed, sampled
from synthetic import make_episodes

from vla_rlaif.label_page.queue import SampledQueue


def rows(pair):
    return int(pair.first[2:]), int(pair.second[2:])


def draw(queue):
    pair = queue.draw()
    assert pair is not None
    return pair


def draw_all(queue):
    pairs = []
    while (pair := queue.draw()) is not None:
        pairs.append(pair)
    return pairs


def test_every_pair_comes_once_and_then_none_is_left():
    pairs = draw_all(sampled(8))
    assert len(pairs) == len({pair.key for pair in pairs}) == 28  # 8 choose 2
    assert all(pair.first != pair.second for pair in pairs)


def test_taken_pairs_and_invalid_episodes_never_come():
    taken = tuple(frozenset((f"0:{a}", f"0:{b}")) for a, b in [(0, 1), (2, 3), (4, 5)])
    pairs = draw_all(sampled(8, taken=taken))
    assert len(pairs) == 25 and not {pair.key for pair in pairs} & set(taken)
    valid = np.arange(8) != 3
    queue = SampledQueue(
        make_episodes(8, valid=valid),
        ids(8),
        held=np.zeros(8, bool),
        taken=[],
        within_group=0.5,
        held_out=0.0,
        seed=0,
    )
    assert len(draw_all(queue)) == 21  # 7 choose 2
    assert queue.admit("0:3", "0:1") is None


def test_the_share_within_a_group_is_kept_while_it_can_be():
    queue = sampled(400, within_group=0.7)
    inside = [first // 4 == second // 4 for first, second in (rows(draw(queue)) for _ in range(300))]
    assert 0.6 < np.mean(inside) < 0.8  # 0.7 plus the few that chance puts into a group, sd 0.026
    everything = sampled(8, within_group=1.0)
    groups = [a // 4 == b // 4 for a, b in map(rows, draw_all(everything))]
    assert groups == [True] * 12 + [False] * 16  # 2 groups make 12 pairs, then the rest


def test_no_pair_crosses_the_split_and_the_share_held_out_is_kept():
    held = np.arange(400) < 80
    queue = sampled(400, held=held, held_out=0.25)
    pairs = [draw(queue) for _ in range(400)]
    for pair in pairs:
        first, second = rows(pair)
        assert (first < 80) == (second < 80) == pair.held_out
    assert 0.18 < np.mean([pair.held_out for pair in pairs]) < 0.32


def test_draws_depend_on_the_seed_only_and_sides_are_chance():
    one, two, three = (draw(sampled(40, seed=s)) for s in (1, 1, 2))
    assert one == two != three
    queue = sampled(100)
    ascending = [first < second for first, second in (rows(draw(queue)) for _ in range(200))]
    assert 0.35 < np.mean(ascending) < 0.65  # 0.5, sd 0.035


def test_every_episode_is_drawn_about_as_often():
    queue = sampled(40, within_group=0.0)
    count = Counter(row for _ in range(400) for row in rows(draw(queue)))  # 20 of each on average
    assert len(count) == 40 and max(count.values()) < 40


def test_drawing_from_ten_thousand_episodes_is_quick():
    queue = sampled(10_000)
    begun = time.perf_counter()
    pairs = {draw(queue).key for _ in range(200)}
    assert len(pairs) == 200 and (time.perf_counter() - begun) / 200 < 0.05


def test_listed_pairs_come_in_their_order():
    queue = listed((0, 1), (2, 3), (4, 5))
    assert queue.admit("0:3", "0:2") is not None  # labelled before
    assert [rows(pair) for pair in draw_all(queue)] == [(0, 1), (4, 5)]
    assert queue.admit("0:0", "0:2") is None


@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_one_sided_splits_fall_back_on_the_other_side(held_out):
    queue = sampled(8, held=np.ones(8, bool), held_out=held_out)
    pairs = draw_all(queue)
    assert len(pairs) == 28 and all(pair.held_out for pair in pairs)
