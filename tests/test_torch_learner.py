"""What only the torch learner has: a copy that shares what is frozen, values changed in place, its optimiser.

What it shares with the JAX learner is in test_learners.py, several ranks are in test_torch_ranks.py.
"""

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from mlp_policy import MlpPolicy, X, make_anchor, make_batch

from vla_rlaif.config import LearnerConfig
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.grpo import GRPO
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.torch_imitation import TorchImitable
from vla_rlaif.torch_learner import TorchLearner, TorchPolicy
from vla_rlaif.torch_training import adamw, clipped_step
from vla_rlaif.torch_weights import load_strictly, named_tensors, to_arrays

ALGORITHM = GRPO(group_size=8, kl_coef=0.05)
TRAINED = {"block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias", "head.weight", "head.bias"}


def make_learner(policy: MlpPolicy | None = None, anchor=None, **config) -> TorchLearner:
    settings = {"lr": 2e-3, "epochs": 3, "minibatch": 16, "target_kl": None, "ema": 0.75, **config}
    return TorchLearner(policy or MlpPolicy(), ALGORITHM, LearnerConfig(**settings), anchor)


def arrays(policy: MlpPolicy) -> dict[str, np.ndarray]:
    return to_arrays(named_tensors(policy.module))


def test_policies_have_what_the_learner_needs():
    for policy in (MlpPolicy(), GaussianTorch(GaussianConfig(), PointReach(1).spec)):
        assert isinstance(policy, TorchPolicy) and isinstance(policy, TorchImitable)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_without_a_step_the_ratio_is_exactly_one(micro_batches, compute):
    """Log-probs that acted come from a pass without gradients, with a stem that ran ahead: the same bits."""
    learner = make_learner(MlpPolicy(compute=compute), lr=1e-30, micro_batches=micro_batches)
    log = learner.update(make_batch(45, 0), seed=0)
    assert log["updates"] == 9
    assert (log["ratio_error"], log["policy_kl"], log["reference_kl"]) == (0.0, 0.0, 0.0)


def test_computing_in_bfloat16_leaves_log_probs_parameters_and_moments_in_float32():
    learner = make_learner(MlpPolicy(compute="bfloat16"))
    log, wide = learner.update(make_batch(45, 0), seed=0), make_learner().update(make_batch(45, 0), seed=0)
    assert log["loss"] == pytest.approx(wide["loss"], abs=0.02) and log["loss"] != wide["loss"]
    assert {v.dtype for k, v in learner.state().items() if "/" in k} == {np.dtype(np.float32)}


def test_the_stem_runs_once_a_batch():
    """45 rows are 3 minibatches of 4 micro-batches: 12 runs for actor, reference and all 3 epochs together."""
    policy, runs = MlpPolicy(), []
    policy.module.stem.register_forward_hook(lambda *_: runs.append(1))
    assert make_learner(policy, micro_batches=4).update(make_batch(45, 0), seed=0)["updates"] == 9
    assert len(runs) == 12


def test_what_is_frozen_is_shared_and_what_is_trained_is_not():
    policy = MlpPolicy()
    start, learner = arrays(policy), make_learner(policy)
    handed = {"weights": learner.weights(), "averaged": learner.weights(averaged=True), "state": learner.state()}
    kept = {name: {k: v.copy() for k, v in values.items()} for name, values in handed.items()}
    learner.update(make_batch(40, 0), seed=0)
    for name, values in kept.items():
        for key, value in values.items():
            np.testing.assert_array_equal(handed[name][key], value, err_msg=f"{name} {key}")
    for name, value in arrays(policy).items():
        np.testing.assert_array_equal(value, start[name], err_msg=name)
    weights = learner.weights()
    assert weights.keys() == start.keys()
    assert {name for name in start if (weights[name] != start[name]).any()} == TRAINED | {"log_std"}
    assert np.shares_memory(weights["stem.weight"], policy.module.stem.weight.detach().numpy())
    assert not policy.module.stem.weight.requires_grad and policy.module.head.weight.grad is None


def test_weights_load_into_a_policy_that_shares_the_frozen_part():
    policy, other = MlpPolicy(), MlpPolicy()
    learner = make_learner(policy)
    learner.update(make_batch(40, 0), seed=0)
    for each in (policy, other):
        each.load(learner.weights(), 1)
        for name, value in arrays(each).items():
            np.testing.assert_array_equal(value, learner.weights()[name], err_msg=name)


def test_the_average_trails_the_weights():
    """ema 0.75: average = 0.75 start + 0.25 new after one update."""
    learner = make_learner()
    start = learner.weights()
    learner.update(make_batch(40, 0), seed=0)
    new = learner.weights()
    for name, value in learner.weights(averaged=True).items():
        np.testing.assert_allclose(value, 0.75 * start[name] + 0.25 * new[name], atol=1e-6)


def test_the_reference_stays_where_the_policy_began():
    learner = make_learner(lr=0.005)
    start = learner.weights()
    logs = [learner.update(make_batch(40, seed), seed=seed) for seed in range(3)]
    assert logs[0]["reference_kl"] < logs[1]["reference_kl"] < logs[2]["reference_kl"]
    for name, value in learner.state().items():
        if name.startswith("reference/"):
            np.testing.assert_array_equal(value, start[name.removeprefix("reference/")])


def test_micro_batches_give_the_same_numbers():
    learners = [make_learner(micro_batches=n, anchor=make_anchor()) for n in (1, 4)]
    for seed in range(3):
        logs = [each.update(make_batch(45, seed, is_stale=True), seed=seed) for each in learners]
        assert logs[1] == pytest.approx(logs[0], rel=1e-5, abs=1e-6)
    for name, value in learners[0].weights().items():
        np.testing.assert_allclose(learners[1].weights()[name], value, atol=2e-6, err_msg=name)


def test_micro_batches_bound_what_the_backward_pass_keeps():
    """With 4 micro-batches about a quarter of the activations exist at a time, and in the end none. Of a row at least
    the outputs of the stem, the layer, its normalisation and the activation are kept: 4 x 8 numbers."""

    def most(micro_batches: int) -> int:
        live, peak, learner = [0], [0], make_learner(micro_batches=micro_batches, minibatch=256, epochs=1)

        def pack(value: torch.Tensor) -> Callable[[], torch.Tensor]:
            kept = value.detach()  # with its history, the graph would keep itself alive
            unpack = lambda: kept  # noqa: E731
            if value.ndim and len(value) == 256 // micro_batches:
                live[0] += value.nbytes
                peak[0] = max(peak[0], live[0])
                weakref.finalize(unpack, lambda size=value.nbytes: live.__setitem__(0, live[0] - size))
            return unpack

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda unpack: unpack()):
            learner.update(make_batch(256, 0), seed=0)
        assert live == [0]
        return peak[0]

    assert 64 * 4 * 8 * 4 <= most(4) < 0.3 * most(1)


def test_a_parameter_that_no_loss_uses_only_decays():
    """0 gradient, so Adam does not move it; decay takes lr x decay = 0.1 x 0.5 of a kernel at each of 3 updates. As
    torch names them, ``spare`` is no kernel."""
    log = (learner := make_learner(lr=0.1, weight_decay=0.5)).update(make_batch(16, 0), seed=0)
    assert log["updates"] == 3
    np.testing.assert_array_equal(learner.weights()["spare"], np.ones((3, 2)))
    assert {k for k in learner.state() if k.startswith("optimizer/spare/")} == {
        f"optimizer/spare/{key}" for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_adamw_is_the_published_one_on_kernels():
    """Against AdamW by hand in float64 (https://arxiv.org/abs/1711.05101), the gradient clipped to norm 1."""
    rng = np.random.default_rng(0)
    shapes = {"a.weight": (4, 3), "a.bias": (3,), "norm.weight": (3,), "b.kernel": (2, 3), "unused.weight": (2, 2)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    ours = {k: torch.tensor(v, dtype=torch.float32, requires_grad=True) for k, v in params.items()}
    optimizer = adamw(ours, lr=1.0, weight_decay=0.5)
    mu, nu = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for t in range(1, 6):
        grads = {k: np.zeros(s) if k == "unused.weight" else rng.normal(size=s) for k, s in shapes.items()}
        norm = np.sqrt(sum(np.square(g).sum() for g in grads.values()))
        lr = 0.1 * min(1.0, t / 3)
        for name, g in grads.items():
            g = g / max(1.0, norm)
            mu[name] = 0.9 * mu[name] + 0.1 * g
            nu[name] = 0.999 * nu[name] + 0.001 * g**2
            step = (mu[name] / (1 - 0.9**t)) / (np.sqrt(nu[name] / (1 - 0.999**t)) + 1e-8)
            decay = 0.5 if name in ("a.weight", "b.kernel", "unused.weight") else 0.0
            params[name] = params[name] - lr * (step + decay * params[name])
        for name, value in ours.items():
            value.grad = None if name == "unused.weight" else torch.tensor(grads[name], dtype=torch.float32)
        found = clipped_step(optimizer, ours, lr=lr, max_grad_norm=1.0)
        assert found.item() == pytest.approx(norm, rel=1e-5)
        for name, value in params.items():
            np.testing.assert_allclose(ours[name].detach(), value, atol=1e-5, err_msg=f"{name} {t}")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("angles", torch.zeros(2), persistent=False)


def test_weights_have_tied_parameters_once_and_saved_buffers():
    weights = to_arrays(named_tensors(Tied()))
    assert {name: value.dtype for name, value in weights.items()} == {"words.weight": np.float32, "count": np.int64}
    other = Tied()
    load_strictly(other, {"words.weight": np.full((4, 2), 2.0), "count": np.array(5)})
    assert other.out.weight.sum() == 16 and other.get_buffer("count") == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("head.bias"), r"lack 1 of 11 tensors; they need 'head.bias' of shape \(6,\)"),
        (lambda w: w.update(tail=np.zeros(1)), r"1 tensors that the policy lacks: \['tail'\]"),
        (lambda w: w.update({"spare": np.zeros(6)}), r"need 'spare' of shape \(3, 2\); they have \(6,\)"),
    ],
    ids=["missing", "unexpected", "mis-shaped"],
)
def test_weights_that_do_not_fit_change_nothing(change, message):
    policy = MlpPolicy()
    start = arrays(policy)
    weights = {name: value + 1 for name, value in start.items()}
    change(weights)
    with pytest.raises(ValueError, match=message):
        policy.load(weights, 1)
    for name, value in arrays(policy).items():
        np.testing.assert_array_equal(value, start[name], err_msg=name)


def test_a_frozen_part_in_bfloat16_is_widened_on_its_way_out():
    policy = MlpPolicy()
    policy.module.stem.to(torch.bfloat16)
    policy.prepare = lambda inputs: {**inputs, "features": torch.zeros(len(inputs["x"]), 8)}
    learner = make_learner(policy)
    learner.update(make_batch(16, 0), seed=0)
    stem = learner.weights()["stem.weight"]
    assert stem.dtype == np.float32
    np.testing.assert_array_equal(stem, policy.module.stem.weight.detach().float())


def test_policies_that_cannot_be_trained_are_refused():
    policy = MlpPolicy()
    policy.module.head.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be float32.*2 are not: head\.bias \(torch\.bfloat16\)"):
        make_learner(policy)
    policy = MlpPolicy()
    policy.module.block.train()
    with pytest.raises(ValueError, match=r"training mode, in which dropout .* call eval\(\)"):
        make_learner(policy)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"minibatch": 15, "micro_batches": 2}, r"learner\.minibatch 15 does not split into 2 micro-batches on 1 dev"),
        ({"micro_batches": 4, "anchor": make_anchor(batch=6)}, r"algorithm\.anchor_batch 6 does not split into 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make_learner(**config)


def test_the_anchor_draws_new_noise_for_every_update_and_the_same_on_resume():
    """With coefficient 0 the anchor moves nothing; its loss is on rows that are all alike, so only noise differs."""
    anchor = make_anchor(0.0)
    obs = type(anchor.obs)(images={}, state=np.ones((40, X), np.float32), instruction=anchor.obs.instruction)
    anchor = type(anchor)(obs=obs, action=np.ones((40, 2, 3), np.float32), coef=0.0, batch=8)
    losses = [
        [make_learner(MlpPolicy(noise=1.0), anchor, epochs=e).update(make_batch(16, 0), seed=s)["anchor_loss"]]
        for s, e in ((0, 1), (0, 1), (1, 1), (0, 2))
    ]
    assert losses[0] == losses[1] and losses[0] != losses[2] and losses[0] != losses[3]
