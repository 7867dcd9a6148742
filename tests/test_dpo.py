import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vla_rlaif.dpo import DPO
from vla_rlaif.types import Targets

M, T, S = 5, 3, 2


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def make():
    """Five pairs: preferred first, preferred second, a tie, a soft label, and padding."""
    rng = np.random.default_rng(0)
    label = np.array([1.0, -1.0, 0.0, 0.4, 1.0])
    mask = rng.random((M, 2, T)) > 0.3
    mask[:, :, 0] = True  # every trajectory has a decision
    mask[-1] = False
    fields = {
        "logp_old": rng.normal(size=(M * 2 * T, S)),
        "advantage": np.repeat(np.stack([label, -label], axis=1).ravel(), T),
        "mask": mask.ravel(),
    }
    return fields["logp_old"] + rng.normal(size=(M * 2 * T, S)), fields, label


def targets(fields, convert):
    return Targets(num_valid=4.0, **{k: convert(v) for k, v in fields.items()})


def oracle(logp, fields, label, beta):
    """The papers' formula, pair by pair, with torch's own cross-entropy."""
    ratio = (logp - fields["logp_old"]).reshape(M, 2, T, S)
    mask = fields["mask"].reshape(M, 2, T)
    total = 0.0
    for m in range(M - 1):
        first, second = (ratio[m, side][mask[m, side]].sum() for side in (0, 1))
        logit, p = torch.tensor(beta * (first - second)), torch.tensor((1 + label[m]) / 2)
        total += torch.nn.functional.binary_cross_entropy_with_logits(logit, p).item()
    return total / 4


def via_torch(algorithm, logp, fields):
    x = torch.tensor(logp, requires_grad=True)
    loss, metrics = algorithm.loss(x, targets(fields, torch.tensor))
    loss.backward()
    assert x.grad is not None
    return loss.item(), x.grad.numpy(), {k: v.item() for k, v in metrics.items()}


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_every_backend_gives_the_papers_loss(beta):
    algorithm = DPO(beta=beta, num_decisions=T)
    logp, fields, label = make()
    loss, grad, metrics = via_torch(algorithm, logp, fields)
    assert loss == pytest.approx(oracle(logp, fields, label, beta), abs=1e-13)
    t = targets(fields, jnp.asarray)
    function = jax.jit(jax.value_and_grad(lambda x: algorithm.loss(x, t), has_aux=True))
    (value, extra), by_jax = function(jnp.asarray(logp))
    assert float(value) == pytest.approx(loss, abs=1e-13)
    np.testing.assert_allclose(by_jax, grad, atol=1e-13)
    assert metrics == pytest.approx({k: float(v) for k, v in extra.items()})
    xs = array_api_strict.asarray
    assert float(algorithm.loss(xs(logp), targets(fields, xs))[0]) == pytest.approx(loss, abs=1e-13)


def test_one_pair_by_hand():
    """One decision each, log-ratios ln 3 and 0, beta 1: P(first) = 3 / 4, and the loss is -ln 0.75 or -ln 0.25."""
    logp = np.log(np.array([[3.0], [1.0]]))
    for label, want in ((1.0, -np.log(0.75)), (-1.0, -np.log(0.25)), (0.0, -(np.log(0.75) + np.log(0.25)) / 2)):
        t = Targets(
            logp_old=np.zeros((2, 1)), advantage=np.array([label, -label]), mask=np.ones(2, bool), num_valid=1.0
        )
        loss, metrics = DPO(beta=1.0, num_decisions=1).loss(logp, t)
        assert float(loss) == pytest.approx(want)
        assert float(metrics["pair_accuracy"]) == (label == 1.0)
    assert float(metrics["log_ratio_preferred"]) == 0.0  # a tie has none


def test_gradient_pushes_the_preferred_up_and_the_other_down():
    logp, fields, _ = make()
    grad = via_torch(DPO(beta=0.5, num_decisions=T), logp, fields)[1].reshape(M, 2, T * S)
    assert (grad[0, 0] <= 0).all() and (grad[0, 1] >= 0).all() and (grad[0] != 0).any()
    assert (grad[1, 0] >= 0).all() and (grad[1, 1] <= 0).all() and (grad[1] != 0).any()
    assert (grad[-1] == 0).all()  # padding


def test_a_tie_pulls_the_trajectories_together():
    """At equal log-ratios a tie costs log 2 and has no gradient; the more preferred one is pushed down."""
    t = Targets(logp_old=np.zeros((2, 1)), advantage=np.zeros(2), mask=np.ones(2, bool), num_valid=1.0)
    algorithm = DPO(beta=1.0, num_decisions=1)
    assert float(algorithm.loss(np.zeros((2, 1)), t)[0]) == pytest.approx(np.log(2))
    apart = [float(algorithm.loss(np.array([[x], [0.0]]), t)[0]) for x in (-1.0, 1.0)]
    assert apart[0] == pytest.approx(apart[1]) and apart[0] > np.log(2)


def test_gradient_at_the_reference_itself():
    """Before the first update every margin is 0 and P(first) 1/2: the gradient of each log-prob is beta (1/2 - p) / 4
    for the first trajectory, and minus that for the second. Softplus by way of |margin| is wrong there under jax."""
    algorithm = DPO(beta=0.5, num_decisions=T)
    _, fields, label = make()
    side = np.array([1.0, -1.0])[None, :, None]
    want = 0.5 * (0.5 - (1 + label[:, None, None]) / 2) / 4 * side * fields["mask"].reshape(M, 2, T)
    want = np.repeat(want.reshape(-1, 1), S, axis=1)
    np.testing.assert_allclose(via_torch(algorithm, fields["logp_old"], fields)[1], want, atol=1e-15)
    t = targets(fields, jnp.asarray)
    by_jax = jax.grad(lambda x: algorithm.loss(x, t)[0])(jnp.asarray(fields["logp_old"]))
    np.testing.assert_allclose(by_jax, want, atol=1e-15)


def test_wild_log_ratios_overflow_nowhere():
    logp, fields, _ = make()
    loss, grad, _ = via_torch(DPO(beta=1.0, num_decisions=T), 1e4 * logp, fields)
    assert np.isfinite(loss) and np.isfinite(grad).all()


def test_micro_batches_add_up():
    algorithm = DPO(beta=0.3, num_decisions=T)
    logp, fields, _ = make()
    whole, unit = via_torch(algorithm, logp, fields)[0], 2 * T
    parts = 0.0
    for rows in (slice(0, 2 * unit), slice(2 * unit, M * unit)):
        t = targets({k: v[rows] for k, v in fields.items()}, np.asarray)
        parts += float(algorithm.loss(logp[rows], t)[0])
    assert parts == pytest.approx(whole, abs=1e-14)
