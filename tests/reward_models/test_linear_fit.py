"""The Bradley-Terry fit where logistic regression on differences of features is the same problem; contradictions."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from synthetic import DIM, StateEncoder

from vla_rlaif.preferences.data import EpisodeFeatures, PairData
from vla_rlaif.reward_models.bradley_terry import bradley_terry_loss, generator
from vla_rlaif.reward_models.networks import Network
from vla_rlaif.reward_models.preference import PreferenceConfig, PreferenceReward
from vla_rlaif.reward_models.preference_fit import FitConfig, returns

LINEAR = PreferenceConfig(hidden=(), num_members=1, frames="all")
PLAIN = FitConfig(num_steps=400, batch_size=400, lr=0.03, weight_decay=0.0, noise=0.0, recent_share=0.0)


def pair_data(num=300, frames=2, seed=0):
    """Soft labels in tenths, drawn around a linear utility that two frames sum up to: no weights are right for all."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(60, frames, DIM)).astype(np.float32)
    utility = values.sum(axis=1) @ np.linspace(0.6, -0.6, DIM)
    pairs = np.array([rng.permutation(60)[:2] for _ in range(num)])
    p = 1 / (1 + np.exp(utility[pairs[:, 1]] - utility[pairs[:, 0]]))
    return PairData(
        values=values,
        live=np.ones((60, frames), bool),
        pairs=pairs,
        target=rng.binomial(10, p) / 10,
        held_out=np.zeros(num, bool),
    )


def sklearn_weights(values, data):
    """A soft label is two hard ones that are weighted."""
    total = values.sum(axis=1, dtype=np.float64)
    x = total[data.pairs[:, 0]] - total[data.pairs[:, 1]]
    y, weight = np.repeat([1, 0], len(x)), np.concatenate([data.target, 1 - data.target])
    model = LogisticRegression(C=1e9, fit_intercept=False, tol=1e-10, max_iter=1000)
    return model.fit(np.concatenate([x, x]), y, sample_weight=weight).coef_[0]


def test_the_loss_is_least_at_the_weights_of_logistic_regression():
    data = pair_data()
    weights = sklearn_weights(data.values, data)
    network = Network(num_members=1, dim=DIM, hidden=(), cnn=None, rng=generator(0)).double()
    (weight,) = network.heads.weight
    x, live = torch.from_numpy(data.values).double()[None], torch.from_numpy(data.live)[None]

    def loss(at):
        with torch.no_grad():
            weight.copy_(torch.from_numpy(at)[None, :, None])
        score = returns(network, x, live)
        first, second = score[:, data.pairs[:, 0]], score[:, data.pairs[:, 1]]
        return bradley_terry_loss(first, second, torch.from_numpy(data.target)[None])

    at_best = loss(weights)
    (gradient,) = torch.autograd.grad(at_best, [weight])
    assert gradient.abs().max().item() < 1e-6
    for step in 0.1 * np.eye(DIM):
        assert loss(weights + step).item() > at_best.item() < loss(weights - step).item()
    (gradient,) = torch.autograd.grad(loss(weights + 0.1), [weight])
    assert gradient.abs().max().item() > 1e-3


def test_the_fit_finds_the_weights_of_logistic_regression():
    data = pair_data()
    reward = PreferenceReward(StateEncoder(), LINEAR, PLAIN)
    report = reward.fit(data, 0)
    state = reward.state()
    found = state["network/heads.weight.0"][0, :, 0] / state["scale/feature_std"]  # it sees standardised features
    # Minibatches are drawn, so the last step is near the optimum, not on it.
    np.testing.assert_allclose(found, sklearn_weights(data.values, data), atol=0.06)
    logits = reward.member_logits(EpisodeFeatures(values=data.values, live=data.live))[0]
    expected = data.values.sum(axis=1) @ sklearn_weights(data.values, data)
    assert np.corrcoef(logits, expected)[0, 1] > 0.995
    delta = expected[data.pairs[:, 0]] - expected[data.pairs[:, 1]]
    best = np.logaddexp(0, -delta) * data.target + np.logaddexp(0, delta) * (1 - data.target)
    assert report.loss == pytest.approx(best.mean(), abs=2e-3)


@pytest.mark.parametrize(("for_first", "against", "p"), [(1, 1, 1 / 2), (2, 1, 2 / 3)])
def test_contradicting_labels_fit_to_their_share(for_first, against, p):
    """Of so many labels of one pair, A over B and B over A, the likeliest probability is their share. The second label
    of a pair names it the other way round."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(12, 1, DIM)).astype(np.float32)
    pair = np.arange(12).reshape(6, 2)
    pairs = np.concatenate([pair] * for_first + [pair[:, ::-1]] * against)
    num = len(pairs)
    data = PairData(
        values=values,
        live=np.ones((12, 1), bool),
        pairs=pairs,
        target=np.ones(num),
        held_out=np.zeros(num, bool),
    )
    reward = PreferenceReward(StateEncoder(), PreferenceConfig(hidden=(16,)), PLAIN)
    report = reward.fit(data, 0)
    logits = reward.member_logits(EpisodeFeatures(values=values, live=data.live)).mean(axis=0)
    found = 1 / (1 + np.exp(logits[pair[:, 1]] - logits[pair[:, 0]]))
    np.testing.assert_allclose(found, p, atol=0.05)
    assert report.loss == pytest.approx(-(p * np.log(p) + (1 - p) * np.log(1 - p)), abs=0.01)
    assert report.train_accuracy == pytest.approx(p)
