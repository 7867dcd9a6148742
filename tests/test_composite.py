"""A weighted sum of terms, each in standard deviations of a frozen batch: numbers, NaN, workers, checkpoints."""

from functools import partial

import numpy as np
import pytest
from clusters.pool_work import learned
from synthetic import StateEncoder, make_episodes, make_pair_data

from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.composite import CompositeReward, LearnedTerm, Terms, Weighted
from vla_rlaif.config import parse_config
from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.crew import CrewSettings
from vla_rlaif.dist.reward_pool import RewardPool
from vla_rlaif.dist.thread_cluster import ThreadCluster
from vla_rlaif.dist.workers import RewardWorker
from vla_rlaif.interfaces import RewardModel
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.reward_models.oracle import OracleReward
from vla_rlaif.reward_models.preference import PreferenceConfig, PreferenceReward
from vla_rlaif.reward_models.preference_fit import FitConfig
from vla_rlaif.reward_models.success import SuccessReward
from vla_rlaif.rollout import take
from vla_rlaif.train import train
from vla_rlaif.types import Episodes


class Given:
    """Scores that the test chooses, by episode."""

    version = 0

    def __init__(self, values) -> None:
        self._values = np.array(values, np.float32)

    def score(self, episodes: Episodes):
        return self._values[: len(episodes.valid)]


def composite(*values, terms) -> CompositeReward:
    return CompositeReward(Terms([Given(v) for v in values], learned=None), terms, learned=None)


def weighted(name="a", weight=1.0, scale=None) -> Weighted:
    return Weighted(name=name, weight=weight, scale=scale)


def test_terms_are_standardised_on_the_frozen_batch_and_weighted():
    """Frozen on 1 3 1 3 1 3 1 3 (mean 2, std 1) and 0 20 ... (mean 10, std 10); then 3 is +1 and 0 is -1, so with
    weights 2 and -1 the first episode is 2 * -1 - -1 = -1 and the second 2 * 1 - 1 = 1."""
    first, second = [1, 3] * 4, [0, 20] * 4
    reward = composite(first, second, terms=[weighted("a", 2.0), weighted("b", -1.0)])
    assert isinstance(reward, RewardModel)
    reward.freeze(make_episodes(8))
    np.testing.assert_allclose(reward.score(make_episodes(2, group_size=2)), [-1, 1])
    scaled = composite(first, second, terms=[weighted("a", 2.0), weighted("b", -1.0, scale=5.0)])
    scaled.freeze(make_episodes(8))
    np.testing.assert_allclose(scaled.score(make_episodes(2, group_size=2)), [-2 + 2, 2 - 2])


def test_the_scale_stays_when_the_policy_moves_on():
    reward = composite([1, 3] * 4, terms=[weighted()])
    reward.freeze(make_episodes(8))
    reward._scorer = Terms([Given([103.0] * 8)], learned=None)
    np.testing.assert_allclose(reward.score(make_episodes(8)), 101)


def test_nan_in_a_weighted_term_is_unscorable_and_of_an_unweighted_one_only_counted():
    values, holes = [1, 3] * 4, [np.nan, 1, 2, 3, 4, 5, 6, 7]
    for weight, unscorable in ((0.5, 1), (0.0, 0)):
        reward = composite(values, holes, terms=[weighted("a"), weighted("b", weight)])
        if weight:  # 7 of 8 is fewer than are wanted
            with pytest.raises(ValueError, match=r"term 'b' of the reward scores 7 of the 8 reference episodes"):
                reward.freeze(make_episodes(8))
            reward = composite(values * 2, [*holes, *holes[1:], 8], terms=[weighted("a"), weighted("b", weight)])
            reward.freeze(make_episodes(16))
        else:
            reward.freeze(make_episodes(8))
        score = reward.score(make_episodes(8))
        assert np.isnan(score).sum() == unscorable
        found = reward.diagnostics()
        assert found["term/b/unscorable"] == 1 and found["term/a/mean"] == 2 and found["term/b/mean"] == 4
        assert found["term/b/std"] == pytest.approx(np.std(np.arange(1, 8)))
        assert reward.diagnostics() == {}


def test_a_term_without_spread_is_refused_unless_it_has_a_scale_or_no_weight():
    with pytest.raises(ValueError, match=r"term 'a' of the reward is 5 for all 8 reference episodes.*Give it a scale"):
        composite([5] * 8, terms=[weighted()]).freeze(make_episodes(8))
    with pytest.raises(ValueError, match="no reference batch yet"):
        composite([5] * 8, terms=[weighted()]).score(make_episodes(8))
    reward = composite([5] * 8, [1, 3] * 4, terms=[weighted("a", scale=2.0), weighted("b", 0.0)])
    reward.freeze(make_episodes(8))
    np.testing.assert_array_equal(reward.score(make_episodes(8)), 0)


def with_learned() -> tuple[CompositeReward, Terms]:
    model = learned()
    terms = Terms([SuccessReward(), model, OracleReward()], learned=model)
    names = [weighted("success", 0.0), weighted("learned"), weighted("truth", 0.5)]
    return CompositeReward(terms, names, learned=LearnedTerm(row=1, reward=model)), terms


def test_a_learned_term_is_measured_again_after_every_fit_on_the_same_batch():
    reward, terms = with_learned()
    reference, episodes = make_episodes(32, seed=1), make_episodes(8, seed=2)
    assert terms.learned is not None
    terms.learned.fit(make_pair_data(40), seed=0)
    reward.freeze(reference)
    kept = reward.keep(episodes)
    for seed in (1, 2):
        terms.learned.fit(make_pair_data(40, seed=seed), seed=seed)
        of_reference, own = terms.term_scores(reference), terms.term_scores(episodes)
        mean, std = of_reference.mean(axis=1, keepdims=True), of_reference.std(axis=1, keepdims=True)
        z = (own[1:] - mean[1:]) / std[1:]
        np.testing.assert_allclose(reward.score(episodes), z[0] + 0.5 * z[1], rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(reward.score_kept(kept), reward.score(episodes), rtol=2e-5, atol=1e-5)
        assert reward.version == seed + 1


class CountingEncoder(StateEncoder):
    """Says how many frames it has read."""

    num = 0

    def encode(self, obs):
        self.num += len(obs.state)
        return super().encode(obs)


def test_what_is_kept_or_frozen_is_encoded_once():
    encoder = CountingEncoder()
    model = PreferenceReward(encoder, PreferenceConfig(hidden=(16,), frames="last"), FitConfig(num_steps=2))
    terms = Terms([SuccessReward(), model], learned=model)
    reward = CompositeReward(
        terms, [weighted("success", 0.0), weighted("learned")], learned=LearnedTerm(row=1, reward=model)
    )
    model.fit(make_pair_data(40), seed=0)
    reward.freeze(make_episodes(32, seed=1))
    assert encoder.num == 32  # one frame of each is read
    episodes = make_episodes(8, seed=2)
    kept = reward.keep(episodes)
    assert encoder.num == 40
    np.testing.assert_array_equal(kept["raw"], terms.term_scores(episodes))
    np.testing.assert_array_equal(reward.score_kept(kept), reward.score(episodes))


def test_a_checkpoint_brings_the_frozen_batch_back():
    reward, terms = with_learned()
    assert terms.learned is not None
    terms.learned.fit(make_pair_data(40), seed=0)
    reward.freeze(make_episodes(32, seed=1))
    again, its = with_learned()
    assert its.learned is not None
    its.learned.restore(terms.learned.state())
    again.thaw({k: np.array(v) for k, v in reward.frozen().items()})
    np.testing.assert_array_equal(again.score(make_episodes(8)), reward.score(make_episodes(8)))


def make_worker(context: WorkerContext) -> RewardWorker:
    model = learned()
    return RewardWorker(Terms([SuccessReward(), model, OracleReward()], learned=model))


def test_reward_workers_score_the_terms_and_the_run_sums_them():
    cluster = ThreadCluster()
    try:
        group = cluster.start("reward", partial(make_worker), 3)
        pool = RewardPool(group, CrewSettings(work_s=20.0, start_s=20.0))
        names = [weighted("success", 0.0), weighted("learned"), weighted("truth", 0.5)]
        reward = CompositeReward(pool, names, learned=LearnedTerm(row=1, reward=pool))
        alone, terms = with_learned()
        assert terms.learned is not None
        data, reference = make_pair_data(40), make_episodes(32, seed=1)
        pool.fit(data, seed=3)
        terms.learned.fit(data, seed=3)
        reward.freeze(reference)
        alone.freeze(reference)
        mixed = take(make_episodes(20), np.random.default_rng(0).permutation(20))
        np.testing.assert_allclose(reward.score(mixed), alone.score(mixed), rtol=1e-5, atol=1e-5)
        group.handles[0].kill()
        np.testing.assert_allclose(reward.score(mixed), alone.score(mixed), rtol=1e-5, atol=1e-5)
        assert reward.version == alone.version == 1
    finally:
        cluster.close()


COMPOSITE = {
    "type": "composite",
    "reference_episodes": 64,
    "terms": [
        {
            "reward": {
                **{"type": "preference", "budget": 200, "initial_labels": 60, "initial_episodes": 64},
                **{"labels_per_refresh": 20, "refresh_every": 2, "fit_steps": 20, "hidden": [16]},
            }
        },
        {"name": "left", "weight": -0.1, "reward": {"type": "python", "function": "rewards_for_tests:leftwards"}},
        {"name": "truth", "weight": 0.0, "reward": {"type": "oracle"}},
    ],
}


def go(folder, *, until, resume=False):
    sections = {
        "out": str(folder),
        "env": {"type": "point_reach", "num_envs": 64},
        "policy": {"type": "gaussian"},
        "reward": COMPOSITE,
        "algorithm": {"group_size": 16, "clip_low": 0.2, "clip_high": 0.2},
        "learner": {"lr": 0.05, "target_kl": None},
        "loop": {"steps": 9, "validate_every": 3, "validation_episodes": 64, "checkpoint_every": 2},
    }
    config = parse_config(sections, source="test")
    folder.mkdir(exist_ok=True)
    env = build_env(config.env)
    parts = build_parts(config, env, build_policy(config.policy, env.spec, config.seed), folder)
    with MetricsLog(folder) as log:
        train(config, parts, log, folder, resume=resume, say=print, until=until)
    timed = ("time/", "minutes", "reward/fit_s", "jax/", "idle/", "sync/")
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def test_a_run_learns_one_term_and_resumes_bit_equal(tmp_path):
    straight = go(tmp_path / "a", until=6)
    go(tmp_path / "b", until=5)  # the newest checkpoint is of step 4
    assert go(tmp_path / "b", until=6, resume=True) == straight
    last = straight[-1]
    assert last["reward/version"] == 3  # the first labels, and those of steps 2 and 4
    assert last["term/truth/mean"] == pytest.approx(last["rollout/truth"], abs=1e-6)
    assert {"term/preference/std", "term/left/unscorable", "monitor/term/left/mean"} <= last.keys()
    # The scores of a group are comparable: the spread of what is trained on is that of the terms, standardised.
    assert last["reward/mean"] is not None and last["reward/unscorable"] == 0
