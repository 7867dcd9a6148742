import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vla_rlaif.grpo import GRPO, importance_weights, num_valid
from vla_rlaif.types import Targets

B, S = 24, 5
GROUP = np.repeat(np.arange(B // 4), 4)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def make(*, on_policy=False, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    logp = rng.normal(size=(B, S)).astype(dtype)
    old = logp.copy() if on_policy else (logp + 0.3 * rng.normal(size=(B, S))).astype(dtype)
    advantage = GRPO(group_size=4).advantages(rng.normal(size=B), GROUP)[0].astype(dtype)
    fields = {"logp_old": old, "advantage": advantage, "mask": rng.random(B) > 0.25}
    return logp, fields, (0.1 * rng.random((B, S))).astype(dtype)


def targets(fields, convert, rows=slice(None)):
    total = float(fields["mask"].sum())
    return Targets(num_valid=total, **{k: convert(v[rows]) for k, v in fields.items()})


def via_torch(algorithm, logp, fields, kl):
    x = torch.tensor(logp, requires_grad=True)
    loss, metrics = algorithm.loss(x, targets(fields, torch.tensor), torch.tensor(kl))
    loss.backward()
    assert x.grad is not None
    return loss.item(), x.grad.numpy(), {k: v.item() for k, v in metrics.items()}


def via_jax(algorithm, logp, fields, kl, *, jit=False):
    t, k = targets(fields, jnp.asarray), jnp.asarray(kl)
    function = jax.value_and_grad(lambda x: algorithm.loss(x, t, k), has_aux=True)
    (loss, metrics), grad = (jax.jit(function) if jit else function)(jnp.asarray(logp))
    return float(loss), np.asarray(grad), {name: float(v) for name, v in metrics.items()}


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-6)])
def test_torch_and_jax_agree(on_policy, jit, dtype, tolerance):
    algorithm = GRPO(group_size=4, clip_high=0.28, kl_coef=0.05)
    logp, fields, kl = make(on_policy=on_policy, dtype=dtype)
    loss_t, grad_t, metrics_t = via_torch(algorithm, logp, fields, kl)
    loss_j, grad_j, metrics_j = via_jax(algorithm, logp, fields, kl, jit=jit)
    assert loss_t == pytest.approx(loss_j, abs=tolerance)
    np.testing.assert_allclose(grad_t, grad_j, atol=tolerance)
    assert metrics_t == pytest.approx(metrics_j, abs=tolerance)
    assert grad_t.dtype == dtype and grad_j.dtype == dtype


def test_hand_worked_loss():
    algorithm = GRPO(group_size=2, clip_low=0.2, clip_high=0.2, kl_coef=0.5)
    logp = np.log(np.array([[1.5], [1.5], [0.5], [0.5]]))
    t = Targets(
        logp_old=np.zeros((4, 1)), advantage=np.array([1.0, -1.0, 1.0, -1.0]), mask=np.ones(4, bool), num_valid=4.0
    )
    kl = np.array([[0.1], [0.2], [0.3], [0.4]])
    loss, metrics = algorithm.loss(logp, t, kl)
    # min(1.5, 1.2) = 1.2; min(-1.5, -1.2) = -1.5; min(.5, .8) = .5; min(-.5, -.8) = -.8; mean KL = .25
    assert float(loss) == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4 + 0.5 * 0.25)
    assert float(metrics["clip_fraction"]) == 0.5  # rows 0 and 3 bind
    assert float(metrics["reference_kl"]) == pytest.approx(0.25)


def test_importance_weighs_the_surrogate_and_not_the_kl():
    algorithm = GRPO(group_size=2, clip_low=0.2, clip_high=0.2, kl_coef=0.5)
    t = Targets(
        logp_old=np.zeros((2, 1)),
        advantage=np.array([1.0, -1.0]),
        mask=np.ones(2, bool),
        num_valid=2.0,
        importance=np.array([[0.5], [2.0]]),
    )
    loss, _ = algorithm.loss(np.log(np.array([[1.5], [1.5]])), t, np.array([[0.1], [0.3]]))
    # min(1.5, 1.2) = 1.2 and min(-1.5, -1.2) = -1.5; mean KL = .2
    assert float(loss) == pytest.approx(-(0.5 * 1.2 - 2.0 * 1.5) / 2 + 0.5 * 0.2)


def test_importance_is_the_truncated_ratio_of_proximal_and_behaviour():
    old, acted = np.log(np.array([[1.0, 3.0], [0.5, 9.0]])), np.array([[0.0, 0.0], [0.0, np.nan]])
    for xs in (np.asarray, torch.tensor, jnp.asarray):
        weights = importance_weights(xs(old), xs(acted), cap=2.0)
        # a decision whose acted log-prob is unknown counts as it is
        np.testing.assert_allclose(np.asarray(weights), [[1.0, 2.0], [0.5, 1.0]], rtol=1e-6)


def test_constant_normaliser_by_hand():
    # Two live episodes of T = 3 with 1 and 3 decisions, one dead episode: 2 * 3 against 1 + 3.
    mask = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 1]], bool)
    advantage = np.array([1.0, -1.0, 0.0])
    assert num_valid("constant", advantage, mask) == 6.0
    assert num_valid("decisions", advantage, mask) == 4.0


def test_only_uses_the_array_standard():
    """array_api_strict raises on anything outside it."""
    logp, fields, kl = make()
    xs = array_api_strict.asarray
    loss, _ = GRPO(group_size=4, kl_coef=0.05).loss(xs(logp), targets(fields, xs), xs(kl))
    assert float(loss) == pytest.approx(via_torch(GRPO(group_size=4, kl_coef=0.05), logp, fields, kl)[0])


def test_micro_batches_add_up():
    algorithm = GRPO(group_size=4, kl_coef=0.05)
    logp, fields, kl = make()
    whole = via_torch(algorithm, logp, fields, kl)[1]
    x = torch.tensor(logp, requires_grad=True)
    for rows in (slice(0, 7), slice(7, 20), slice(20, B)):
        algorithm.loss(x[rows], targets(fields, torch.tensor, rows), torch.tensor(kl[rows]))[0].backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), whole, atol=1e-14)


def test_padding_changes_no_metric():
    algorithm = GRPO(group_size=4, kl_coef=0.05)
    logp, fields, kl = make()
    loss, metrics = algorithm.loss(logp, targets(fields, np.asarray), kl)
    pad = lambda v: np.concatenate([v, np.zeros((40, *v.shape[1:]), v.dtype)])  # noqa: E731
    padded = {k: pad(v) for k, v in fields.items()}
    loss_p, metrics_p = algorithm.loss(pad(logp), targets(padded, np.asarray), pad(kl))
    assert float(loss) == pytest.approx(float(loss_p))
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx({k: float(v) for k, v in metrics_p.items()})


def test_masked_rows_get_no_gradient_even_if_logp_is_wild():
    logp, fields, kl = make()
    logp[~fields["mask"]] += 1e4
    grad = via_torch(GRPO(group_size=4), logp, fields, kl)[1]
    assert np.isfinite(grad).all() and (grad[~fields["mask"]] == 0).all()


def test_first_step_gradient_is_reinforce():
    """On policy the ratio is 1, both arms of the minimum tie, and the gradient is plain -A * weight."""
    logp, fields, kl = make(on_policy=True)
    want = -(fields["mask"] * fields["advantage"])[:, None] / (fields["mask"].sum() * S) * np.ones((1, S))
    np.testing.assert_allclose(via_torch(GRPO(group_size=4), logp, fields, kl)[1], want, atol=1e-14)
    np.testing.assert_allclose(via_jax(GRPO(group_size=4), logp, fields, kl, jit=True)[1], want, atol=1e-14)


def test_matches_textbook_clip():
    """The one-sided bound equals min(r*A, clip(r)*A) everywhere."""
    algorithm = GRPO(group_size=4, clip_low=0.1, clip_high=0.3)
    logp, fields, kl = make(seed=3)
    r, a = np.exp(logp - fields["logp_old"]), fields["advantage"][:, None]
    want = -(fields["mask"][:, None] * np.minimum(r * a, np.clip(r, 0.9, 1.3) * a)).sum() / (fields["mask"].sum() * S)
    assert via_torch(algorithm, logp, fields, kl)[0] == pytest.approx(want, abs=1e-14)


def test_advantages_by_hand():
    # Group 7: rewards 1, 3 -> mean 2, std 1 -> -1, 1. Group 3: 0, 10 -> mean 5, std 5 -> -1, 1.
    reward, group = np.array([1.0, 0.0, 3.0, 10.0]), np.array([7, 3, 7, 3])  # ids, not neighbours
    advantage, stats = GRPO(group_size=2).advantages(reward, group)
    np.testing.assert_allclose(advantage, [-1, -1, 1, 1])
    assert stats["groups/live"] == 2 and stats["reward/std_in_group"] == pytest.approx(3.0)
    unscaled, _ = GRPO(group_size=2, scale_by_std=False).advantages(reward, group)
    np.testing.assert_allclose(unscaled, [-1, -5, 1, 5])


def test_unscorable_members_vote_in_nothing():
    reward = np.array([1.0, np.nan, 3.0, 5.0])
    advantage, _ = GRPO(group_size=4).advantages(reward, np.zeros(4, int))
    want = (np.array([1.0, 3.0, 5.0]) - 3) / np.std([1.0, 3.0, 5.0])
    np.testing.assert_allclose(advantage, [want[0], 0.0, want[1], want[2]])
    few, stats = GRPO(group_size=4).advantages(np.array([1.0, np.nan, np.nan, np.nan]), np.zeros(4, int))
    assert (few == 0).all() and stats["groups/too_few_valid"] == 1


def test_residue_of_a_tied_group_is_not_an_advantage():
    reward = np.array([0.5, 0.5 + 1.6e-4, 0.5, 0.5])  # float32 residue that once became advantages of thousands
    advantage, stats = GRPO(group_size=4).advantages(reward, np.zeros(4, int))
    assert (advantage == 0).all() and stats["groups/zero_spread"] == 1


@pytest.mark.parametrize("size", [1, 3])
def test_impossible_groups_are_named(size):
    with pytest.raises(ValueError, match=f"group 5 has {size} members, wanted 2"):
        GRPO(group_size=2).advantages(np.zeros(size), np.full(size, 5))


def test_shapes_are_checked_in_tests():
    """Needs --jaxtyping-packages=vla_rlaif,beartype.beartype, which pyproject sets."""
    with pytest.raises(Exception, match=r"(?si)type-check error"):
        GRPO(group_size=2).advantages(np.zeros((2, 2)), np.zeros(2, int))
