"""What only the JAX learner has: buffers that are overwritten, a prepared batch, a micro-batch loop, its optimiser.

What it shares with the torch learner is in test_learners.py, several devices are in test_devices.py.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stem_policy import StemPolicy, make_batch

from vla_rlaif.config import LearnerConfig
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.grpo import GRPO
from vla_rlaif.jax_learner import JaxLearner, JaxPolicy, adamw
from vla_rlaif.policies.gaussian_jax import GaussianJax
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.types import Weights

GOLDEN = Path(__file__).parent / "golden" / "octo"
ALGORITHM = GRPO(group_size=8, kl_coef=0.05)


def make_learner(policy: StemPolicy, **config) -> JaxLearner:
    settings = {"lr": 2e-3, "epochs": 3, "minibatch": 16, "target_kl": None, "ema": 0.75, **config}
    return JaxLearner(policy, ALGORITHM, LearnerConfig(**settings))


@dataclass
class Shared:
    """A learner with 4 micro-batches, back at its start; compiled once for the tests of this file."""

    learner: JaxLearner
    policy: StemPolicy
    stem_runs: list[int]


@pytest.fixture(scope="module")
def compiled() -> tuple[Shared, Weights]:
    runs: list[int] = []
    policy = StemPolicy(on_prepare=lambda: runs.append(1))
    made = make_learner(policy, micro_batches=4)
    return Shared(made, policy, runs), made.state()


@pytest.fixture
def shared(compiled: tuple[Shared, Weights]) -> Shared:
    found, start = compiled
    found.learner.restore(start)
    return found


def test_both_policies_are_jax_policies():
    assert isinstance(StemPolicy(), JaxPolicy)
    assert isinstance(GaussianJax(GaussianConfig(), PointReach(1).spec), JaxPolicy)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_without_a_step_the_ratio_is_exactly_one(micro_batches):
    """The log-probs that acted come from another program than the loss, with a stem that ran ahead: the same bits.
    So do the reference's means."""
    log = make_learner(StemPolicy(), lr=1e-30, micro_batches=micro_batches).update(make_batch(45, 0), seed=0)
    assert log["updates"] == 9
    assert (log["ratio_error"], log["policy_kl"], log["reference_kl"]) == (0.0, 0.0, 0.0)


def test_the_stem_runs_once_a_batch(shared):
    """45 rows are 3 minibatches of 4 micro-batches: 12 runs for actor, reference and all 3 epochs together."""
    shared.stem_runs.clear()
    assert shared.learner.update(make_batch(45, 0), seed=0)["updates"] == 9
    jax.effects_barrier()
    assert len(shared.stem_runs) == 12


def test_weights_and_states_outlive_the_updates_after_them(shared):
    """An update overwrites device buffers; what was handed out, what was restored from and the policy's own arrays
    are not among them."""
    learner, policy = shared.learner, shared.policy
    before = {name: np.array(value) for name, value in StemPolicy().params.items()}
    learner.update(make_batch(40, 0), seed=0)
    handed = {"weights": learner.weights(), "averaged": learner.weights(averaged=True), "state": learner.state()}
    kept = {name: {k: np.array(v) for k, v in values.items()} for name, values in handed.items()}
    ends = []
    for _ in range(2):
        learner.restore(handed["state"])
        learner.update(make_batch(40, 1), seed=1)
        learner.update(make_batch(40, 2), seed=2)
        ends.append(learner.weights())
    for name, values in kept.items():
        for key, value in values.items():
            np.testing.assert_array_equal(handed[name][key], value, err_msg=f"{name} {key}")
    for name, value in policy.params.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert all((ends[0][name] != before[name]).any() for name in policy.trainable)
    np.testing.assert_array_equal(ends[0]["stem/kernel"], before["stem/kernel"])
    for name, value in ends[0].items():
        np.testing.assert_array_equal(ends[1][name], value, err_msg=name)


def test_the_average_trails_the_weights(shared):
    """ema 0.75: average = 0.75 start + 0.25 new after one update."""
    start = shared.learner.weights()
    shared.learner.update(make_batch(40, 0), seed=0)
    new = shared.learner.weights()
    for name, value in shared.learner.weights(averaged=True).items():
        np.testing.assert_allclose(value, 0.75 * start[name] + 0.25 * new[name], atol=1e-6)


def test_nothing_is_compiled_after_the_first_update(shared):
    """The rows vary: 45 are 3 minibatches with padding, 16 are exactly one, 3 leave whole micro-batches empty."""
    learner = shared.learner
    learner.update(make_batch(45, 0), seed=0)
    first = learner.compilations
    assert first > 0
    for seed, rows in enumerate((45, 16, 33, 3, 100)):
        learner.update(make_batch(rows, seed), seed=seed)
        for averaged in (True, False):
            learner.weights(averaged=averaged)
        learner.restore(learner.state())
    assert learner.compilations == first


def test_more_micro_batches_run_the_same_programs():
    """A program per micro-batch of 4 rows, however many: neither memory nor compile time grows with them."""
    compiled = []
    for num in (1, 4):
        learner = make_learner(StemPolicy(), minibatch=4 * num, micro_batches=num)
        learner.update(make_batch(4 * num, 0), seed=0)
        compiled.append(learner.compilations)
    assert compiled[0] == compiled[1] > 0


def test_micro_batches_give_the_same_numbers(shared):
    whole = make_learner(StemPolicy())
    for seed in range(3):
        logs = [each.update(make_batch(45, seed), seed=seed) for each in (whole, shared.learner)]
        for name, value in logs[0].items():
            assert logs[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, value in whole.weights().items():
        np.testing.assert_allclose(shared.learner.weights()[name], value, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"minibatch": 15, "micro_batches": 2}, r"learner\.minibatch 15 does not split into 2 micro-batches on 1"),
        ({"devices": 1000}, r"devices is 1000, but this process has 1 \(cpu\); use fewer"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make_learner(StemPolicy(), **config)


def test_adamw_is_the_published_one_on_kernels():
    """Against AdamW by hand in float64 (https://arxiv.org/abs/1711.05101), the gradient clipped to norm 1."""
    rng = np.random.default_rng(0)
    shapes = {"a/kernel": (4, 3), "a/bias": (3,), "norm/weight": (3,), "b/weight": (2, 3), "pos_embedding": (1, 2)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    ours = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    lr = lambda done: 0.1 * jnp.minimum(1.0, (done + 1) / 3)  # noqa: E731
    optimizer = adamw(lr, max_grad_norm=1.0, weight_decay=0.5)
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    mu, nu = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for t in range(1, 6):
        grads = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        norm = np.sqrt(sum(np.square(g).sum() for g in grads.values()))
        for name, g in grads.items():
            g = g / max(1.0, norm)
            mu[name] = 0.9 * mu[name] + 0.1 * g
            nu[name] = 0.999 * nu[name] + 0.001 * g**2
            step = (mu[name] / (1 - 0.9**t)) / (np.sqrt(nu[name] / (1 - 0.999**t)) + 1e-8)
            decay = 0.5 if name in ("a/kernel", "b/weight") else 0.0
            params[name] = params[name] - 0.1 * min(1.0, t / 3) * (step + decay * params[name])
        updates, state = update({k: jnp.asarray(v, jnp.float32) for k, v in grads.items()}, state, ours)
        ours = {name: ours[name] + updates[name] for name in ours}
        for name, value in params.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-5, err_msg=f"{name} {t}")


def test_one_step_has_the_norms_of_the_original():
    """Octo's first training step: clip 1, AdamW 3e-4, decay 0.1 on kernels, first moment in bfloat16.

    The golden file has six gradients in full and the norms of all; one more parameter stands for the others, so that
    clipping sees the whole norm.
    """
    golden, values = np.load(GOLDEN / "tiny_golden.npz"), np.load(GOLDEN / "tiny_params.npz")
    prefix = "loss/grad/"
    grads = {k.removeprefix(prefix): jnp.asarray(golden[k]) for k in golden.files if k.startswith(prefix)}
    norms = {k.split("/", 2)[2]: float(golden[k]) for k in golden.files if k.startswith("loss/grad_norm/")}
    rest = np.sqrt(sum(norm**2 for name, norm in norms.items() if name not in grads))
    assert len(grads) == 6 and rest > 1.0
    params = {name: jnp.asarray(values[name]) for name in grads} | {"the rest": jnp.zeros(1)}
    grads["the rest"] = jnp.full(1, rest, jnp.float32)
    optimizer = adamw(3e-4, max_grad_norm=1.0, weight_decay=0.1, mu_dtype=jnp.bfloat16)
    state = jax.jit(optimizer.init)(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(d) for d in ("bfloat16", "float32", "int32")}
    updates, _ = jax.jit(optimizer.update)(grads, state, params)
    for name in grads.keys() - {"the rest"}:
        wanted = float(golden[f"optim/update_norm/{name}"])
        assert float(jnp.linalg.norm(updates[name])) == pytest.approx(wanted, rel=1e-4), name
