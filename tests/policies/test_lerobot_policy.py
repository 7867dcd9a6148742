"""A LeRobot policy through the seams of the system: acting, scoring, gradients."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from lerobot_tiny import make_obs, make_smolvla, make_spec

from vla_rlaif.config import LearnerConfig
from vla_rlaif.grpo import GRPO
from vla_rlaif.interfaces import Policy
from vla_rlaif.lerobot_config import AdapterTuning, ExpertTuning, HybridSampler, NoiseSampler, SdeSampler
from vla_rlaif.policies.lerobot.denoisers import Denoiser
from vla_rlaif.policies.lerobot.policy import CONDITION, LeRobotPolicy
from vla_rlaif.torch_imitation import TorchImitable
from vla_rlaif.torch_learner import TorchLearner, TorchPolicy
from vla_rlaif.tune_config import FullTuning
from vla_rlaif.types import Batch, Decision, Observation

SEEDS = np.arange(6, dtype=np.uint32)
SAMPLERS = {"sde": SdeSampler(), "hybrid": HybridSampler(steps=2), "noise": NoiseSampler()}
TUNINGS = {"expert": ExpertTuning(), "lora": AdapterTuning(rank=2), "full": FullTuning()}


def scored(policy: LeRobotPolicy, decision: Decision, executed: int = 3) -> dict[str, torch.Tensor]:
    obs = make_obs(len(decision.action))
    return policy._on_device(policy.inputs(obs, decision.trace, np.full(len(decision.action), executed)))


def take(obs: Observation, row: int) -> Observation:
    return Observation(
        images={k: v[row : row + 1] for k, v in obs.images.items()},
        state=obs.state[row : row + 1],
        instruction=(obs.instruction[row],),
    )


def batch_of(policy: LeRobotPolicy, num: int = 6) -> Batch:
    decision = policy.act(make_obs(num), np.arange(num, dtype=np.uint32))
    rng = np.random.default_rng(0)
    return Batch(
        obs=make_obs(num),
        trace=decision.trace,
        executed=rng.integers(1, 4, num),
        advantage=rng.normal(size=num).astype(np.float32),
        mask=np.ones(num, bool),
        num_valid=float(num),
    )


def test_it_fulfils_every_protocol():
    policy = make_smolvla()
    assert isinstance(policy, Policy) and isinstance(policy, TorchPolicy) and isinstance(policy, TorchImitable)
    assert isinstance(policy._denoiser, Denoiser)
    assert not any(module.training for module in policy.module.modules())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_depends_on_its_own_seed_only(sampler):
    policy, obs = make_smolvla(sampler=SAMPLERS[sampler]), make_obs(6)
    together = policy.act(obs, SEEDS)
    for row in (0, 4):
        alone = policy.act(take(obs, row), SEEDS[row : row + 1])
        np.testing.assert_allclose(alone.action[0], together.action[row], atol=1e-5)
        np.testing.assert_array_equal(alone.trace["step"][0], together.trace["step"][row])
    again = policy.act(obs, SEEDS)
    np.testing.assert_array_equal(again.action, together.action)
    other = policy.act(obs, SEEDS + 100)
    assert np.abs(other.action - together.action).min(axis=(1, 2)).max() > 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_scoring_a_chain_gives_what_acting_gave(sampler):
    policy = make_smolvla(sampler=SAMPLERS[sampler])
    decision = policy.act(make_obs(6), SEEDS)
    inputs = scored(policy, decision)
    with torch.no_grad():
        logp, none = policy.score(inputs, None)
        kl = policy.score(inputs, policy.means(inputs))[1]
    assert none is None and kl is not None and logp.dtype == torch.float32
    np.testing.assert_allclose(logp.numpy(), decision.logp, atol=2e-4)
    np.testing.assert_array_equal(kl.numpy(), 0)
    assert decision.logp.shape == (6, {"sde": 4, "hybrid": 2, "noise": 4}[sampler])


def test_members_that_see_the_same_share_a_prefix_pass(monkeypatch):
    """Six rows, two views: two rows go through the prefix, and every row acts as it would alone."""
    policy, obs = make_smolvla(), make_obs(2)
    same = Observation(
        images={k: v[[0, 1, 0, 0, 1, 1]] for k, v in obs.images.items()},
        state=obs.state[[0, 1, 0, 0, 1, 1]],
        instruction=tuple(obs.instruction[i] for i in (0, 1, 0, 0, 1, 1)),
    )
    sizes = []
    kind = type(policy._denoiser)
    original = kind.condition

    def counted(self, batch):
        sizes.append(len(next(iter(batch.values()))))
        return original(self, batch)

    monkeypatch.setattr(kind, "condition", counted)
    together = policy.act(same, SEEDS)
    assert sizes == [2]
    for row in range(6):
        view = (0, 1, 0, 0, 1, 1)[row]
        alone = policy.act(take(obs, view), SEEDS[row : row + 1])
        np.testing.assert_allclose(alone.action[0], together.action[row], atol=1e-5)


def test_log_density_by_hand():
    """One decision: the sum over executed steps of the normal density of what each step added, in float64."""
    policy = make_smolvla(logp_reduction="sum")
    decision = policy.act(make_obs(6), SEEDS)
    inputs = scored(policy, decision, executed=2)
    with torch.no_grad():
        logp, _ = policy.score(inputs, None)
        mean = policy.means(inputs).double().reshape(6, 4, 3, 4)
    std = torch.tensor([0.25, 0.1875, 0.0625, 1 / 48], dtype=torch.float64).sqrt()[:, None, None]
    density = torch.distributions.Normal(mean, std).log_prob(torch.from_numpy(decision.trace["chain"])[:, 1:].double())
    torch.testing.assert_close(logp.double(), density[:, :, :2].sum((2, 3)), atol=1e-4, rtol=1e-5)


def test_padded_dims_are_scored_or_dropped():
    exact, sliced = make_smolvla(logp_reduction="sum"), make_smolvla(logp_reduction="sum", padded_dims="drop")
    decision = exact.act(make_obs(6), SEEDS)
    with torch.no_grad():
        every, some = (p.score(scored(p, decision), None)[0] for p in (exact, sliced))
        mean = exact.means(scored(exact, decision)).reshape(6, 4, 3, 4)
    std = torch.tensor([0.25, 0.1875, 0.0625, 1 / 48]).sqrt()[:, None, None]
    padded = torch.distributions.Normal(mean, std).log_prob(torch.from_numpy(decision.trace["chain"])[:, 1:])[..., 2:]
    torch.testing.assert_close(every - some, padded.sum((2, 3)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_gradients_do_not_depend_on_folding(sampler):
    gradients = []
    for fold in (None, 1, 3):
        policy = make_smolvla(sampler=SAMPLERS[sampler], fold=fold, tune=FullTuning())
        decision = policy.act(make_obs(6), SEEDS)
        logp, _ = policy.score(scored(policy, decision), None)
        weights = torch.linspace(-1, 1, logp.numel()).reshape(logp.shape)
        (logp * weights).sum().backward()
        gradients.append({k: v.grad for k, v in policy.module.named_parameters() if v.grad is not None})
    largest = max(g.abs().max() for g in gradients[0].values())
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        for name, value in gradients[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6 * largest.item(), msg=name)


@pytest.mark.parametrize("tune", TUNINGS)
def test_all_that_is_trained_has_a_gradient_and_nothing_else(tune):
    policy = make_smolvla(tune=TUNINGS[tune], sampler=NoiseSampler())
    with torch.no_grad():  # what starts at 0 would hide what is behind it
        for name, value in policy.module.named_parameters():
            if "lora_B" in name or name == "noise.write.weight":
                value.fill_(0.1)
    decision = policy.act(make_obs(6), SEEDS)
    policy.score(scored(policy, decision), None)[0].sum().backward()
    moved = {k for k, v in policy.module.named_parameters() if v.grad is not None and v.grad.abs().max() > 0}
    assert moved == policy.trainable
    assert policy.trainable and (tune != "expert" or not any("vlm.model" in name for name in policy.trainable))


def test_imitation_reaches_all_that_it_fits():
    policy = make_smolvla()
    for name, value in policy.module.named_parameters():
        value.requires_grad_(name in policy.imitable)
    action = torch.rand(6, 3, 2) - 0.5
    inputs = policy._on_device(policy.imitation_inputs(make_obs(6)))
    loss = policy.imitation_loss(inputs, action, torch.Generator().manual_seed(0), 3)
    again = policy.imitation_loss(inputs, action, torch.Generator().manual_seed(0), 3)
    assert loss.item() == again.item()
    loss.backward()
    moved = {k for k, v in policy.module.named_parameters() if v.grad is not None and v.grad.abs().max() > 0}
    assert moved == policy.imitable


@pytest.mark.parametrize("tune", TUNINGS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_prepared_prefix_changes_nothing(tune, sampler):
    policy = make_smolvla(tune=TUNINGS[tune], sampler=SAMPLERS[sampler])
    decision = policy.act(make_obs(6), SEEDS)
    inputs = scored(policy, decision)
    with torch.no_grad():
        ready = policy.prepare(inputs)
        logp, again = policy.score(inputs, None)[0], policy.score(ready, None)[0]
    torch.testing.assert_close(again, logp, rtol=0, atol=0)
    assert any(name.startswith(CONDITION) for name in ready) == (tune != "full")
    assert tune == "full" or not any(name.startswith("image/") for name in ready)


@pytest.mark.parametrize("settings", [{}, {"compute": "bfloat16"}, {"checkpointing": True}], ids=str)
@pytest.mark.parametrize("tune", ["expert", "full"])
def test_without_a_step_the_ratio_is_exactly_one(tune, settings):
    policy = make_smolvla(tune=TUNINGS[tune], **settings)
    algorithm = GRPO(group_size=2, clip_low=0.02, clip_high=0.02, kl_coef=0.1)
    learner = TorchLearner(policy, algorithm, LearnerConfig(lr=1e-30, epochs=2, minibatch=4, micro_batches=2))
    log = learner.update(batch_of(policy), seed=0)
    assert log["updates"] == 4
    assert (log["ratio_error"], log["clip_fraction"], log["policy_kl"], log["reference_kl"]) == (0.0, 0.0, 0.0, 0.0)
    assert log["grad_norm"] > 0


def test_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        policy = make_smolvla(checkpointing=checkpointing, tune=FullTuning(), fold=2)
        decision = policy.act(make_obs(6), SEEDS)
        policy.score(scored(policy, decision), None)[0].sum().backward()
        gradients.append({k: v.grad for k, v in policy.module.named_parameters() if v.grad is not None})
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=0, atol=0, msg=name)


def test_bfloat16_keeps_log_probs_in_float32():
    policy, exact = make_smolvla(compute="bfloat16"), make_smolvla()
    decision = policy.act(make_obs(6), SEEDS)
    assert decision.logp.dtype == np.float32 and np.isfinite(decision.logp).all()
    difference = np.abs(decision.action - exact.act(make_obs(6), SEEDS).action).max()
    assert 0 < difference < 0.1


def test_the_spread_of_the_noise_head_is_learned():
    """Towards larger log-probs of states far from the mean, the head must widen."""
    policy = make_smolvla(sampler=NoiseSampler(low=0.05, high=0.3))
    decision = policy.act(make_obs(6), SEEDS)
    chain = decision.trace["chain"].copy()
    chain[:, 1:] += np.linspace(0.5, 1.5, chain[:, 1:].size).reshape(chain[:, 1:].shape).astype(np.float32)
    inputs = scored(policy, replace(decision, trace={**decision.trace, "chain": chain}))
    start = 0.5 * np.log(0.05 * 0.3)
    std = policy.means(inputs)[..., 12:]
    np.testing.assert_allclose(np.log(std.detach().numpy()), start, atol=1e-6)
    policy.score(inputs, None)[0].sum().backward()
    noise = policy.module.noise
    assert noise is not None and noise.write.bias.grad is not None and (noise.write.bias.grad > 0).all()


def test_the_reference_counts_its_own_spread():
    policy = make_smolvla(sampler=NoiseSampler(), logp_reduction="sum")
    decision = policy.act(make_obs(6), SEEDS)
    inputs = scored(policy, decision)
    with torch.no_grad():
        means = policy.means(inputs)
        mean, std = means[..., :12], means[..., 12:]
        reference = torch.cat([mean + 0.1, 1.2 * std], dim=-1)
        kl = policy.score(inputs, reference)[1]
        normal = torch.distributions.Normal
        expected = torch.distributions.kl_divergence(
            normal(mean, std), normal(reference[..., :12], reference[..., 12:])
        )
    assert kl is not None
    torch.testing.assert_close(kl, expected.sum(-1), rtol=1e-4, atol=1e-5)


def test_loading_is_strict():
    policy = make_smolvla()
    weights = {k: v.numpy().copy() for k, v in policy.params.items()}
    name = next(iter(weights))
    with pytest.raises(ValueError, match="lack 1"):
        policy.load({k: v for k, v in weights.items() if k != name}, 1)
    with pytest.raises(ValueError, match="lacks"):
        policy.load({**weights, "another": np.zeros(1, np.float32)}, 1)
    policy.load({k: v + 0.01 for k, v in weights.items()}, 3)
    assert policy.version == 3
    np.testing.assert_allclose(policy.params[name].numpy(), weights[name] + 0.01, atol=1e-6)


def test_features_see_pixels_words_and_state():
    policy, obs = make_smolvla(), make_obs(6)
    features = policy.features(obs)
    assert features.shape[0] == 6 and features.dtype == np.float32
    other = copy.deepcopy(obs)
    other.images["wrist"][0] = 255 - other.images["wrist"][0]
    changed = policy.features(other)
    assert np.abs(changed[0] - features[0]).max() > 1e-3
    np.testing.assert_allclose(changed[1:], features[1:], atol=1e-5)
    said = policy.features(replace(obs, instruction=("lift it",) * 6))
    assert np.abs(said[0] - features[0]).max() > 1e-4


def test_a_copy_for_the_learner_stands_alone():
    policy = make_smolvla()
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        for value in twin.module.parameters():
            value.add_(0.1)
    actions = [p.act(make_obs(3), SEEDS[:3], noise_scale=0.0).action for p in (policy, twin)]
    assert np.abs(actions[0] - actions[1]).max() > 0
    np.testing.assert_array_equal(actions[0], make_smolvla().act(make_obs(3), SEEDS[:3], noise_scale=0.0).action)


def test_chunks_longer_than_the_env_executes():
    policy = make_smolvla()
    assert make_spec().chunk == 3 and policy.act(make_obs(2), SEEDS[:2]).action.shape == (2, 3, 2)
