"""Denoising: DDPM's ancestral sampler and DDIM, against closed forms in float64 and golden numbers.

For data N(m, s^2) the best prediction of the noise is known. With x = sqrt(a) x0 + sqrt(1 - a) e, a = alpha_hat,
x has mean sqrt(a) m and variance V = s^2 a + 1 - a, so
    E[e | x] = sqrt(1 - a) / V (x - sqrt(a) m)    and    E[x0 | x] = m + s^2 sqrt(a) / V (x - sqrt(a) m).
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from vla_rlaif.policies.octo.diffusion import DiffusionHead, Schedule, ddim, ddim_steps, denoise, next_state
from vla_rlaif.policies.octo.spec import DiffusionSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "octo"
MEAN, STD = np.array([0.0, 0.5, -1.0]), np.array([1.0, 0.3, 0.05])
LIVE = np.ones(3, bool)
FAR = 1e9  # a limit that nothing reaches
BY_HAND = Schedule(betas=np.array([0.5, 0.75]), alphas=np.array([0.5, 0.25]), alpha_hats=np.array([0.5, 0.125]))


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def double(num_steps: int) -> Schedule:
    betas = Schedule.cosine(num_steps).betas.astype(np.float64)
    return Schedule(betas, 1 - betas, np.cumprod(1 - betas))


def best(schedule: Schedule) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def predict(x: jax.Array, step: jax.Array) -> jax.Array:
        kept = jnp.asarray(schedule.alpha_hats)[step][..., None]
        return jnp.sqrt(1 - kept) / (STD**2 * kept + 1 - kept) * (x - jnp.sqrt(kept) * MEAN)

    return predict


def test_marginals_of_the_ancestral_sampler(float64: None) -> None:
    """Denoising is linear here, so N(0, 1) noise gives a normal whose moments the unit inputs spell out.

    The oracle is DDPM's posterior mean (https://arxiv.org/abs/2006.11239, eq. 7) with E[x0 | x] in it, std sqrt(beta),
    nothing added at the last step.
    """
    schedule, num = double(20), 20
    unit = np.concatenate([np.zeros((1, num + 1)), np.eye(num + 1)])  # nothing; the start; the noise of each step
    x, noise = np.repeat(unit[:, 0, None], 3, 1), np.repeat(unit[:, 1:].T[..., None], 3, 2)
    stds = jnp.asarray(schedule.stds(0.0)[::-1].copy())
    final, _, _ = denoise(
        best(schedule), schedule, jnp.asarray(x), jnp.asarray(noise), np.arange(19, -1, -1), stds, FAR, LIVE
    )
    mean, variance = final[0], jnp.square(final[1:] - final[0]).sum(0)

    want_mean, want_variance = np.zeros(3), np.ones(3)
    for s in range(19, -1, -1):
        alpha, beta, kept = schedule.alphas[s], schedule.betas[s], schedule.alpha_hats[s]
        before = kept / alpha
        gain = STD**2 * np.sqrt(kept) / (STD**2 * kept + 1 - kept)  # of E[x0 | x]
        of_clean, of_x = np.sqrt(before) * beta / (1 - kept), np.sqrt(alpha) * (1 - before) / (1 - kept)
        want_mean = of_clean * (MEAN + gain * (want_mean - np.sqrt(kept) * MEAN)) + of_x * want_mean
        want_variance = (of_clean * gain + of_x) ** 2 * want_variance + (beta if s > 0 else 0.0)
    np.testing.assert_allclose(mean, want_mean, atol=1e-10)
    np.testing.assert_allclose(variance, want_variance, rtol=1e-10)
    # Data N(0, 1) stays N(0, 1) until the last step, which adds nothing: variance alpha_0.
    np.testing.assert_allclose(variance[0], schedule.alphas[0], rtol=1e-10)


def test_ddim_is_its_recursion(float64: None) -> None:
    # With the best noise, a step from a to a' multiplies x - sqrt(a) m by
    # sqrt(a') s^2 sqrt(a) / V + sqrt(1 - a') sqrt(1 - a) / V, and adds sqrt(a') m.
    schedule, steps = double(20), ddim_steps(20, 7)
    x = np.array([[1.0, -0.5, 2.0], [0.0, 0.0, 0.0]])
    got = ddim(best(schedule), schedule, jnp.asarray(x), steps, FAR, LIVE)
    kept = schedule.alpha_hats[steps]
    for a, b in zip(kept, [*kept[1:], 1.0], strict=True):
        factor = (np.sqrt(a * b) * STD**2 + np.sqrt((1 - a) * (1 - b))) / (STD**2 * a + 1 - a)
        x = factor * (x - np.sqrt(a) * MEAN) + np.sqrt(b) * MEAN
    np.testing.assert_allclose(got, x, atol=1e-10)


def test_many_steps_of_ddim_are_the_probability_flow(float64: None) -> None:
    # Along the flow (x - sqrt(a) m) / sqrt(V) is constant. It ends at a = 1, V = s^2:
    # action = m + s (x - sqrt(a_K) m) / sqrt(s^2 a_K + 1 - a_K). The error falls with the number of steps.
    x, errors = np.array([[1.0, -0.5, 2.0]]), []
    for num in (40, 160, 640):
        schedule = double(num)
        got = ddim(best(schedule), schedule, jnp.asarray(x), ddim_steps(num, num), FAR, LIVE)
        last = schedule.alpha_hats[-1]
        want = MEAN + STD * (x - np.sqrt(last) * MEAN) / np.sqrt(STD**2 * last + 1 - last)
        errors.append(float(np.abs(np.asarray(got) - want).max()))
    assert errors[2] < 5e-3 and errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2, errors


def test_ddim_bounds_the_clean_action() -> None:
    # alpha_hats .5 and .125, noise 0 at step 1: x = 1 implies 2.83, bound 2, and the noise that agrees with it is
    # (1 - 2 sqrt(.125)) / sqrt(.875) = .3131. Then x = sqrt(.5) (2 + .3131); noise 1 at step 0 implies 1.3131.
    def predict(x: jax.Array, step: jax.Array) -> jax.Array:
        return jnp.ones_like(x) * (step == 0)[:, None]

    implied = (1 - 2 * 0.125**0.5) / 0.875**0.5
    bounded = Schedule(**{**vars(BY_HAND), "clip_prediction": 2.0})
    for schedule, limit in (
        (BY_HAND, 2.0),
        (bounded, 5.0),
        (Schedule(**{**vars(bounded), "clip_prediction": 5.0}), 2.0),
    ):
        got = ddim(predict, schedule, jnp.ones((1, 1)), np.array([1, 0]), limit, np.ones(1, bool))
        np.testing.assert_allclose(got, [[1 + implied]], rtol=1e-5)


def test_ddim_keeps_dead_dims_at_the_noise_level() -> None:
    # The prediction of one dim is the state of the other, so the live dim tells what the dead one held: 3 at step 1,
    # sqrt(.5) 3 on entering step 0 (alpha_hat .5), 0 at the end.
    got = ddim(
        lambda x, step: x[:, ::-1], BY_HAND, jnp.array([[1.0, 3.0]]), np.array([1, 0]), FAR, np.array([True, False])
    )
    clean = (1 - 0.875**0.5 * 3) / 0.125**0.5
    state = 0.5**0.5 * clean + 0.5**0.5 * 3
    np.testing.assert_allclose(got, [[(state - 0.5**0.5 * (0.5**0.5 * 3)) / 0.5**0.5, 0.0]], rtol=1e-5, atol=1e-6)


def test_ddim_steps() -> None:
    assert ddim_steps(20, 5).tolist() == [19, 18, 12, 6, 0]
    assert ddim_steps(20, 6).tolist() == [19, 18, 14, 9, 5, 0]  # 18, 13.5, 9, 4.5, 0 rounded, halves up
    assert ddim_steps(20, 20).tolist() == list(range(19, -1, -1))
    assert ddim_steps(20, 3).tolist() == [19, 18, 0]
    for num in range(3, 21):
        assert (np.diff(ddim_steps(20, num)) < 0).all()
    for num in (2, 21):
        with pytest.raises(ValueError, match="wanted 3 to 20"):
            ddim_steps(20, num)


@cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "tiny_golden.npz"))


@cache
def tiny_head() -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Upstream's trained tiny head at the last window position of the golden readout."""
    spec = DiffusionSpec(readout_key="readout_action", action_horizon=4, hidden_dim=64)
    prefix = "heads_action/"
    with np.load(GOLDEN / "tiny_params.npz") as file:
        flat = {name.removeprefix(prefix): jnp.asarray(file[name]) for name in file if name.startswith(prefix)}
    head, params = DiffusionHead(spec), {"params": unflatten_dict(flat, sep="/")}
    tokens = jnp.asarray(golden()["out/full/readout_action/tokens"][:, -1])
    embedding: Any = head.apply(params, tokens, method="embed")

    def predict(x: jax.Array, step: jax.Array) -> jax.Array:
        return jnp.asarray(head.apply(params, embedding, x, step))

    return predict


FIVE = np.tile(np.arange(7) < 5, 4)  # a robot with five of the head's seven dims


@cache
def chain_of_five() -> tuple[jax.Array, jax.Array, jax.Array]:
    """A whole trajectory with upstream's noise."""
    g, schedule = golden(), Schedule.cosine(20)
    x, noise = jnp.asarray(g["sample/x"][0, :, -1]), jnp.asarray(g["sample/z"][:, :, -1])
    stds = jnp.asarray(schedule.stds(0.0)[::-1].copy())
    return denoise(tiny_head(), schedule, x, noise, np.arange(19, -1, -1), stds, 5.0, FIVE)


def test_actions_of_a_robot_with_fewer_dims() -> None:
    """Upstream's answer differs from the seven-dim one, so the dead dims' noise is seen."""
    g = golden()
    mean, std = (g[f"stats/tiny_bridge/{name}"][:5] for name in ("mean", "std"))
    want = (g["sample/actions_unnorm_5dim"] - mean) / std
    final = np.asarray(chain_of_five()[0]).reshape(3, 4, 7)[..., :5]
    worst = np.abs(final - want).max()
    print(f"sample/actions_unnorm_5dim: {worst:.1e} of 1e-03")
    assert worst <= 1e-3 < np.abs(final - g["sample/actions_normalized"][..., :5]).max()


def test_a_stored_chain_scores_again_as_it_was_sampled() -> None:
    """Every state follows from the sample before it, and the means from the states; dead dims hold the step's noise."""
    schedule, (final, samples, means) = Schedule.cosine(20), chain_of_five()
    states = jnp.concatenate([jnp.asarray(golden()["sample/x"][:1, :, -1]), next_state(samples, FIVE, 5.0)])
    np.testing.assert_array_equal(states[-1], final)
    kept, dead = np.asarray(samples)[..., FIVE], np.asarray(samples)[..., ~FIVE]
    assert (np.abs(kept) > 5).any()  # so the clip matters
    level = np.sqrt(1 - schedule.alpha_hats[::-1])[:, None, None]
    np.testing.assert_allclose(dead, level * golden()["sample/z"][:, :, -1][..., ~FIVE], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(states)[1:][..., ~FIVE], dead)
    step = jnp.broadcast_to(jnp.arange(19, -1, -1)[:, None], (20, 3))
    again = schedule.mean(states[:-1], jax.jit(tiny_head())(states[:-1], step), step)
    np.testing.assert_allclose(again[1:], means[1:], atol=1e-4)
    np.testing.assert_allclose(again[0], means[0], atol=1e-3)  # this step multiplies rounding of the noise by 31.6


def test_few_steps_of_ddim_stay_near_many() -> None:
    """One head call a step. Evenly spaced steps alone would throw the first step's error into the action."""
    schedule, live = Schedule.cosine(20), np.ones(28, bool)
    x = jnp.asarray(golden()["sample/x"][0, :, -1])

    def act(steps: np.ndarray) -> np.ndarray:
        return np.asarray(ddim(tiny_head(), schedule, x, steps, 5.0, live))

    many = act(ddim_steps(20, 20))
    distance = [float(np.abs(act(ddim_steps(20, num)) - many).mean()) for num in (10, 5)]
    even = float(np.abs(act(np.array([19, 14, 10, 5, 0])) - many).mean())
    print(f"DDIM: {distance}, evenly spaced {even}, size of an action {np.abs(many).mean()}")
    assert 0 < distance[0] < distance[1] < even / 3
