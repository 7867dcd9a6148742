"""The two Gaussian policies: equal numbers from both backends."""

import jax
import numpy as np
import pytest
import scipy.stats
import torch
from tiny import make_obs, make_spec

from vla_rlaif.interfaces import Policy
from vla_rlaif.policies.gaussian_jax import GaussianJax
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig

CONFIG = GaussianConfig(std=0.4)
SEEDS = np.array([3, 1, 4, 1, 5], np.uint32)
EXECUTED = np.array([3, 0, 2, 1, 3])


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {"weight": rng.normal(size=(6, 3)).astype(np.float32), "bias": rng.normal(size=6).astype(np.float32)}


@pytest.fixture(params=[GaussianJax, GaussianTorch])
def gaussian(request: pytest.FixtureRequest) -> GaussianJax | GaussianTorch:
    policy = request.param(CONFIG, make_spec())
    policy.load(weights(), 5)
    return policy


def test_acts(gaussian: GaussianJax | GaussianTorch) -> None:
    obs = make_obs(5)
    decision = gaussian.act(obs, SEEDS)
    assert isinstance(gaussian, Policy) and gaussian.version == 5
    assert decision.action.shape == (5, 3, 2) and decision.action.dtype == np.float32
    mean = obs.state @ weights()["weight"].T + weights()["bias"]
    want = scipy.stats.norm.logpdf(decision.trace["sample"], mean, 0.4).sum(1, keepdims=True)
    np.testing.assert_allclose(decision.logp, want, rtol=1e-5)
    np.testing.assert_allclose(gaussian.act(obs, SEEDS, noise_scale=0.0).trace["sample"], mean, rtol=1e-5, atol=1e-6)
    noise = (decision.trace["sample"] - mean) / 0.4
    np.testing.assert_allclose(noise[1], noise[3], atol=1e-5)  # equal seeds


def test_both_agree() -> None:
    obs = make_obs(5)
    ours, theirs = GaussianJax(CONFIG, make_spec()), GaussianTorch(CONFIG, make_spec())
    ours.load(weights(), 1)
    theirs.load(weights(), 1)
    a, b = ours.act(obs, SEEDS), theirs.act(obs, SEEDS)
    np.testing.assert_allclose(a.action, b.action, atol=1e-6)
    np.testing.assert_allclose(a.logp, b.logp, rtol=1e-5)
    inputs = ours.inputs(obs, a.trace, EXECUTED)
    grads = jax.grad(lambda p: ours.score(p, inputs)[0].sum())(dict(ours.params))
    tensors = {name: torch.tensor(value) for name, value in theirs.inputs(obs, a.trace, EXECUTED).items()}
    logp, _ = theirs.score(tensors, None)
    logp.sum().backward()
    np.testing.assert_allclose(ours.score(ours.params, inputs)[0], logp.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, parameter in theirs.module.named_parameters():
        assert isinstance(parameter.grad, torch.Tensor)
        np.testing.assert_allclose(grads[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_unexecuted_dims_do_not_count() -> None:
    policy, obs = GaussianJax(CONFIG, make_spec()), make_obs(5)
    trace = policy.act(obs, SEEDS).trace
    changed = trace["sample"].copy()
    changed[2, 4:] += 9  # two of three steps of this chunk ran
    changed[1] += 9  # none of this one
    reference = policy.means(policy.params, {"state": obs.state}) + 0.4
    first = policy.score(policy.params, policy.inputs(obs, trace, EXECUTED), reference)
    again = policy.score(policy.params, policy.inputs(obs, {"sample": changed}, EXECUTED), reference)
    np.testing.assert_array_equal(first[0], again[0])
    assert first[0][1] == 0
    # a shift of one std costs 1/2 nat a dim: 6, 0, 4, 2 and 6 dims
    assert first[1] is not None
    np.testing.assert_allclose(first[1][:, 0], [3, 0, 2, 1, 3], rtol=1e-5)


def test_storage_round_trip(gaussian: GaussianJax | GaussianTorch) -> None:
    again = type(gaussian).from_parts(CONFIG, gaussian.metadata(), weights())
    np.testing.assert_array_equal(again.act(make_obs(5), SEEDS).action, gaussian.act(make_obs(5), SEEDS).action)
    with pytest.raises(ValueError, match="need 'weight' of shape"):
        gaussian.load({"bias": weights()["bias"]}, 1)
