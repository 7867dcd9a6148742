import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vla_rlaif.grpo import GRPO
from vla_rlaif.ppo import PPO, gae, whitened
from vla_rlaif.types import Targets

B, S = 24, 5
ALL = PPO(clip_low=0.1, clip_high=0.3, kl_coef=0.05, value_coef=0.7, entropy_coef=0.02, value_clip=0.3)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def make(seed=0):
    rng = np.random.default_rng(seed)
    logp = rng.normal(size=(B, S))
    fields = {
        "logp_old": logp + 0.3 * rng.normal(size=(B, S)),
        "advantage": rng.normal(size=B),
        "mask": rng.random(B) > 0.25,
    }
    value, old, returns = rng.normal(size=(3, B))
    return logp, fields, {"value": value, "value_old": old, "returns": returns, "kl": 0.1 * rng.random((B, S))}


def targets(fields, convert):
    return Targets(num_valid=float(fields["mask"].sum()), **{k: convert(v) for k, v in fields.items()})


def joint_via_torch(logp, fields, rest):
    x, v = (torch.tensor(a, requires_grad=True) for a in (logp, rest["value"]))
    more = {k: torch.tensor(a) for k, a in rest.items() if k != "value"}
    loss = ALL.joint_loss(x, targets(fields, torch.tensor), v, **more)
    loss.backward()
    assert x.grad is not None and v.grad is not None
    return loss.item(), x.grad.numpy(), v.grad.numpy()


def test_torch_jax_and_the_strict_standard_agree():
    logp, fields, rest = make()
    loss, by_logp, by_value = joint_via_torch(logp, fields, rest)
    t, more = targets(fields, jnp.asarray), {k: jnp.asarray(a) for k, a in rest.items() if k != "value"}
    function = jax.value_and_grad(lambda x, v: ALL.joint_loss(x, t, v, **more), argnums=(0, 1))
    value, grads = jax.jit(function)(jnp.asarray(logp), jnp.asarray(rest["value"]))
    assert float(value) == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(grads[0], by_logp, atol=1e-12)
    np.testing.assert_allclose(grads[1], by_value, atol=1e-12)
    xs = array_api_strict.asarray
    strict = ALL.joint_loss(xs(logp), targets(fields, xs), **{k: xs(a) for k, a in rest.items()})
    assert float(strict) == pytest.approx(loss, abs=1e-12)
    reward, mask = np.random.default_rng(1).normal(size=(2, 3, 4)), np.ones((3, 4), bool)
    plain = whitened(gae(reward[0], reward[1], mask, gamma=0.9, lam=0.8), mask)
    again = whitened(gae(xs(reward[0]), xs(reward[1]), xs(mask), gamma=0.9, lam=0.8), xs(mask))
    np.testing.assert_allclose(np.asarray(again), plain, atol=1e-15)


def test_the_joint_loss_is_the_papers():
    """L = policy + c1 * value - c2 * entropy, each written out; the parts have disjoint gradients, so learner and
    critic may minimise them apart."""
    logp, fields, rest = make()
    mask, ratio, a = fields["mask"], np.exp(logp - fields["logp_old"]), fields["advantage"][:, None]
    surrogate = np.minimum(ratio * a, np.clip(ratio, 0.9, 1.3) * a)
    entropy = -ratio * fields["logp_old"]
    policy = (-surrogate - 0.02 * entropy + 0.05 * rest["kl"])[mask].mean()
    held = rest["value_old"] + np.clip(rest["value"] - rest["value_old"], -0.3, 0.3)
    worse = np.maximum((rest["value"] - rest["returns"]) ** 2, (held - rest["returns"]) ** 2)
    loss, by_logp, by_value = joint_via_torch(logp, fields, rest)
    assert loss == pytest.approx(policy + 0.7 * 0.5 * worse[mask].mean(), abs=1e-13)
    x, v = (torch.tensor(b, requires_grad=True) for b in (logp, rest["value"]))
    ALL.loss(x, targets(fields, torch.tensor), torch.tensor(rest["kl"]))[0].backward()
    old, returns = torch.tensor(rest["value_old"]), torch.tensor(rest["returns"])
    (0.7 * ALL.value_loss(v, old, returns, torch.tensor(mask), float(mask.sum()))).backward()
    assert x.grad is not None and v.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), by_logp)
    np.testing.assert_allclose(v.grad.numpy(), by_value, atol=1e-16)


def test_value_loss_by_hand():
    # value 1.0, before 0.5, clip 0.2 -> held 0.7; return 0 -> errors 1.0 and 0.49: the worse one is 1.0.
    # value 0.0, before 0.5 -> held 0.3; return 0 -> errors 0 and 0.09: 0.09, though the value itself is right.
    ones = np.ones(2, bool)
    value, old = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    assert float(PPO(value_clip=0.2).value_loss(value, old, np.zeros(2), ones, 2.0)) == pytest.approx(0.5 * 1.09 / 2)
    assert float(PPO(value_clip=None).value_loss(value, old, np.zeros(2), ones, 2.0)) == pytest.approx(0.5 * 1.0 / 2)


def test_without_entropy_the_policy_part_is_grpos():
    logp, fields, rest = make()
    grpo = GRPO(group_size=4, clip_low=0.1, clip_high=0.3, kl_coef=0.05)
    ppo = PPO(clip_low=0.1, clip_high=0.3, kl_coef=0.05)
    want, got = (a.loss(logp, targets(fields, np.asarray), rest["kl"])[0] for a in (grpo, ppo))
    assert float(want) == float(got)


def test_the_coefficient_in_force_takes_the_place_of_the_first():
    logp, fields, rest = make()
    given = Targets(**{**vars(targets(fields, np.asarray)), "kl_coef": 0.4})
    want = PPO(kl_coef=0.4).loss(logp, targets(fields, np.asarray), rest["kl"])[0]
    assert float(PPO(kl_coef=0.05).loss(logp, given, rest["kl"])[0]) == float(want)


def entropy_gradient(logp_of, sample, density):
    """Of the bonus at the weights that acted, over many samples; ``density`` has the parameter."""
    logp = logp_of(sample, density)
    old = logp.detach().clone()
    num = len(sample)
    t = Targets(
        logp_old=old[:, None], advantage=torch.zeros(num), mask=torch.ones(num, dtype=torch.bool), num_valid=float(num)
    )
    loss, metrics = PPO(entropy_coef=1.0).loss(logp[:, None], t)
    (gradient,) = torch.autograd.grad(-loss, density)
    return gradient, metrics["entropy"].item()


def test_the_bonus_has_the_gradient_of_the_entropy():
    """Of a categorical distribution it is known: d H / d logit_k = -p_k (log p_k + H). Samples in proportion to p make
    the estimate exact."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = torch.log(p).requires_grad_()
    sample = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    gradient, entropy = entropy_gradient(lambda s, x: torch.log_softmax(x, 0)[s], sample, logits)
    h = -(p * p.log()).sum()
    assert entropy == pytest.approx(h.item(), abs=1e-12)
    np.testing.assert_allclose(gradient.numpy(), (-p * (p.log() + h)).numpy(), atol=1e-12)


def test_the_bonus_of_a_fixed_std_is_without_effect():
    """Symmetric samples around the mean of a Gaussian: the entropy does not depend on the mean."""
    mean = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    noise = torch.tensor([0.2, -0.2, 1.1, -1.1], dtype=torch.float64)
    sample = mean.detach() + noise
    gradient, _ = entropy_gradient(lambda s, m: torch.distributions.Normal(m, 0.5).log_prob(s), sample, mean)
    assert gradient.item() == pytest.approx(0.0, abs=1e-12)


def test_advantages_are_the_sum_over_the_future():
    """Against the definition, sum over l of (gamma lam)^l delta_{t+l}, in O(T^2); episodes of every length."""
    rng = np.random.default_rng(0)
    num, length = 6, 7
    mask = np.arange(length)[None] < np.array([7, 1, 3, 6, 0, 2])[:, None]
    reward, value = rng.normal(size=(2, num, length)) * mask
    got = gae(reward, value, mask, gamma=0.9, lam=0.7)
    for n in range(num):
        end = int(mask[n].sum())
        for t in range(length):
            after = [value[n, k + 1] if k + 1 < end else 0.0 for k in range(end)]
            deltas = [reward[n, k] + 0.9 * after[k] - value[n, k] for k in range(t, end)]
            want = sum((0.9 * 0.7) ** i * d for i, d in enumerate(deltas))
            assert got[n, t] == pytest.approx(want, abs=1e-13)


def test_advantages_at_the_ends_of_lambda():
    """lam 1 is the return minus the value, lam 0 the temporal difference."""
    reward, value = np.array([[0.0, 0.0, 2.0]]), np.array([[0.5, 1.0, 1.5]])
    mask = np.ones((1, 3), bool)
    np.testing.assert_allclose(gae(reward, value, mask, gamma=1.0, lam=1.0), [[1.5, 1.0, 0.5]])
    np.testing.assert_allclose(gae(reward, value, mask, gamma=1.0, lam=0.0), [[0.5, 0.5, 0.5]])


def test_whitening_is_over_the_live_decisions():
    advantage = np.array([[1.0, 3.0, 100.0], [5.0, 7.0, 9.0]])
    mask = np.array([[True, True, False], [True, True, False]])
    # 1, 3, 5, 7: mean 4, std sqrt(5)
    want = np.array([[-3.0, -1.0, 0.0], [1.0, 3.0, 0.0]]) / np.sqrt(5)
    np.testing.assert_allclose(whitened(advantage, mask), want)
    assert (whitened(np.full((2, 2), 3.0), np.ones((2, 2), bool)) == 0).all()


def test_the_kl_coefficient_follows_the_kl():
    algorithm = PPO(kl_coef=0.1, kl_target=0.02)
    # above 1.5 x 0.02 = 0.03 it doubles, below 0.02 / 1.5 = 0.0133 it halves
    assert [algorithm.adapted(0.1, kl) for kl in (0.031, 0.029, 0.014, 0.013)] == [0.2, 0.1, 0.1, 0.05]
    assert PPO(kl_coef=0.1).adapted(0.1, 5.0) == 0.1
