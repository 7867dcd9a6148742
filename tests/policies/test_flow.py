"""The chain's maths on flows whose marginals are known: Gaussian data, N(m, s^2), in float64."""

import math

import numpy as np
import pytest
import torch

from vla_rlaif.policies import flow

M, S = 0.7, 0.3  # mean and std of the data


def marginal(t: float) -> tuple[float, float]:
    """Mean and variance of t * noise + (1 - t) * data."""
    return (1 - t) * M, t**2 + (1 - t) ** 2 * S**2


def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """E[noise - data | x_t = x] of jointly Gaussian variables: covariance over variance."""
    mean, variance = (1 - t) * M, t**2 + (1 - t) ** 2 * S**2
    return -M + (t - (1 - t) * S**2) / variance * (x - mean)


def moments(num_steps: int, noise: float) -> tuple[float, float]:
    """Mean and variance of the last state, without sampling: every step is linear in x for this velocity."""
    sde = flow.SdeSteps.of(num_steps, noise)
    mean, variance = 0.0, 1.0
    for t, correction, std in zip(sde.time, sde.correction, sde.std, strict=True):
        x = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None, None]
        at = torch.full((2, 1, 1), t, dtype=torch.float64)
        after = flow.step_mean(
            x, velocity(x, at), duration=1 / num_steps, time=at, correction=torch.full_like(at, correction)
        )
        offset, slope = after[0].item(), (after[1] - after[0]).item()
        mean, variance = slope * mean + offset, slope**2 * variance + std**2
    return mean, variance


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5, 1.0])
def test_marginals_are_those_of_the_ode(noise):
    """A chain of K steps ends in the data's distribution up to its step size, with and without noise."""
    errors = []
    for num_steps in (100, 400):
        mean, variance = moments(num_steps, noise)
        errors.append(max(abs(mean - M), abs(math.sqrt(variance) - S)))
    assert errors[1] < 0.02 and errors[1] < 0.6 * errors[0], errors


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize("t", [0.25, 0.5, 0.75])
def test_a_short_step_keeps_the_marginal(t, noise):
    """From the exact marginal at t, a step of d changes mean and variance as the marginal does, up to d^2."""
    errors = []
    for num_steps in (1000, 2000):
        d = 1 / num_steps
        sde, k = flow.SdeSteps.of(num_steps, noise), round((1 - t) * num_steps)
        at = torch.full((2, 1, 1), sde.time[k], dtype=torch.float64)
        x = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None, None]
        after = flow.step_mean(x, velocity(x, at), duration=d, time=at, correction=at * 0 + sde.correction[k])
        (mean, variance), (want_mean, want_variance) = marginal(t), marginal(t - d)
        slope = (after[1] - after[0]).item()
        got = slope * mean + after[0].item(), slope**2 * variance + sde.std[k] ** 2
        errors.append((abs(got[0] - want_mean), abs(got[1] - want_variance)))
    for coarse, fine in zip(*errors, strict=True):
        assert fine < 0.3 * coarse + 1e-12  # a quarter: second order in d


def test_steps_of_flow_grpo():
    """K = 4, noise 0.5: s = 0.5 sqrt(t / (1 - t)), at t = 1 with 1 - t = 0.25; std = s / 2; correction = s^2 / (8 t).
    t: 1, .75, .5, .25; s^2: 1, .75, .25, 1/12."""
    sde = flow.SdeSteps.of(4, 0.5)
    np.testing.assert_allclose(sde.time, [1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(np.square(sde.std), [0.25, 0.1875, 0.0625, 1 / 48])
    np.testing.assert_allclose(sde.correction, [1 / 8, 1 / 8, 1 / 16, 1 / 24])


def test_mean_in_the_form_of_the_papers():
    """mean = a (1 - (t - d)) + e ((t - d) - s^2 d / (2 t)), with a = x - t v and e = x + (1 - t) v."""
    rng = np.random.default_rng(0)
    x, v = (torch.from_numpy(rng.normal(size=(4, 3, 2))) for _ in range(2))
    sde, d = flow.SdeSteps.of(4, 0.7), 0.25
    t, correction = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (sde.time, sde.correction))
    a, e = x - t * v, x + (1 - t) * v
    expected = a * (1 - (t - d)) + e * ((t - d) - correction)
    torch.testing.assert_close(flow.step_mean(x, v, duration=d, time=t, correction=correction), expected)


def test_densities_and_divergences_are_torchs():
    rng = np.random.default_rng(1)
    sample, mean, other = (torch.from_numpy(rng.normal(size=(5, 3, 2))) for _ in range(3))
    std, other_std = (torch.from_numpy(rng.uniform(0.2, 2, (5, 1, 1))) for _ in range(2))
    p, q = torch.distributions.Normal(mean, std), torch.distributions.Normal(other, other_std)
    torch.testing.assert_close(flow.log_density(sample, mean, std), p.log_prob(sample))
    torch.testing.assert_close(flow.divergence(mean, std, other, other_std), torch.distributions.kl_divergence(p, q))


def test_only_executed_steps_and_wanted_dims_count():
    values = torch.arange(12.0).reshape(1, 3, 4)
    mask = flow.counted(torch.tensor([2]), chunk=3, width=4, dims=2)
    assert flow.reduce_dims(values, mask, "sum").item() == 0 + 1 + 4 + 5
    assert flow.reduce_dims(values, mask, "mean").item() == 2.5
    nothing = flow.counted(torch.tensor([0]), chunk=3, width=4, dims=2)
    assert flow.reduce_dims(values, nothing, "mean").item() == 0.0


def test_numbers_that_do_not_count_have_no_gradient():
    values = torch.tensor([[[1.0, math.inf]]], requires_grad=True)
    flow.reduce_dims(values * 2, torch.tensor([[[True, False]]]), "sum").sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[[2.0, 0.0]]]
