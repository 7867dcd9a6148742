"""Pairs: the promises of sampling.py for any batch, and what each strategy prefers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_episodes

from vla_rlaif.preferences.sampling import num_available_pairs, sample_pairs, split_by_group


@settings(max_examples=50, deadline=None)
@given(
    valid=st.lists(st.booleans(), min_size=2, max_size=24),
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    wanted=st.integers(0, 12),
)
def test_pairs_are_distinct_valid_and_never_reflexive(valid, share, seed, wanted):
    episodes = make_episodes(len(valid), group_size=3, valid=np.array(valid))
    group = episodes.starts.group
    inside = np.triu(np.equal.outer(group, group) & np.outer(valid, valid), k=1)
    num = min(wanted, int(inside.sum()))  # as many as exist within groups: never too many
    pairs = sample_pairs(episodes, num, seed, mix={"within_group": share, "uniform": 1 - share})
    assert pairs.shape == (num, 2)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert episodes.valid[pairs].all()
    assert len({frozenset(pair) for pair in pairs.tolist()}) == num
    assert (group[pairs[:, 0]] == group[pairs[:, 1]]).sum() >= np.floor(share * num)
    np.testing.assert_array_equal(
        pairs, sample_pairs(episodes, num, seed, mix={"within_group": share, "uniform": 1 - share})
    )


def test_either_episode_comes_first_equally_often():
    pairs = sample_pairs(make_episodes(64), 1000, 0, mix={"uniform": 1.0})
    assert abs((pairs[:, 0] < pairs[:, 1]).mean() - 0.5) < 0.05  # three standard errors of 1000 fair coins


def test_disagreement_takes_the_pair_on_which_members_differ():
    scores = np.array([[0.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, -9.0]])  # all differ on episode 3, agree on the rest
    pairs = sample_pairs(make_episodes(4), 3, 0, mix={"disagreement": 1.0}, scores=scores)
    assert (pairs == 3).any(axis=1).all()


def test_entropy_takes_the_pair_nearest_to_even():
    scores = np.array([[0.0, 5.0, 5.1, 20.0]])
    assert set(sample_pairs(make_episodes(4), 1, 0, mix={"entropy": 1.0}, scores=scores)[0].tolist()) == {1, 2}


def test_rows_restrict_the_choice():
    episodes = make_episodes(8)
    rows = np.array([1, 4, 6])
    assert num_available_pairs(episodes, rows) == (3, 1)  # 4 and 6 share group 1
    assert set(sample_pairs(episodes, 3, 0, mix={"uniform": 1.0}, rows=rows).ravel().tolist()) == {1, 4, 6}


def test_too_few_episodes_are_named():
    with pytest.raises(ValueError, match="Asked for 7 pairs, but 4 valid episodes make only 6"):
        sample_pairs(make_episodes(4), 7, 0, mix={"uniform": 1.0})
    with pytest.raises(ValueError, match="Asked for 3 pairs within a group, but only 2 exist"):
        sample_pairs(make_episodes(4, group_size=2), 3, 0, mix={"within_group": 1.0})


@pytest.mark.parametrize("mix", [{}, {"uniform": 0.5}, {"uniform": 1.5, "within_group": -0.5}])
def test_bad_mixes_are_refused(mix):
    with pytest.raises(ValueError, match="shares that sum to 1"):
        sample_pairs(make_episodes(4), 1, 0, mix=mix)


def test_ensemble_strategies_need_scores():
    with pytest.raises(ValueError, match="pass ``scores``"):
        sample_pairs(make_episodes(4), 1, 0, mix={"entropy": 1.0})


@settings(max_examples=50, deadline=None)
@given(num_groups=st.integers(1, 9), size=st.integers(1, 6), share=st.floats(0.01, 0.5), seed=st.integers(0, 99))
def test_groups_are_held_out_whole_and_never_all(num_groups, size, share, seed):
    group = np.repeat(np.arange(num_groups), size)
    held = split_by_group(group, np.ones(len(group), bool), share, seed)
    if len(group) < 2:
        assert not held.any()
        return
    assert 0 < held.sum() < len(group)
    if num_groups > 1:
        assert all(len(set(held[group == g])) == 1 for g in range(num_groups))


def test_excluded_pairs_are_not_drawn_in_either_order():
    episodes = make_episodes(8, group_size=4)
    asked = sample_pairs(episodes, 10, 0, mix={"uniform": 1.0})
    exclude = np.concatenate([asked[:5], asked[5:, ::-1]])
    rest = sample_pairs(episodes, 28 - 10, 1, mix={"uniform": 1.0}, exclude=exclude)
    assert len({frozenset(pair) for pair in np.concatenate([asked, rest]).tolist()}) == 28
    same_group = int((asked[:, 0] // 4 == asked[:, 1] // 4).sum())
    assert num_available_pairs(episodes, exclude=exclude) == (18, 12 - same_group)
    with pytest.raises(ValueError, match="make only 18"):
        sample_pairs(episodes, 19, 0, mix={"uniform": 1.0}, exclude=exclude)
