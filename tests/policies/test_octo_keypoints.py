"""The key-point stem, and the bounded prediction of the sampler."""

import jax
import jax.numpy as jnp
import numpy as np

from vla_rlaif.policies.octo.diffusion import Schedule
from vla_rlaif.policies.octo.keypoints import KeypointStem, spatial_softmax
from vla_rlaif.policies.octo.spec import KeypointSpec


def test_spatial_softmax_finds_a_peak():
    # One channel peaks at row 1, column 2 of a 4 x 4 map: x = -1 + 2 * 2/3, y = -1 + 2 * 1/3.
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, 1, 2, 0] = 50.0
    np.testing.assert_allclose(spatial_softmax(jnp.asarray(x))[0], [1 / 3, -1 / 3], atol=1e-5)
    # A flat map has its mean in the middle.
    np.testing.assert_allclose(spatial_softmax(jnp.zeros((1, 4, 4, 1)))[0], [0, 0], atol=1e-6)


def test_one_token_an_image_of_two_numbers_a_channel():
    pixels = jnp.zeros((3, 64, 64, 3), jnp.uint8)
    stem = KeypointStem(KeypointSpec(channels=5))
    params = stem.init(jax.random.key(0), pixels)
    assert jnp.asarray(stem.apply(params, pixels)).shape == (3, 1, 1, 10)


def test_bounded_mean_equals_upstreams_while_the_bound_is_not_reached():
    free, bounded = Schedule.cosine(20), Schedule.cosine(20, clip_prediction=1e6)
    rng = np.random.default_rng(0)
    x, noise = (jnp.asarray(rng.normal(size=(18, 7)), jnp.float32) for _ in range(2))
    step = jnp.arange(18)  # the last two steps divide by almost nothing: float32 cannot compare them
    np.testing.assert_allclose(free.mean(x, noise, step), bounded.mean(x, noise, step), rtol=2e-4, atol=2e-4)


def test_bound_tames_the_first_step():
    step, x = jnp.full(4, 19), jnp.ones((4, 7))
    noise = x + 0.3  # an error of 0.3 in the predicted noise
    assert float(jnp.abs(Schedule.cosine(20).mean(x, noise, step)).max()) > 5
    assert float(jnp.abs(Schedule.cosine(20, clip_prediction=3.0).mean(x, noise, step)).max()) < 1


def test_bounded_mean_by_hand():
    # alphas .5 and .25 -> alpha_hats .5, .125. Step 1: x = 1, noise = 0 -> clean = 1/sqrt(.125) = 2.83, bound 2.
    # mean = sqrt(.5) * .75 / .875 * 2 + sqrt(.25) * .5 / .875 * 1
    schedule = Schedule(
        betas=np.array([0.5, 0.75], np.float32),
        alphas=np.array([0.5, 0.25], np.float32),
        alpha_hats=np.array([0.5, 0.125], np.float32),
        clip_prediction=2.0,
    )
    got = schedule.mean(jnp.ones((1, 1)), jnp.zeros((1, 1)), jnp.array([1]))
    np.testing.assert_allclose(got, 0.5**0.5 * 0.75 / 0.875 * 2 + 0.5 * 0.5 / 0.875, rtol=1e-5)
