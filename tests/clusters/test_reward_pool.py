"""A reward on several workers judges as one does, and goes on judging when workers die. On threads."""

from functools import partial

import numpy as np
import pool_work
import pytest
from synthetic import make_episodes, make_pair_data

from vla_rlaif.dist.answers import WorkerError
from vla_rlaif.dist.crew import CrewSettings
from vla_rlaif.dist.reward_pool import RewardPool
from vla_rlaif.dist.thread_cluster import ThreadCluster
from vla_rlaif.interfaces import RewardModel
from vla_rlaif.preferences.data import ClipFrames
from vla_rlaif.preferences.refresh import FittableReward
from vla_rlaif.reward_judged import EndJudge, threshold_of
from vla_rlaif.rollout import take


@pytest.fixture
def start():
    cluster = ThreadCluster()

    def pool(make, num):
        group = cluster.start("reward", make, num)
        return RewardPool(group, CrewSettings(work_s=20.0, start_s=20.0)), group

    yield pool
    cluster.close()


def test_it_is_a_reward_that_can_be_fitted(start):
    pool, _ = start(pool_work.make_learned, 2)
    assert isinstance(pool, RewardModel) and isinstance(pool, FittableReward) and isinstance(pool, EndJudge)
    assert pool.version == 0


@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_shards_are_whole_groups_and_come_back_in_order(start, num):
    """5 groups of 4 on up to 8 workers; the rows of the groups are mixed. The reward looks at a group's members."""
    episodes = take(make_episodes(20), np.random.default_rng(0).permutation(20))
    pool, _ = start(partial(pool_work.make_python, function="share_of_group"), num)
    expected = np.zeros(20)
    for group in range(5):
        rows = np.flatnonzero(episodes.starts.group == group)
        expected[rows] = episodes.truth[rows] / np.abs(episodes.truth[rows]).sum()
    np.testing.assert_array_equal(pool.score(episodes), expected.astype(np.float32))


def test_a_fit_is_made_once_and_known_to_all(start):
    pool, _ = start(pool_work.make_learned, 3)
    alone = pool_work.learned()
    data, episodes = make_pair_data(40), make_episodes(24)
    report, wanted = pool.fit(data, seed=3), alone.fit(data, seed=3)
    assert (report.loss, report.held_out_accuracy) == (wanted.loss, wanted.held_out_accuracy)
    assert pool.version == alone.version == 1
    shards = [take(episodes, rows) for rows in np.split(np.arange(24), 3)]
    np.testing.assert_array_equal(pool.score(episodes), np.concatenate([alone.score(shard) for shard in shards]))
    for name, value in alone.state().items():
        np.testing.assert_array_equal(pool.state()[name], value)
    features = pool.features(episodes)
    np.testing.assert_array_equal(features.values, alone.features(episodes).values)
    np.testing.assert_array_equal(pool.score_features(features), alone.score_features(features))
    np.testing.assert_array_equal(pool.member_logits(features), alone.member_logits(features))


def test_who_comes_back_judges_as_the_others_do(start):
    pool, group = start(pool_work.make_learned, 2)
    pool.fit(make_pair_data(40), seed=3)
    episodes = make_episodes(16)
    before = pool.score(episodes)
    for index in (0, 1):
        group.handles[index].kill()
        np.testing.assert_array_equal(pool.score(episodes), before)
    pool.restore({**pool.state()})
    np.testing.assert_array_equal(pool.score(episodes), before)


def test_unscorable_episodes_stay_so(start):
    valid = np.arange(16) % 3 > 0
    pool, _ = start(pool_work.make_learned, 2)
    pool.fit(make_pair_data(40), seed=0)
    np.testing.assert_array_equal(np.isnan(pool.score(make_episodes(16, valid=valid))), ~valid)


def test_a_reward_that_raises_is_the_users_error(start):
    pool, group = start(partial(pool_work.make_python, function="raises"), 2)
    with pytest.raises(WorkerError) as caught:
        pool.score(make_episodes(8))
    assert str(caught.value).splitlines()[-1] == "ZeroDivisionError: the reward is broken"
    assert not [handle for handle in group.handles if handle.incarnation], "a worker whose work raised lives on"


def test_frames_are_judged_by_those_that_have_heads(start):
    plain, _ = start(pool_work.make_learned, 2)
    assert plain.heads == ("return",)
    pool, _ = start(pool_work.make_headed, 2)
    alone, episodes = pool_work.headed(), make_episodes(16, length=np.array([4, 3, 2, 1] * 4))
    assert pool.heads == ("return", "progress", "success")
    data, rng, row = make_pair_data(40, num_frames=5), np.random.default_rng(0), np.arange(60)
    clips = ClipFrames(
        values=rng.normal(size=(60, 8)).astype(np.float32),
        progress=row % 5 / 4,
        success=((row % 5 == 4) & (row % 10 < 5)).astype(float),
        clip=row // 5,
        source=row // 5,
        kind=np.zeros(60, np.int64),
        is_end=row % 5 == 4,
        held_out=row >= 40,
    )
    pool.fit(data, seed=3, clips=clips)
    alone.fit(data, seed=3, clips=clips)
    shards = [take(episodes, rows) for rows in np.split(np.arange(16), 2)]
    wanted = np.concatenate([alone.progress(shard) for shard in shards])
    np.testing.assert_array_equal(pool.progress(episodes), wanted)
    assert np.isfinite(wanted[0]).all() and np.isnan(wanted[3, 2:]).all()
    values = clips.values[clips.is_end]
    np.testing.assert_array_equal(pool.success_of_frames(values), alone.success_of_frames(values))
    assert 0 < threshold_of(pool) == threshold_of(alone)
