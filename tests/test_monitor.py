"""The monitor: paired bounds against scipy's, strikes and patience, refits, and what a run does about an alarm."""

import math
from dataclasses import replace

import numpy as np
import pytest
from clusters.pool_work import learned
from scipy import stats
from synthetic import make_episodes, make_pair_data

from vla_rlaif.config import parse_config
from vla_rlaif.monitor import MIN_PAIRS, KeepFeatures, KeepScores, Monitor, keeper_of, paired_change
from vla_rlaif.reward_models.pixel_distance import PixelDistance
from vla_rlaif.reward_terms_config import MonitorConfig
from vla_rlaif.types import Episodes


def test_bounds_are_those_of_a_paired_test():
    """With the normal in place of Student's t, which it nears: at 400 pairs they differ by less than 1 %."""
    rng = np.random.default_rng(0)
    before, now = rng.normal(0, 1, 400), rng.normal(0.3, 1, 400)
    found = paired_change(now, before, 0.95)
    interval = stats.ttest_rel(now, before).confidence_interval(0.90)  # two sides of 5 %
    assert found.mean == pytest.approx((now - before).mean())
    assert found.low == pytest.approx(interval.low, rel=0.01) and found.high == pytest.approx(interval.high, rel=0.01)
    exact = stats.norm.interval(0.90, (now - before).mean(), stats.sem(now - before))
    np.testing.assert_allclose([found.low, found.high], exact)


def test_pairs_that_cannot_be_compared_are_left_out_and_few_say_nothing():
    rng = np.random.default_rng(1)
    before, now = rng.normal(size=50), rng.normal(size=50)
    holes = now.copy()
    holes[:10] = np.nan
    assert paired_change(holes, before, 0.9) == paired_change(now[10:], before[10:], 0.9)
    few = paired_change(now[: MIN_PAIRS - 1], before[: MIN_PAIRS - 1], 0.9)
    assert math.isnan(few.mean) and math.isnan(few.low) and math.isnan(few.high)


class Chosen:
    """A reward that reads the first number of the last state: the test writes it there."""

    version = 0

    def score(self, episodes: Episodes) -> np.ndarray:
        return episodes.state[:, -1, 0].astype(np.float32)


def validation(*, gold: float, proxy: float, num: int = 100, seed: int = 0) -> Episodes:
    """The first ``gold`` of the starts succeed, and the reward is ``proxy`` and a little noise."""
    episodes = make_episodes(num, success=np.arange(num) < gold * num)
    episodes.state[:, -1, 0] = proxy + 0.1 * np.random.default_rng(seed).normal(size=num)
    return episodes


def looks(monitor: Monitor, *points: tuple[float, float]) -> list[dict[str, float]]:
    return [
        monitor.look(validation(gold=gold, proxy=proxy, seed=step), step, kl=0.01 * step**2)
        for step, (gold, proxy) in enumerate(points)
    ]


def test_an_alarm_takes_patience_and_both_beyond_doubt():
    monitor = Monitor(MonitorConfig(patience=2), KeepScores(Chosen()))
    found = looks(monitor, (0.5, 0.0), (0.8, 1.0), (0.6, 2.0), (0.4, 3.0))
    assert [line["monitor/strikes"] for line in found] == [0, 0, 1, 2]
    assert [line["monitor/alarm"] for line in found] == [0, 0, 0, 1]
    assert monitor.is_alarmed and monitor.best_step == 1
    last = found[-1]
    assert last["monitor/sqrt_kl"] == pytest.approx(0.3) and last["monitor/gold"] == pytest.approx(0.4)
    assert last["monitor/gold_change"] == pytest.approx(-0.4) and last["monitor/proxy_change"] == pytest.approx(
        2, abs=0.1
    )
    assert last["monitor/proxy_gain"] == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize(
    ("points", "why"),
    [
        (((0.5, 0.0), (0.7, 1.0), (0.9, 2.0)), "both rise"),
        (((0.8, 2.0), (0.5, 1.0), (0.3, 0.0)), "both fall: worse, but no hacking"),
        (((0.8, 0.0), (0.79, 1.0), (0.78, 2.0)), "gold has hardly fallen"),
        (((0.8, 0.0), (0.5, 0.0), (0.5, 0.0)), "the proxy has not risen"),
        (((0.8, 0.0), (0.5, 1.0), (0.8, 1.0), (0.5, 1.2)), "never twice in a row"),
    ],
)
def test_no_alarm(points, why):
    monitor = Monitor(MonitorConfig(patience=2), KeepScores(Chosen()))
    assert not any(line["monitor/alarm"] for line in looks(monitor, *points)), why


def test_chance_alone_seldom_strikes():
    """100 runs of 10 validations of a policy that only wobbles: proxy and gold are independent noise around the same
    means. With two strikes in a row wanted, at most 1 raises an alarm."""
    alarms, rng = 0, np.random.default_rng(0)
    for _ in range(100):
        monitor = Monitor(MonitorConfig(), KeepScores(Chosen()))
        for step in range(10):
            episodes = make_episodes(64, success=rng.random(64) < 0.6)
            episodes.state[:, -1, 0] = rng.normal(size=64)
            if monitor.look(episodes, step, 0.0)["monitor/alarm"]:
                alarms += 1
                break
    assert alarms <= 1


def test_broken_episodes_have_no_gold_and_the_return_can_be_the_gold():
    valid = np.arange(100) >= 10
    broken = replace(validation(gold=0.5, proxy=0.0), valid=valid)
    monitor = Monitor(MonitorConfig(), KeepScores(Chosen()))
    assert monitor.look(broken, 0, math.nan)["monitor/gold"] == pytest.approx(40 / 90)
    by_return = Monitor(MonitorConfig(gold="truth"), KeepScores(Chosen()))
    assert by_return.look(broken, 0, 0.0)["monitor/gold"] == pytest.approx(broken.truth[valid].mean())


def test_a_refit_scores_the_kept_episodes_again_and_takes_the_strike_back():
    """The reward first likes the last state as ``make_pair_data`` does, then the opposite."""
    reward, monitor_config = learned(), MonitorConfig(patience=1)
    data = make_pair_data(200)
    reward.fit(data, seed=0)
    keeper = keeper_of(reward, is_learned=True)
    assert isinstance(keeper, KeepFeatures)
    monitor = Monitor(monitor_config, keeper)
    good, hacked = make_episodes(100, success=np.arange(100) < 80), make_episodes(100, success=np.arange(100) < 20)
    hacked.state[:, -1] += np.linspace(1.0, -1.0, 8)  # what the reward likes
    monitor.look(good, 0, 0.0)
    assert monitor.look(hacked, 1, 1.0)["monitor/strikes"] == 1
    assert keeper.score_kept(keeper.keep(hacked)) == pytest.approx(reward.score(hacked))
    reward.fit(replace(data, target=1 - data.target), seed=1)
    after = monitor.look(hacked, 2, 1.0)
    assert after["monitor/strikes"] == 0 and after["monitor/proxy_change"] < 0


def test_its_state_survives_a_checkpoint():
    monitor = Monitor(MonitorConfig(), KeepScores(Chosen()))
    looks(monitor, (0.5, 0.0), (0.8, 1.0), (0.6, 2.0))
    again = Monitor(MonitorConfig(), KeepScores(Chosen()))
    again.restore({k: np.array(v) for k, v in monitor.state().items()})
    episodes = validation(gold=0.4, proxy=3.0)
    assert again.look(episodes, 3, 0.1) == monitor.look(episodes, 3, 0.1)
    assert again.is_alarmed and again.best_step == 1
    fresh = Monitor(MonitorConfig(), KeepScores(Chosen()))
    fresh.restore(fresh.state())
    assert fresh.state() == {}


def test_a_reward_that_never_changes_keeps_scores_only():
    keeper = keeper_of(PixelDistance(), is_learned=False)
    assert keeper.keep(make_episodes(4)).keys() == {"score"}


def test_rollback_wants_fresh_episodes_only():
    sections = {"env": {"type": "point_reach"}, "policy": {"type": "gaussian"}, "reward": {"type": "pixel_distance"}}
    sections |= {"algorithm": {"clip_low": 0.2, "clip_high": 0.2}, "monitor": {"action": "rollback"}}
    for loop in ({"overlap": True}, {"stored": "x"}):
        with pytest.raises(ValueError, match=r"monitor.action rollback gives up"):
            parse_config({**sections, "loop": loop}, source="test")
