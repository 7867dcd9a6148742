import numpy as np
import optax
import pytest
import torch
from mlp_policy import E, MlpPolicy, S, X, observations

from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.jax_imitation import imitate as jax_imitate
from vla_rlaif.policies.gaussian_jax import GaussianJax
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.torch_imitation import cosine, imitate
from vla_rlaif.torch_weights import named_tensors, to_arrays
from vla_rlaif.types import Observation
from vla_rlaif.warm_start_config import ImitateConfig

DEMOS = 64
TEACHER = np.random.default_rng(1).normal(size=(X, S * E))
ACTION = np.tanh(observations(DEMOS, 0).state @ TEACHER).reshape(DEMOS, S, E).astype(np.float32)


def fit(policy: MlpPolicy | None = None, **config):
    settings = {"steps": 4, "batch": 16, "samples": 1, "lr": 0.01, **config}
    return imitate(policy or MlpPolicy(), observations(DEMOS, 0), ACTION, ImitateConfig(**settings), seed=0)


def start() -> dict[str, np.ndarray]:
    return to_arrays(named_tensors(MlpPolicy().module))


def distance(a, b) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def changed(a, b) -> set[str]:
    return {name for name in a if (a[name] != b[name]).any()}


def test_it_learns_and_leaves_the_policy_alone():
    policy, losses, sizes = MlpPolicy(), [], []
    config = ImitateConfig(steps=120, batch=16, samples=1, lr=0.03)
    fitted = imitate(
        policy,
        observations(DEMOS, 0),
        ACTION,
        config,
        seed=0,
        on_start=lambda *both: sizes.append(both),
        on_step=lambda step, loss: losses.append((step, loss)),
    )
    assert [step for step, _ in losses] == [50, 100, 120]
    assert losses[-1][1] < 0.3 * losses[0][1]
    assert sizes == [(X * 8 + 8 + 8 * 8 + 8 + 8 + 8 + 8 * 6 + 6, 2 + 3 * 2 + 3)]
    assert not changed(to_arrays(named_tensors(policy.module)), start())
    assert changed(fitted, start()) == policy.imitable
    policy.load(fitted, 0)


def test_both_backends_agree_step_by_step():
    spec, rng = PointReach(1).spec, np.random.default_rng(0)
    obs = Observation(images={}, state=rng.normal(size=(64, 4)).astype(np.float32), instruction=("",) * 64)
    action = np.tanh(rng.normal(size=(64, 1, 2))).astype(np.float32)
    config = ImitateConfig(steps=100, batch=16, micro_batches=2, lr=0.05, warmup=10, weight_decay=0.1, devices=1)
    losses = {"jax": [], "torch": []}
    note = {name: lambda step, loss, to=to: to.append(loss) for name, to in losses.items()}
    ours = imitate(GaussianTorch(GaussianConfig(), spec), obs, action, config, seed=3, on_step=note["torch"])
    theirs = jax_imitate(GaussianJax(GaussianConfig(), spec), obs, action, config, seed=3, on_step=note["jax"])
    assert losses["torch"] == pytest.approx(losses["jax"], rel=1e-5)
    assert distance(ours, dict(theirs)) < 1e-5


def test_the_schedule_is_the_one_of_the_jax_side():
    for warmup, steps in ((0, 10), (3, 10)):
        theirs = optax.warmup_cosine_decay_schedule(0.0, 2.0, warmup, steps)
        ours = [2.0 * cosine(i, warmup, steps) for i in range(steps)]
        np.testing.assert_allclose(ours, [float(np.asarray(theirs(i))) for i in range(steps)], atol=1e-6)


def test_micro_batches_give_the_same_weights():
    """The loss has no noise here: otherwise each micro-batch draws its own."""
    assert distance(fit(micro_batches=4), fit()) < 2e-6


def test_micro_batches_and_seeds_draw_different_noise():
    """All rows are the same one: with equal draws, the first step of 4 micro-batches would be that of a single row."""
    obs = Observation(images={}, state=np.ones((4, X), np.float32), instruction=("",) * 4)
    action = np.ones((4, S, E), np.float32)

    def one_step(rows: int, seed: int):
        config = ImitateConfig(steps=1, batch=rows, micro_batches=rows, samples=1, lr=0.01)
        return imitate(MlpPolicy(noise=1.0), obs, action, config, seed=seed)

    assert distance(one_step(1, 0), one_step(4, 0)) > 1e-4
    assert distance(one_step(1, 0), one_step(1, 1)) > 1e-4
    assert distance(one_step(4, 0), one_step(4, 0)) == 0


def test_every_setting_of_the_optimiser_has_an_effect():
    """A first step of Adam is lr x sign of the gradient, of which the average takes 0.01; warm-up starts it at 0."""
    still = fit(steps=1, warmup=0)
    assert distance(still, start()) == pytest.approx(1e-4, rel=1e-2)
    assert 0 < distance(fit(warmup=3), start()) < 0.7 * distance(fit(), start())
    assert changed(fit(steps=1, weight_decay=1.0), still) == {"stem.weight", "block.0.weight", "head.weight"}


def test_frozen_parameters_stay():
    fitted = fit(steps=1, frozen=("stem*", "*bias"))
    assert changed(fitted, start()) == {"block.0.weight", "block.1.weight", "head.weight"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 65}, r"64 demonstrated steps are fewer than imitate\.batch 65"),
        ({"devices": 2}, r"imitate\.devices is 2; a torch policy imitates on one"),
        ({"frozen": ("stem",)}, r"frozen 'stem' matches none of the 10 parameters \(block\.0\.bias, "),
        ({"frozen": ("*",)}, "leaves no parameter to fit"),
    ],
)
def test_what_cannot_be_done_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(**settings)


def test_a_policy_that_cannot_imitate_is_told_so():
    from vla_rlaif.torch_imitation import imitable

    with pytest.raises(ValueError, match="Linear cannot imitate: it has no imitable"):
        imitable(torch.nn.Linear(1, 1))
