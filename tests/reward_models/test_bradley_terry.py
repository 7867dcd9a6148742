"""The maths of preferences against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from vla_rlaif.reward_models.bradley_terry import (
    bradley_terry_loss,
    calibrate,
    cross_entropy,
    expected_calibration_error,
    probability,
)


def test_loss_is_the_textbook_value():
    # Returns 2 and 1: P(first) = 1 / (1 + e^-1) = 0.731059, -log = 0.313262; for the second, -log 0.268941 = 1.313262.
    first, second = torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, 1.0]])
    loss = bradley_terry_loss(first, second, torch.tensor([[1.0, 0.0]]))
    assert loss.item() == pytest.approx((0.313262 + 1.313262) / 2, abs=1e-6)


def test_loss_is_a_softmax_over_two_returns():
    rng = np.random.default_rng(0)
    first, second, target = rng.normal(size=(3, 50)), rng.normal(size=(3, 50)), rng.random((3, 50))
    log_softmax = torch.log_softmax(torch.tensor(np.stack([first, second])), dim=0).numpy()
    expected = -(target * log_softmax[0] + (1 - target) * log_softmax[1]).mean()
    loss = bradley_terry_loss(*(torch.tensor(x) for x in (first, second, target)))
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_a_tie_pulls_returns_together():
    first = torch.tensor([[3.0]], requires_grad=True)
    loss = bradley_terry_loss(first, torch.tensor([[3.0]]), torch.tensor([[0.5]]))
    loss.backward()
    assert loss.item() == pytest.approx(np.log(2))
    assert first.grad is not None and first.grad.item() == pytest.approx(0.0, abs=1e-7)


def test_loss_of_labels_that_may_be_mistaken_is_the_textbook_value():
    # Returns 2 and 1, a fifth mistaken: 0.8 * 0.731059 + 0.2 * 0.268941 = 0.638635, -log = 0.448422; for the second,
    # -log(1 - 0.638635) = 1.017867.
    first, second = torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, 1.0]])
    loss = bradley_terry_loss(first, second, torch.tensor([[1.0, 0.0]]), mistakes=0.2)
    assert loss.item() == pytest.approx((0.448422 + 1.017867) / 2, abs=1e-6)


def test_loss_with_mistakes_has_the_gradient_of_its_values_and_stays_finite():
    rng = np.random.default_rng(0)
    first, second, target = torch.tensor(rng.normal(scale=3, size=(3, 2, 20)))
    torch.autograd.gradcheck(
        lambda a, b: bradley_terry_loss(a, b, target.abs() / 20, mistakes=0.1),
        (first.requires_grad_(), second.requires_grad_()),
    )
    far = torch.tensor([[300.0]], requires_grad=True)  # where sigmoid is 1 and its log of the rest -300
    loss = bradley_terry_loss(far, torch.zeros(1, 1), torch.zeros(1, 1), mistakes=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(-np.log(0.1))
    assert far.grad is not None and far.grad.item() == pytest.approx(0.0, abs=1e-7)


def test_the_right_returns_are_likeliest_where_so_many_labels_are_flipped():
    """The oracle: of labels that are true with sigmoid(d) and then flipped in a fifth of cases, the share for the first
    is 0.2 + 0.6 sigmoid(d). At d the loss is least; the loss that knows of no mistakes wants smaller differences."""
    d = torch.linspace(-4, 4, 9, dtype=torch.float64)[None]
    target = 0.2 + 0.6 / (1 + torch.exp(-d))

    def slope(mistakes):
        first = d.clone().requires_grad_()
        bradley_terry_loss(first, torch.zeros_like(d), target, mistakes=mistakes).backward()
        assert first.grad is not None
        return first.grad * torch.sign(d)

    torch.testing.assert_close(slope(0.2), torch.zeros_like(d), atol=1e-12, rtol=0)
    assert (slope(0.0)[d != 0] > 1e-3).all()


def test_probability_comes_from_the_mean_log_odds():
    # Mean 1, temperature 2: sigmoid(0.5) = 0.622459.
    assert probability(np.array([[2.0], [0.0]]), 2.0) == pytest.approx([0.622459], abs=1e-6)


def test_calibration_finds_the_temperature_of_the_labels():
    rng = np.random.default_rng(0)
    delta = rng.normal(scale=6.0, size=(1, 20_000))
    target = (rng.random(20_000) < 1 / (1 + np.exp(-delta[0] / 3))).astype(float)  # three times too confident
    temperature, loss = calibrate(delta, target)
    assert temperature == pytest.approx(3.0, rel=0.06)  # the grid is 5 % wide
    assert (
        loss == cross_entropy(probability(delta, temperature), target) < cross_entropy(probability(delta, 1.0), target)
    )


def test_calibration_error_of_a_hand_worked_case():
    # Two bins of confidence, [0.5, 0.75) and [0.75, 1]. Turned to the favoured side:
    # low bin: 0.6 right, 0.7 wrong: mean confidence 0.65, accuracy 0.5, gap 0.15, 2 pairs
    # high bin: 0.9 right, 0.8 (given as 0.2) right, 1.0 tied: mean 0.9, accuracy 2.5 / 3, gap 0.0667, 3 pairs
    p, target = np.array([0.6, 0.7, 0.9, 0.2, 1.0]), np.array([1.0, 0.0, 1.0, 0.0, 0.5])
    expected = (2 * 0.15 + 3 * (0.9 - 2.5 / 3)) / 5
    assert expected_calibration_error(p, target, num_bins=2) == pytest.approx(expected)


def test_a_calibrated_coin_has_no_error_and_a_liar_has_all():
    assert expected_calibration_error(np.full(4, 0.5), np.array([1.0, 0.0, 1.0, 0.0])) == 0
    assert expected_calibration_error(np.ones(4), np.zeros(4)) == 1
