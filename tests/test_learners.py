import functools
from dataclasses import replace

import numpy as np
import pytest

from vla_rlaif.build import build_learner, build_policy
from vla_rlaif.config import LearnerConfig, RunConfig, parse_config
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.learning import Anchor, merge_micro_batches, split_minibatches
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.rollout import make_batch, rollout, train_starts
from vla_rlaif.step_metrics import CompileMeter
from vla_rlaif.types import Observation

BACKENDS = ("jax", "torch")


def config_for(backend, **learner):
    return parse_config(
        {
            "env": {"type": "point_reach", "num_envs": 64},
            "policy": {"type": "gaussian", "backend": backend},
            "reward": {"type": "pixel_distance"},
            "algorithm": {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.05},
            "learner": {"lr": 0.05, "epochs": 3, "minibatch": 64, **learner},
        },
        source="test",
    )


def batch_for(config: RunConfig, seed=0, *, is_stale=False):
    """With ``is_stale``, log-probs that older weights might have given go along."""
    env = PointReach(64)
    policy = build_policy(config.policy, env.spec, 0)
    episodes = rollout(policy, env, train_starts(0, seed, 8, 8), seed=seed)
    rng = np.random.default_rng(seed)
    advantage = rng.normal(size=64)
    episodes = replace(episodes, logp=episodes.logp + rng.normal(size=episodes.logp.shape).astype(np.float32))
    return make_batch(episodes, advantage, num_valid=64 * 6.0, is_stale=is_stale)


@functools.cache
def recorded(seed: int, is_stale: bool):
    return batch_for(config_for("jax"), seed, is_stale=is_stale)


def anchor_for(coef: float, *, batch: int = 16) -> Anchor:
    rng = np.random.default_rng(5)
    state, action = rng.normal(size=(80, 4)), np.tanh(rng.normal(size=(80, 1, 2)))
    obs = Observation(images={}, state=state.astype(np.float32), instruction=("",) * 80)
    return Anchor(obs=obs, action=action.astype(np.float32), coef=coef, batch=batch)


def learner_for(config: RunConfig, anchor: Anchor | None = None):
    spec = PointReach(1).spec
    return build_learner(config, build_policy(config.policy, spec, 0), spec, anchor)


@pytest.mark.parametrize(
    ("settings", "coef", "is_stale"),
    [({}, 0.0, False), ({"weight_decay": 0.3, "warmup_updates": 20, "micro_batches": 2}, 0.3, True)],
    ids=["plain", "decay, warm-up, micro-batches, stale rows, anchor"],
)
def test_backends_agree_step_by_step(settings, coef, is_stale):
    """50 steps, 200 updates: weights and averages to 1e-5, every logged number to 3e-5. Without the brake and with a
    moderate lr: rounding that decides on which side of a bound a number lies would grow from there."""
    anchor = anchor_for(coef) if coef else None
    settings = {"lr": 0.01, "target_kl": None, "epochs": 2, "minibatch": 256, **settings}
    learners = {b: learner_for(config_for(b, **settings), anchor) for b in BACKENDS}
    num_updates, logs = 0, {}
    for step in range(50):
        batch = recorded(step % 8, is_stale)
        logs = {b: learners[b].update(batch, seed=step) for b in BACKENDS}
        num_updates += logs["jax"]["updates"]
        assert logs["jax"].keys() == logs["torch"].keys()
        for name, value in logs["jax"].items():
            assert logs["torch"][name] == pytest.approx(value, abs=3e-5), (step, name)
        for averaged in (False, True):
            weights = [learners[b].weights(averaged=averaged) for b in BACKENDS]
            for name, value in weights[0].items():
                np.testing.assert_allclose(weights[1][name], value, atol=1e-5, rtol=0, err_msg=f"{step} {name}")
    assert num_updates == 200
    assert ("anchor_loss" in logs["jax"]) == bool(coef) and ("importance" in logs["jax"]) == is_stale


@pytest.mark.parametrize("backend", BACKENDS)
def test_warm_up_and_decay_of_the_first_update(backend):
    """Adam's first step is lr x sign of the gradient for every weight that has one. With 4 updates of warm-up it is a
    quarter of it; decay takes lr x decay = 0.05 x 0.2 of a weight besides, and of a bias nothing."""
    config = config_for(backend, epochs=1, minibatch=1024)
    batch = batch_for(config)

    def moved(**settings):
        policy = build_policy(config.policy, PointReach(1).spec, 0)
        policy.load({k: np.full(v.shape, 0.5, np.float32) for k, v in policy.params.items()}, 0)
        learner = build_learner(config_for(backend, epochs=1, minibatch=1024, **settings), policy, PointReach(1).spec)
        assert learner.update(batch, seed=0)["updates"] == 1
        return {k: v - 0.5 for k, v in learner.weights().items()}

    plain, warming, decayed = moved(), moved(warmup_updates=4), moved(weight_decay=0.2)
    for name, value in plain.items():
        np.testing.assert_allclose(np.abs(value), 0.05, rtol=1e-3)
        np.testing.assert_allclose(warming[name], value / 4, atol=1e-6)
    np.testing.assert_allclose(decayed["weight"], plain["weight"] - 0.5 * 0.05 * 0.2, atol=1e-6)
    np.testing.assert_array_equal(decayed["bias"], plain["bias"])


def test_one_device_has_nothing_to_shard():
    with pytest.raises(ValueError, match=r"learner\.sharding fsdp needs several devices, and there is one"):
        learner_for(config_for("torch", devices=1, sharding="fsdp"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_anchor_adds_its_gradient(backend):
    """At the start the mean is 0 and std 0.5, so one demonstration (state x, action a) costs |a|^2 / 2 / 0.5^2 nats.
    Its gradient is -a / 0.25 for the bias and -a x / 0.25 for the weight: a norm of |a| sqrt(1 + |x|^2) / 0.25, times
    coef. All demonstrations are alike. Advantages are as good as 0; the KL to the reference has no gradient there."""
    x, a = np.array([0.3, -0.2, 0.5, 1.0], np.float32), np.array([0.6, -0.8], np.float32)
    obs = Observation(images={}, state=np.tile(x, (80, 1)), instruction=("",) * 80)
    anchor = Anchor(obs=obs, action=np.tile(a, (80, 1, 1)), coef=0.1, batch=16)
    config = config_for(backend, epochs=1, minibatch=1024, micro_batches=4)
    learner, batch = learner_for(config, anchor), batch_for(config)
    log = learner.update(replace(batch, advantage=batch.advantage * np.float32(1e-12)), seed=0)
    assert log["updates"] == 1
    assert log["anchor_loss"] == pytest.approx(1.0 / 2 / 0.25, rel=1e-5)
    assert log["grad_norm"] == pytest.approx(0.1 * np.sqrt(1 + 1.38) / 0.25, rel=1e-5)
    np.testing.assert_array_equal(np.sign(learner.weights()["bias"]), np.sign(a))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_step_the_ratio_is_exactly_one(backend):
    """lr is as good as 0: every ratio of every epoch is 1 to the last bit, nothing is clipped, nothing moves."""
    config = config_for(backend, lr=1e-30)
    log = learner_for(config).update(batch_for(config), seed=0)
    assert log["updates"] > 3
    assert (log["ratio_error"], log["clip_fraction"], log["policy_kl"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_give_the_same_weights(backend):
    weights = []
    for micro in (1, 4):
        learner = learner_for(config_for(backend, micro_batches=micro))
        learner.update(batch_for(config_for(backend)), seed=0)
        weights.append(learner.weights())
    for name, value in weights[0].items():
        np.testing.assert_allclose(value, weights[1][name], atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_kl_coefficient_may_come_with_the_batch(backend):
    """PPO's follows the KL. One that comes along is the algorithm's own, and needs no new program."""
    config, batch = config_for(backend, epochs=1), batch_for(config_for(backend))
    ppo = {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2}

    def learner(kl_coef: float):
        sections = {**config.model_dump(exclude_unset=True), "algorithm": {**ppo, "kl_coef": kl_coef}}
        return learner_for(parse_config(sections, source="test"))

    own, given = learner(0.7), learner(0.0)
    own.update(batch, seed=0)
    given.update(replace(batch, kl_coef=0.7), seed=0)
    for name, value in own.weights().items():
        np.testing.assert_allclose(given.weights()[name], value, atol=1e-7)
    before = CompileMeter(given)
    given.update(replace(batch, kl_coef=1.4), seed=1)
    assert sum(before.metrics().values()) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_continues_bit_equal(backend):
    config = config_for(backend, weight_decay=0.1, warmup_updates=30)  # the first update does not end the warm-up
    straight, other = (learner_for(config, anchor_for(0.3)) for _ in range(2))
    straight.update(batch_for(config, 0), seed=0)
    other.restore(straight.state())
    a, b = (x.update(batch_for(config, 1), seed=1) for x in (straight, other))
    assert a == b
    for name, value in straight.state().items():
        np.testing.assert_array_equal(value, other.state()[name], err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_brake_skips_the_rest_of_the_step(backend):
    config = config_for(backend, target_kl=1e-9, lr=0.5)
    log = learner_for(config).update(batch_for(config), seed=0)
    assert log["braked"] == 1.0 and log["updates"] < 3 * -(-len(batch_for(config).mask) // 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_changes_nothing(backend):
    config = config_for(backend)
    learner = learner_for(config)
    episodes = rollout(
        build_policy(config.policy, PointReach(1).spec, 0), PointReach(64), train_starts(0, 0, 8, 8), seed=0
    )
    log = learner.update(make_batch(episodes, np.zeros(64), 0.0), seed=0)
    assert log == {"updates": 0.0} and learner.version == 0


def test_compilations_of_a_step_are_a_metric_of_the_backend_that_compiles():
    config = config_for("jax")
    learners = {backend: learner_for(config_for(backend)) for backend in BACKENDS}
    meters = {backend: CompileMeter(learner) for backend, learner in learners.items()}
    for learner in learners.values():
        learner.update(batch_for(config), seed=0)
    assert meters["torch"].metrics() == {}
    assert meters["jax"].metrics()["jax/compilations"] > 0
    again = CompileMeter(learners["jax"])
    learners["jax"].update(batch_for(config, 1), seed=1)
    assert again.metrics() == {"jax/compilations": 0.0}


def test_gradient_follows_the_advantage():
    """One decision, advantage 1: the mean moves towards the sampled action."""
    config = RunConfig.model_validate(
        {
            **config_for("jax").model_dump(),
            "policy": GaussianConfig().model_dump(),
            "learner": LearnerConfig(lr=0.01, epochs=1, minibatch=1).model_dump(),
        }
    )
    batch = batch_for(config)
    one = {k: v[:1] for k, v in batch.trace.items()}
    learner = learner_for(config)
    obs = replace(
        batch.obs, images={k: v[:1] for k, v in batch.obs.images.items()}, state=batch.obs.state[:1], instruction=("",)
    )
    learner.update(
        replace(
            batch,
            obs=obs,
            trace=one,
            executed=batch.executed[:1],
            advantage=np.ones(1, np.float32),
            mask=np.ones(1, bool),
            num_valid=1.0,
        ),
        seed=0,
    )
    moved = learner.weights()["bias"]
    np.testing.assert_array_equal(np.sign(moved), np.sign(one["sample"][0]))


def test_minibatches_cover_every_row_once():
    parts = split_minibatches(np.random.default_rng(0), 130, minibatch=64, micro_batches=4)
    rows = [index[valid] for part in parts for index, valid in part]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(130))
    assert [sum(v.sum() for _, v in part) for part in parts] == [44, 43, 43]  # even parts, not 64 + 64 + 2
    assert {len(index) for part in parts for index, _ in part} == {16}


def test_micro_batch_metrics_do_not_depend_on_padding():
    merged = merge_micro_batches(
        [{"loss": 1.0, "policy_kl": 2.0, "ratio_error": 0.1}, {"loss": 0.5, "policy_kl": 0.0, "ratio_error": 0.3}],
        rows=[3.0, 1.0],
    )
    assert merged == {"loss": 1.5, "policy_kl": 1.5, "ratio_error": 0.3}


def test_the_anchors_rows_are_its_own():
    parts = [{"loss": 1.0, "ratio_error": 0.0, "anchor_loss": value} for value in (2.0, 4.0)]
    assert merge_micro_batches(parts, rows=[3.0, 1.0])["anchor_loss"] == 3.0
