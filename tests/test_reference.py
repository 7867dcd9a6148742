"""The reference's means from outside the learner: the update is the same to the bit."""

from dataclasses import replace

import mlp_policy
import numpy as np
import pytest
import stem_policy
import torch

from vla_rlaif.config import LearnerConfig
from vla_rlaif.grpo import GRPO
from vla_rlaif.jax_learner import JaxLearner
from vla_rlaif.jax_reference import JaxReference
from vla_rlaif.learning import divide, padded_rows, share
from vla_rlaif.torch_learner import TorchLearner
from vla_rlaif.torch_reference import TorchReference

CONFIG = LearnerConfig(lr=1e-2, epochs=2, minibatch=16, micro_batches=2, target_kl=None, devices=1)
ALGORITHM = GRPO(group_size=4, kl_coef=0.1)
NUM = 27  # decisions: 2 minibatches, and a last micro-batch of 3 rows


def jax_parts():
    policy = stem_policy.StemPolicy()
    return policy, JaxLearner(policy, ALGORITHM, CONFIG), JaxReference(policy, CONFIG), stem_policy.make_batch


def torch_parts():
    policy = mlp_policy.MlpPolicy()
    return policy, TorchLearner(policy, ALGORITHM, CONFIG), TorchReference(policy, CONFIG), mlp_policy.make_batch


@pytest.mark.parametrize("parts", [jax_parts, torch_parts])
def test_an_update_with_given_means_is_the_same_to_the_bit(parts):
    (_, alone, _, make_batch), (_, helped, reference, _) = parts(), parts()
    for seed in range(2):  # in the second update policy and reference differ
        batch = make_batch(NUM, seed)
        means = reference.means(batch.obs, batch.trace, batch.executed)
        assert means.shape == (NUM, 2, 3)
        assert alone.update(batch, seed) == helped.update(replace(batch, reference=means), seed)
    for name, value in alone.state().items():
        np.testing.assert_array_equal(helped.state()[name], value)


@pytest.mark.parametrize("parts", [jax_parts, torch_parts])
def test_means_do_not_depend_on_who_else_is_asked(parts):
    """Rows are computed as many at a time as a micro-batch has, so shards of whole micro-batches give the same bits."""
    _, _, reference, make_batch = parts()
    batch = make_batch(NUM, 0)
    whole = reference.means(batch.obs, batch.trace, batch.executed)
    rows = slice(16, NUM)
    obs = replace(batch.obs, state=batch.obs.state[rows], instruction=batch.obs.instruction[rows])
    part = reference.means(obs, {k: v[rows] for k, v in batch.trace.items()}, batch.executed[rows])
    np.testing.assert_array_equal(part, whole[rows])


@pytest.mark.parametrize("parts", [jax_parts, torch_parts])
def test_no_decision_has_no_means(parts):
    _, _, reference, make_batch = parts()
    batch = make_batch(NUM, 0)
    obs = replace(batch.obs, state=batch.obs.state[:0], instruction=())
    assert reference.means(obs, {k: v[:0] for k, v in batch.trace.items()}, batch.executed[:0]).shape == (0, 0, 0)


def test_the_reference_stays_what_the_run_started_from():
    policy, learner, reference, make_batch = torch_parts()
    batch = make_batch(NUM, 0)
    before = reference.means(batch.obs, batch.trace, batch.executed)
    learner.update(batch, 0)
    np.testing.assert_array_equal(reference.means(batch.obs, batch.trace, batch.executed), before)
    with torch.no_grad():
        x = {"features": torch.tanh(policy.module.stem(torch.tensor(batch.obs.state)))}
        np.testing.assert_allclose(before, policy.means(x).numpy(), atol=1e-6)


def test_rows_are_padded_by_the_last_one():
    assert [(index.tolist(), num) for index, num in padded_rows(5, 3)] == [([0, 1, 2], 3), ([3, 4, 4], 2)]


def test_the_shares_of_all_ranks_make_up_the_work():
    """8 rows of a micro-batch on 2 ranks: the first 4 and the last 4, anchors likewise."""
    policy, batch, anchor = (
        mlp_policy.MlpPolicy(),
        mlp_policy.make_batch(NUM, 0, is_stale=True),
        mlp_policy.make_anchor(),
    )
    batch = replace(batch, reference=np.random.default_rng(0).normal(size=(NUM, 2, 3)).astype(np.float32))
    inputs, steps = policy.inputs(batch.obs, batch.trace, batch.executed), policy.imitation_inputs(anchor.obs)
    works = [divide(inputs, batch, 0, CONFIG, anchor, steps) for _ in range(3)]
    whole, *shares = [works[0], share(works[1], 0, 2), share(works[2], 1, 2)]
    for minibatch, *parts in zip(whole.minibatches, *(s.minibatches for s in shares), strict=True):
        for rows, *mine in zip(minibatch, *parts, strict=True):
            for name in ("advantage", "mask", "logp_acted", "reference"):
                joined = np.concatenate([getattr(one, name) for one in mine])
                np.testing.assert_array_equal(joined, getattr(rows, name))
            for name, value in rows.inputs.items():
                np.testing.assert_array_equal(np.concatenate([one.inputs[name] for one in mine]), value)
    chunks = [next(one.anchors) for one in (whole, *shares)]
    for drawn, *mine in zip(*chunks, strict=True):
        np.testing.assert_array_equal(np.concatenate([one.action for one in mine]), drawn.action)
    assert shares[0].orders == shares[1].orders == whole.orders
