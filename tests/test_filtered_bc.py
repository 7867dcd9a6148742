import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vla_rlaif.filtered_bc import FilteredBC
from vla_rlaif.types import Targets


def test_the_best_share_is_kept():
    reward = np.array([0.1, np.nan, 3.0, 2.0, 0.5, 2.0, -1.0, np.nan, 0.0])
    # seven are scorable: a quarter of them is 1.75, so two; of the two with 2.0 the first
    np.testing.assert_array_equal(FilteredBC(share=0.25).kept(reward), [0, 0, 1, 1, 0, 0, 0, 0, 0])
    assert FilteredBC(share=0.01).kept(reward).sum() == 1
    assert FilteredBC(share=1.0).kept(reward).sum() == 7
    np.testing.assert_array_equal(FilteredBC(share=0.25, threshold=2.5).kept(reward), [0, 0, 1, 0, 0, 0, 0, 0, 0])
    assert FilteredBC(share=1.0, threshold=9.0).kept(reward).sum() == 0
    assert FilteredBC().kept(np.full(4, np.nan)).sum() == 0


def test_the_successful_are_a_threshold():
    success = np.array([0.0, 1.0, 0.0, 1.0])
    np.testing.assert_array_equal(FilteredBC(share=1.0, threshold=0.5).kept(success), success)


def test_the_loss_is_the_likelihood_of_what_is_kept_on_every_backend():
    rng = np.random.default_rng(0)
    logp, kl = rng.normal(size=(2, 12, 3))
    mask, advantage = rng.random(12) > 0.3, rng.random(12)
    algorithm = FilteredBC(kl_coef=0.1)

    def loss(convert):
        fields = {"logp_old": convert(logp + 0.1), "advantage": convert(advantage), "mask": convert(mask)}
        return algorithm.loss(convert(logp), Targets(num_valid=float(mask.sum()), **fields), convert(kl))

    want = (-advantage[:, None] * logp + 0.1 * kl)[mask].mean()
    with jax.enable_x64(True):
        for convert in (np.asarray, torch.tensor, jnp.asarray, array_api_strict.asarray):
            assert float(loss(convert)[0]) == pytest.approx(want, abs=1e-13)
    # log-ratio -0.1 everywhere: k3 = exp(-0.1) - 1 + 0.1
    assert float(loss(np.asarray)[1]["policy_kl"]) == pytest.approx(np.exp(-0.1) - 0.9)
