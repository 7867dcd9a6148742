"""The token policy: its distribution, its gradients, its tuning; qwen2_vl stands for all families."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import scipy.stats
import torch
from token_policies import SEEDS, make_config, make_obs, make_policy, make_spec, sharpened, take, tensors
from torch.distributions import Categorical, kl_divergence

from vla_rlaif.policies.tokens.construct import build, from_parts
from vla_rlaif.policies.tokens.policy import TokenPolicy
from vla_rlaif.policies.tokens.tuning import merged_tensors
from vla_rlaif.torch_imitation import TorchImitable
from vla_rlaif.torch_learner import TorchPolicy
from vla_rlaif.torch_weights import to_arrays
from vla_rlaif.tune_config import HeadTuning, LoraTuning

EXECUTED = np.array([3, 0, 2, 1, 3])


@cache
def shared() -> TokenPolicy:
    """For tests that leave its parameters alone."""
    return make_policy()


def scored(policy: TokenPolicy, executed: np.ndarray = EXECUTED) -> dict[str, torch.Tensor]:
    obs = make_obs()
    return tensors(policy.inputs(obs, shared().act(obs, SEEDS).trace, executed))


def noisy(policy: TokenPolicy, scale: float = 0.05) -> TokenPolicy:
    """The same policy after some training, as it were."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in policy.module.named_parameters():
            if name in policy.trainable:
                value.add_(scale * torch.randn(value.shape, generator=generator))
    return policy


def test_seams() -> None:
    assert isinstance(shared(), TorchPolicy) and isinstance(shared(), TorchImitable)


def test_samples_follow_the_log_probs() -> None:
    """1000 first tokens of one prompt, by Pearson's test; bins that are expected less than 5 times are one."""
    policy, obs = shared(), take(make_obs(), [0] * 1000)
    few = policy.inputs(take(obs, [0]), {"bins": np.zeros((1, 6), np.int16)}, np.array([3]))
    expected = 1000 * policy.means(tensors(few))[0, 0].detach().double().exp().numpy()
    seeds = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32)
    counts = np.bincount(policy.act(obs, seeds).trace["bins"][:, 0], minlength=256)
    often = expected >= 5
    pooled = [np.append(values[often], values[~often].sum()) for values in (counts, expected)]
    assert often.sum() > 10 and scipy.stats.chisquare(pooled[0], pooled[1] * 1000 / pooled[1].sum()).pvalue > 0.001


def test_ids_that_are_no_bins_have_no_probability() -> None:
    policy = make_policy()
    before = policy.means(scored(policy))
    forbidden = np.setdiff1d(np.arange(len(policy.prompter.processor.tokenizer)), policy.allowed)
    with torch.no_grad():
        policy.module.lm_head.weight[forbidden] = 100 * policy.module.lm_head.weight[policy.allowed[:1]]
    torch.testing.assert_close(policy.means(scored(policy)), before)
    np.testing.assert_allclose(before.exp().sum(-1).detach(), 1, atol=1e-5)
    np.testing.assert_array_equal(policy.act(make_obs(), SEEDS).action, shared().act(make_obs(), SEEDS).action)


def test_temperature_divides_logits() -> None:
    # log-probs of temperature 2 are those of temperature 1 halved and normalised again
    warm = make_policy(temperature=2.0)
    want = torch.log_softmax(shared().means(scored(shared())) / 2, -1)
    torch.testing.assert_close(warm.means(scored(warm)), want)
    decision = warm.act(make_obs(), SEEDS)
    logp, _ = warm.score(tensors(warm.inputs(make_obs(), decision.trace, np.full(5, 3))), None)
    np.testing.assert_allclose(decision.logp, logp.detach(), atol=2e-5)
    assert (decision.action != shared().act(make_obs(), SEEDS).action).any()


def test_only_executed_tokens_count() -> None:
    policy, reference = noisy(make_policy()), shared().means(scored(shared()))
    inputs = scored(policy)
    logp, kl = policy.score(inputs, reference)
    means = policy.means(inputs)
    want = kl_divergence(Categorical(logits=means.double()), Categorical(logits=reference.double()))
    chosen = Categorical(logits=means.double()).log_prob(inputs["bins"])
    for row, steps in enumerate(EXECUTED):
        np.testing.assert_allclose(logp[row, : 2 * steps].detach(), chosen[row, : 2 * steps].detach(), atol=1e-5)
        assert kl is not None
        np.testing.assert_allclose(kl[row, : 2 * steps].detach(), want[row, : 2 * steps].detach(), atol=1e-5)
        assert not logp[row, 2 * steps :].any() and not kl[row, 2 * steps :].any()
    assert want.min() > 1e-3


@pytest.mark.parametrize("tune", [HeadTuning(), LoraTuning(rank=2), LoraTuning(rank=2, blocks=1)], ids=str)
def test_gradients_reach_what_is_tuned(tune: HeadTuning | LoraTuning) -> None:
    policy = noisy(make_policy(tune=tune))
    weights = {name: value for name, value in policy.module.named_parameters() if name in policy.trainable}
    for value in weights.values():
        value.requires_grad_(True)
    with torch.no_grad():
        prepared = policy.prepare(scored(policy))
    plain, ahead = (policy.score(inputs, None)[0] for inputs in (scored(policy), prepared))
    torch.testing.assert_close(plain, ahead, rtol=0, atol=0)
    ahead.sum().backward()
    for name, value in weights.items():
        assert value.grad is not None and value.grad.abs().max() > 0, name
    if tune.type == "head":
        assert policy.trainable == {"lm_head.weight"} and "images" not in prepared
    else:
        blocks = {name.split(".")[3] for name in policy.trainable}
        assert blocks == ({"1"} if tune.blocks == 1 else {"0", "1"}) and len(policy.trainable) == 14 * len(blocks)


def test_adapters_start_without_effect_and_merge() -> None:
    policy = make_policy(tune=LoraTuning(rank=2))
    torch.testing.assert_close(policy.means(scored(policy)), shared().means(scored(shared())), rtol=0, atol=0)
    noisy(policy)
    want = policy.means(scored(policy))
    assert (want - shared().means(scored(shared()))).abs().max() > 0.01
    plain = make_policy()
    plain.load(to_arrays(merged_tensors(policy.module)), 3)
    assert plain.version == 3
    torch.testing.assert_close(plain.means(scored(plain)), want, rtol=1e-4, atol=1e-4)


def test_imitation_loss_is_the_models_own() -> None:
    """transformers' loss of the same labels, over the whole vocabulary."""
    policy, obs = make_policy(), make_obs()
    action = np.random.default_rng(1).uniform(-1, 1, (5, 3, 2)).astype(np.float32)
    inputs = tensors(policy.imitation_inputs(obs))
    loss = policy.imitation_loss(inputs, torch.tensor(action), torch.Generator(), 1)
    written = torch.tensor(policy.allowed[policy.bins.encode(action)])
    keys = policy.prompter.forward_keys(inputs, written)
    labels = torch.full_like(keys["input_ids"], -100)
    labels[:, -6:] = written
    torch.testing.assert_close(loss, policy.module(**keys, labels=labels).loss)
    assert policy.imitable == frozenset(policy.params)
    adapted = make_policy(tune=LoraTuning(rank=2))
    assert adapted.imitable == adapted.trainable != frozenset(adapted.params)


def test_imitation_teaches() -> None:
    """A fresh model, forty steps on ten chunks: it says them back."""
    policy, obs = build(make_config(), make_spec(), seed=0), make_obs(10)
    action = np.random.default_rng(2).choice([-0.5, 0.5], (10, 3, 2)).astype(np.float32)
    inputs, optimizer = tensors(policy.imitation_inputs(obs)), torch.optim.AdamW(policy.module.parameters(), lr=1e-2)
    policy.module.requires_grad_(True)
    for _ in range(40):
        optimizer.zero_grad()
        loss = policy.imitation_loss(inputs, torch.tensor(action), torch.Generator(), 1)
        loss.backward()
        optimizer.step()
    said = policy.act(obs, np.zeros(10, np.uint32), noise_scale=0.0).action
    assert (np.abs(said - action) < 0.01).mean() > 0.8  # by chance 1 in 255


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = make_policy(checkpointing=checkpointing)
        policy.module.requires_grad_(True)
        policy.score(scored(policy), None)[0].sum().backward()
        gradients.append({name: value.grad for name, value in policy.module.named_parameters()})
        assert not any(module.training for module in policy.module.modules())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6)


def test_bfloat16_keeps_log_probs_in_float32() -> None:
    policy = make_policy(compute="bfloat16")
    logp, _ = policy.score(scored(policy), None)
    assert logp.dtype == torch.float32
    exact = shared().score(scored(shared()), None)[0]
    assert 0 < (logp - exact).abs().max() < 0.5  # bfloat16 has 8 bits; logits here are up to about 10
    again, _ = policy.score(scored(policy), None)
    torch.testing.assert_close(again, logp, rtol=0, atol=0)  # ratio exactly 1 before the first update


def test_stored_and_tuned_otherwise() -> None:
    """What one way of tuning stored, another takes over: adapters are merged, or added."""
    adapted = noisy(make_policy(tune=LoraTuning(rank=2)))
    stored, weights = adapted.metadata(), to_arrays(adapted.params)
    want = adapted.means(scored(adapted))
    for tune in (LoraTuning(rank=2), LoraTuning(rank=4, blocks=1), HeadTuning()):
        again = from_parts(make_config(tune=tune), stored, weights)
        torch.testing.assert_close(again.means(scored(again)), want, rtol=1e-4, atol=1e-4)
    full = from_parts(make_config(), again.metadata(), to_arrays(again.params))
    np.testing.assert_array_equal(full.act(make_obs(), SEEDS).action, again.act(make_obs(), SEEDS).action)
    with pytest.raises(ValueError, match=r"policy.prompt is '\{images\}\{instruction\}', but the stored policy has"):
        from_parts(make_config(prompt="{images}{instruction}"), stored, weights)


def test_refused() -> None:
    policy = make_policy()
    weights = to_arrays(policy.params)
    with pytest.raises(ValueError, match=r"lack 1 of .* need 'lm_head.weight' of shape"):
        policy.load({name: value for name, value in weights.items() if name != "lm_head.weight"}, 1)
    with pytest.raises(ValueError, match="1 tensors that the policy lacks"):
        policy.load({**weights, "extra": np.zeros(1)}, 1)
    obs = take(make_obs(), [0])
    with pytest.raises(ValueError, match="'fetch the goal' has words that the model's vocabulary lacks"):
        policy.act(replace(obs, instruction=("fetch the goal",)), SEEDS[:1])
    with pytest.raises(ValueError, match="no image of camera 'wrist'"):
        policy.act(replace(obs, images={"front": obs.images["front"]}), SEEDS)
    with pytest.raises(ValueError, match=r"tune.blocks 3 exceeds the 2 blocks"):
        make_policy(tune=LoraTuning(blocks=3))
    with pytest.raises(ValueError, match="action_scale q99 with bins uniform is measured on demonstrations"):
        make_policy(action_scale="q99")


def test_equal_seeds_build_equal_policies() -> None:
    torch.manual_seed(1)
    first = build(make_config(), make_spec(), seed=4)
    state = torch.get_rng_state()
    second = build(make_config(), make_spec(), seed=4)
    assert torch.equal(state, torch.get_rng_state())  # building draws from no global generator
    for name, value in first.params.items():
        assert torch.equal(value, second.params[name])
    other = build(make_config(), make_spec(), seed=5)
    assert not torch.equal(other.params["lm_head.weight"], second.params["lm_head.weight"])


def test_features() -> None:
    features = sharpened(build(make_config(), make_spec(), seed=0)).features(make_obs())
    assert features.shape == (5, 32) and features.dtype == np.float32
    np.testing.assert_allclose(features[:1], shared().features(take(make_obs(), [0])), atol=1e-5)
