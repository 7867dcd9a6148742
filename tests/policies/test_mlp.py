"""The state policy around a perceptron, against NumPy, SciPy and finite differences."""

import jax
import numpy as np
import pytest
import scipy.stats
from tiny import make_obs, make_spec

from vla_rlaif.interfaces import Policy
from vla_rlaif.jax_imitation import imitate
from vla_rlaif.jax_learner import JaxImitable, JaxPolicy
from vla_rlaif.policies.mlp import MlpPolicy, measured_state
from vla_rlaif.policy_config import MlpConfig
from vla_rlaif.types import Observation
from vla_rlaif.warm_start_config import ImitateConfig

CONFIG = MlpConfig(hidden=(7, 5), std=0.4)
SEEDS = np.array([3, 1, 4, 1, 5], np.uint32)
EXECUTED = np.array([3, 0, 2, 1, 3])


def weights() -> dict[str, np.ndarray]:
    rng, shapes = np.random.default_rng(2), {"0": (3, 7), "1": (7, 5), "2": (5, 6)}  # 3 steps of 2 dims
    kernels = {f"{i}/kernel": rng.normal(size=shape).astype(np.float32) for i, shape in shapes.items()}
    biases = {f"{i}/bias": rng.normal(size=shape[1]).astype(np.float32) for i, shape in shapes.items()}
    statistics = {"state/mean": np.array([0.1, 0.2, 0.3], np.float32), "state/std": np.array([1, 0.5, 2], np.float32)}
    return {**statistics, **kernels, **biases}


def mean_of(state: np.ndarray) -> np.ndarray:
    w = {k: v.astype(np.float64) for k, v in weights().items()}
    x = np.clip((state - w["state/mean"]) / w["state/std"], -5, 5)
    for i in (0, 1):
        x = np.tanh(x @ w[f"{i}/kernel"] + w[f"{i}/bias"])
    return x @ w["2/kernel"] + w["2/bias"]


@pytest.fixture
def policy() -> MlpPolicy:
    policy = MlpPolicy(CONFIG, make_spec())
    policy.load(weights(), 5)
    return policy


def test_it_acts_around_the_networks_output(policy: MlpPolicy) -> None:
    obs = make_obs(5)
    obs.state[0, 0] = 1e6  # far from all that was demonstrated
    decision = policy.act(obs, SEEDS)
    assert isinstance(policy, Policy) and isinstance(policy, JaxPolicy) and isinstance(policy, JaxImitable)
    assert policy.version == 5 and decision.action.shape == (5, 3, 2) and decision.action.dtype == np.float32
    mean = mean_of(obs.state)
    want = scipy.stats.norm.logpdf(decision.trace["sample"], mean, 0.4).sum(1, keepdims=True)
    np.testing.assert_allclose(decision.logp, want, rtol=1e-4)
    still = policy.act(obs, SEEDS, noise_scale=0.0)
    np.testing.assert_allclose(still.trace["sample"], mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(still.action.reshape(5, 6), np.clip(mean, -1, 1), atol=1e-4)
    noise = (decision.trace["sample"] - mean) / 0.4
    np.testing.assert_allclose(noise[1], noise[3], atol=1e-4)  # equal seeds


def test_gradients_are_those_of_the_density(policy: MlpPolicy) -> None:
    obs = make_obs(5)
    inputs = policy.inputs(obs, policy.act(obs, SEEDS).trace, EXECUTED)
    frozen = {k: v for k, v in policy.params.items() if k not in policy.trainable}
    trained = {k: policy.params[k] for k in policy.trainable}
    assert set(frozen) == {"state/mean", "state/std"}
    grads = jax.grad(lambda p: policy.score({**frozen, **p}, inputs)[0].sum())(trained)
    sample, steps = inputs["sample"].astype(float), np.arange(3)[None] < EXECUTED[:, None]
    residual = np.where(np.repeat(steps, 2, axis=1), sample - mean_of(obs.state), 0) / 0.4**2
    np.testing.assert_allclose(grads["2/bias"], residual.sum(0), rtol=1e-3, atol=1e-3)
    moved = policy.means({**policy.params, "2/bias": policy.params["2/bias"] + 0.4}, inputs)
    # a shift of one std costs 1/2 nat a dim of the executed steps: 6, 0, 4, 2 and 6 of them
    divergence = policy.score(policy.params, inputs, moved)[1]
    assert divergence is not None
    np.testing.assert_allclose(divergence[:, 0], [3, 0, 2, 1, 3], rtol=1e-4)


def test_it_starts_at_mean_zero_and_imitates() -> None:
    rng = np.random.default_rng(0)
    state = rng.normal([2, -3, 0.5], [0.1, 1, 0.01], (512, 3)).astype(np.float32)
    statistics = measured_state(state)
    np.testing.assert_allclose(statistics["state/mean"], state.mean(0), atol=1e-4)
    np.testing.assert_allclose(statistics["state/std"], state.std(0), rtol=1e-3)
    assert measured_state(np.ones((4, 3), np.float32))["state/std"].min() == 1e-3  # a dim that never moves
    policy = MlpPolicy(MlpConfig(hidden=(32,)), make_spec(), seed=1, statistics=statistics)
    obs = Observation(images={}, state=state, instruction=("",) * 512)
    assert not policy.act(obs, np.arange(512, dtype=np.uint32), noise_scale=0.0).action.any()
    bent = np.sin(2 * (state[:, :1] - 2) / 0.1) * [1, -1]  # of the first dim alone; no line fits it
    action = np.repeat(bent[:, None], 3, axis=1).astype(np.float32) / 2
    policy.load(imitate(policy, obs, action, ImitateConfig(steps=400, batch=128, lr=1e-2, devices=1), seed=0), 1)
    got = policy.act(obs, np.arange(512, dtype=np.uint32), noise_scale=0.0).action
    assert np.square(got - action).mean() < 0.1 * np.square(action).mean()
    np.testing.assert_allclose(policy.features(obs).std(0), 1, rtol=0.05)
    again = MlpPolicy(MlpConfig(hidden=(32,)), make_spec())  # knows no statistics: they are in the weights
    again.load({name: np.asarray(value) for name, value in policy.params.items()}, 1)
    np.testing.assert_array_equal(again.act(obs, np.arange(512, dtype=np.uint32), noise_scale=0.0).action, got)


def test_weights_of_another_network_are_refused(policy: MlpPolicy) -> None:
    other = {k: np.asarray(v) for k, v in MlpPolicy(MlpConfig(hidden=(7, 7)), make_spec()).params.items()}
    with pytest.raises(
        ValueError, match=r"policy.hidden \(7, 5\), 3 state dims and chunks of 3 x 2: .*1/kernel, 2/ker"
    ):
        policy.load(other, 6)
    with pytest.raises(ValueError, match="2/bias differ"):
        policy.load({k: v for k, v in weights().items() if k != "2/bias"}, 6)
    assert policy.version == 5
