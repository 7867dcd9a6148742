"""Every family of models: what we feed it and get from it, against transformers' own processor and forward."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from token_policies import FAMILIES, SEEDS, make_obs, make_policy, take, tensors
from torch.nn.functional import log_softmax

from vla_rlaif.interfaces import Policy
from vla_rlaif.policies.tokens.policy import TokenPolicy

GENERATED = 2e-5  # nats, between a token's log-prob as generated (KV cache) and as scored in one forward, float32


@cache
def policy_of(family: str) -> TokenPolicy:
    return make_policy(family)


@pytest.fixture(params=FAMILIES)
def policy(request: pytest.FixtureRequest) -> TokenPolicy:
    return policy_of(request.param)


def processed(policy: TokenPolicy, row: int) -> dict[str, torch.Tensor]:
    """One observation's prompt by the model's own processor, which expands the marks of images itself."""
    obs, bins = take(make_obs(), [row]), policy.bins
    state = " ".join(map(str, bins.encode_state(obs.state)[0]))
    kind = policy.module.config.model_type
    mark = "<|vision_start|><|image_pad|><|vision_end|>" if kind.startswith("qwen") else "<image>"
    text = f"{mark * 2}{obs.instruction[0]}?{state}:"
    images = [torch.tensor(obs.images[camera][0]).permute(2, 0, 1) for camera in policy.spec.cameras]
    return dict(policy.prompter.processor(images=[images], text=[text], return_tensors="pt"))


def test_prompts_are_the_processors_own(policy: TokenPolicy) -> None:
    encoded = policy.prompter.encode(make_obs())
    for row in range(2):
        ours = encoded["ids"][row][encoded["mask"][row] == 1].tolist()
        theirs = processed(policy, row)["input_ids"][0].tolist()
        if policy.module.config.model_type == "paligemma":  # its processor puts <bos> behind the images
            theirs.remove(policy.prompter.processor.tokenizer.bos_token_id)
        assert ours == theirs


def test_scores_are_the_models_own_logits(policy: TokenPolicy) -> None:
    """One row at a time through transformers' forward, without padding."""
    obs = make_obs()
    decision = policy.act(obs, SEEDS)
    means = policy.means(tensors(policy.inputs(obs, decision.trace, np.full(5, 3))))
    bins = torch.tensor(decision.trace["bins"].astype(int))
    for row in range(2):
        one = policy.prompter.encode(take(obs, [row]))
        written = torch.tensor(policy.allowed)[bins[row : row + 1]]
        keys = policy.prompter.forward_keys(tensors(one), written)
        keys.pop("position_ids", None)
        logits = policy.module(**keys).logits[0, -policy.num_tokens - 1 : -1]
        want = log_softmax(logits[:, torch.tensor(policy.allowed)].double(), -1)
        np.testing.assert_allclose(means[row].detach(), want.detach(), atol=1e-4)
        assert want.max() > -3  # of 256 bins: an indifferent model would have -5.5 everywhere


def test_generated_and_scored_log_probs_agree(policy: TokenPolicy) -> None:
    obs = make_obs()
    decision = policy.act(obs, SEEDS)
    assert isinstance(policy, Policy) and decision.action.dtype == np.float32
    assert decision.action.shape == (5, 3, 2) and np.abs(decision.action).max() <= 1
    logp, kl = policy.score(tensors(policy.inputs(obs, decision.trace, np.full(5, 3))), None)
    assert kl is None and logp.dtype == torch.float32
    np.testing.assert_allclose(decision.logp, logp.detach(), atol=GENERATED)


def test_a_row_depends_on_its_own_seed_only(policy: TokenPolicy) -> None:
    obs = make_obs()
    together = policy.act(obs, SEEDS)
    for row in range(2):  # the shorter instruction is padded in company
        alone = policy.act(take(obs, [row]), SEEDS[row : row + 1])
        np.testing.assert_array_equal(alone.trace["bins"][0], together.trace["bins"][row])
        np.testing.assert_allclose(alone.logp[0], together.logp[row], atol=GENERATED)
    same = policy.act(take(obs, [1, 1]), SEEDS[[1, 3]])
    np.testing.assert_array_equal(same.action[0], same.action[1])


def test_greedy_is_generates_own(policy: TokenPolicy) -> None:
    """transformers' greedy search under its own constraint to the allowed ids."""
    obs = take(make_obs(), [0])
    encoded = tensors(policy.prompter.encode(obs))
    none = encoded["ids"].new_empty((1, 0))
    allowed = policy.allowed.tolist()
    ids = policy.module.generate(
        **policy.prompter.forward_keys(encoded, none, is_generating=True),
        max_new_tokens=policy.num_tokens,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda batch, so_far: allowed,
    )
    written = ids[0, -policy.num_tokens :].numpy()
    bins = policy.act(obs, SEEDS[:1], noise_scale=0.0).trace["bins"][0]
    np.testing.assert_array_equal(policy.allowed[bins], written)


def test_images_matter(policy: TokenPolicy) -> None:
    obs = make_obs()
    changed = replace(obs, images={**obs.images, "wrist": make_obs(seed=1).images["wrist"]})
    assert np.abs(policy.features(obs) - policy.features(changed)).max() > 1e-3


@pytest.mark.parametrize("num", [5, 64])
def test_gradients_change_no_bit_of_a_score(policy: TokenPolicy, num: int) -> None:
    """The learner computes old log-probs without gradients and new ones with: their ratio starts at exactly 1."""
    obs = make_obs(num)
    bins = np.random.default_rng(0).integers(0, 256, (num, policy.num_tokens), np.int16)
    inputs = tensors(policy.inputs(obs, {"bins": bins}, np.full(num, 3)))
    policy.module.requires_grad_(True)
    with torch.no_grad():
        old = policy.score(inputs, None)[0]
    new = policy.score(inputs, None)[0]
    policy.module.requires_grad_(False)
    assert new.requires_grad and torch.equal(old, new)
