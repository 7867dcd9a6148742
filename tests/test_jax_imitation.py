import numpy as np
import pytest
from compilation import little_optimised
from stem_policy import E, S, StemPolicy, X, observations

from vla_rlaif.devices import CompileCounter
from vla_rlaif.jax_imitation import imitate
from vla_rlaif.jax_learner import JaxImitable
from vla_rlaif.learning import fitted_names
from vla_rlaif.types import Observation
from vla_rlaif.warm_start_config import ImitateConfig

DEMOS = 64
TEACHER = np.random.default_rng(1).normal(size=(X, S * E))
ACTION = np.tanh(observations(DEMOS, 0).state @ TEACHER).reshape(DEMOS, S, E).astype(np.float32)


def fit(policy: StemPolicy | None = None, **config):
    settings = {"steps": 4, "batch": 16, "samples": 1, "lr": 0.01, **config}
    return imitate(policy or StemPolicy(), observations(DEMOS, 0), ACTION, ImitateConfig(**settings), seed=0)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with little_optimised():
        yield


@pytest.fixture(scope="module")
def plain():
    return fit(StemPolicy(noise=0.0))


def distance(a, b) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def test_it_learns_compiles_once_and_leaves_the_policy_alone():
    policy, losses, sizes, counter = StemPolicy(noise=0.0), [], [], CompileCounter()
    assert isinstance(policy, JaxImitable)
    fitted = imitate(
        policy,
        observations(DEMOS, 0),
        ACTION,
        ImitateConfig(steps=120, batch=16, samples=1, lr=0.03),
        seed=0,
        on_start=lambda trained, frozen: sizes.append((trained, frozen)),
        on_step=lambda step, loss: losses.append((step, loss, counter.count)),
    )
    assert [step for step, _, _ in losses] == [50, 100, 120]
    assert losses[-1][1] < 0.3 * losses[0][1]
    assert 0 < losses[0][2] == losses[-1][2]
    assert sizes == [(5 * 8 + 8 * 8 + 8 + 8 * 6, 0)]
    start = StemPolicy().params
    for name, value in policy.params.items():
        np.testing.assert_array_equal(value, start[name], err_msg=name)
    assert all((fitted[name] != start[name]).any() for name in start)


def test_micro_batches_give_the_same_weights(plain):
    """The loss has no noise here: otherwise each micro-batch draws its own."""
    assert distance(fit(StemPolicy(noise=0.0), micro_batches=4), plain) < 2e-6


def test_micro_batches_draw_different_noise():
    """All rows are the same one: with equal draws, the first step of 4 micro-batches would be that of a single row."""
    obs = Observation(images={}, state=np.ones((4, X), np.float32), instruction=("",) * 4)
    action = np.ones((4, S, E), np.float32)
    configs = [ImitateConfig(steps=1, batch=n, micro_batches=n, samples=1, lr=0.01) for n in (1, 4)]
    one, four = (imitate(StemPolicy(), obs, action, config, seed=0) for config in configs)
    assert distance(one, four) > 1e-4


def test_every_setting_of_the_optimiser_has_an_effect(plain):
    """A first step of Adam is lr x sign of the gradient, of which the average takes 0.01; warm-up starts it at 0."""
    start = {name: np.asarray(value) for name, value in StemPolicy().params.items()}
    still = fit(StemPolicy(noise=0.0), steps=1, warmup=0)
    assert distance(still, start) == pytest.approx(1e-4, rel=1e-2)
    warming = fit(StemPolicy(noise=0.0), steps=4, warmup=3)
    assert 0 < distance(warming, start) < 0.7 * distance(plain, start)
    decayed = fit(StemPolicy(noise=0.0), steps=1, weight_decay=1.0)
    changed = {name for name in start if (decayed[name] != still[name]).any()}
    assert changed == {"stem/kernel", "body/kernel", "head/kernel"}


def test_frozen_parameters_stay_and_are_not_returned():
    sizes = []
    config = ImitateConfig(steps=1, batch=16, samples=1, frozen=("stem*", "*bias"))
    fitted = imitate(
        StemPolicy(), observations(DEMOS, 0), ACTION, config, seed=0, on_start=lambda *both: sizes.append(both)
    )
    assert set(fitted) == {"body/kernel", "head/kernel"}
    assert sizes == [(8 * 8 + 8 * 6, 5 * 8 + 8)]


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (("stem",), r"frozen 'stem' matches none of the 4 parameters \(body/bias, body/kernel, head/kernel, \.\.\.\)"),
        (("stem*", "BlockTransformer_0"), "'BlockTransformer_0' matches none"),
        (("*",), "leaves no parameter to fit"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(frozen, message):
    with pytest.raises(ValueError, match=message):
        fitted_names(StemPolicy().params, StemPolicy().imitable, frozen)


def test_a_pattern_may_name_what_is_not_fitted_anyway():
    imitable = frozenset({"head/kernel", "body/bias"})
    assert fitted_names(StemPolicy().params, imitable, ("stem/*", "head/*")) == ["body/bias"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batch": 6, "micro_batches": 4}, "batch 6 does not split into 4 micro-batches"),
        ({"steps": 5, "warmup": 5}, "warmup 5 leaves none of the 5 steps"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        ImitateConfig(**config)


def test_too_few_demonstrations_are_refused():
    with pytest.raises(ValueError, match=r"64 demonstrated steps are fewer than imitate\.batch 65"):
        fit(batch=65)
