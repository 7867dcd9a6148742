"""Our chain on LeRobot's pieces against LeRobot itself, for its three flow policies."""

import numpy as np
import pytest
import torch
from lerobot_tiny import KINDS, make_gemma, make_obs, make_smolvla

from vla_rlaif.lerobot_config import HybridSampler, NoiseSampler
from vla_rlaif.policies.lerobot.policy import LeRobotPolicy

SEEDS = np.arange(5, dtype=np.uint32)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    return lambda kind, **settings: (
        make_smolvla(**settings) if kind == "smolvla" else make_gemma(folder, kind, **settings)
    )


def upstream_chunk(policy: LeRobotPolicy, obs, noise: torch.Tensor) -> torch.Tensor:
    """LeRobot's own prediction, from its own processing of the same observation."""
    pre, _ = policy.processors._pre, policy.processors._post
    images = {
        key: torch.from_numpy(obs.images[camera]).permute(0, 3, 1, 2).float() / 255
        for key, camera in policy.processors.cameras.items()
    }
    batch = pre({**images, "observation.state": torch.from_numpy(obs.state), "task": list(obs.instruction)})
    return policy.module.policy.predict_action_chunk(batch, noise=noise.clone())


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_it_is_lerobots_chunk_bit_for_bit(kind, make):
    policy, obs = make(kind), make_obs(5)
    _, start, _ = policy._draw(SEEDS)
    chunk = upstream_chunk(policy, obs, start)
    with torch.no_grad():
        x, _, _ = policy._sample(policy._shared_condition(policy.imitation_inputs(obs)), SEEDS, 0.0)
    assert chunk.std() > 0.1
    torch.testing.assert_close(x[:, :, :2], chunk, rtol=0, atol=0)
    decision = policy.act(obs, SEEDS, noise_scale=0.0)
    raw = policy.processors._post(chunk).numpy()
    np.testing.assert_array_equal(decision.action, np.clip(raw, -1, 1))
    assert decision.trace == {} and np.isnan(decision.logp).all()


@pytest.mark.parametrize("sampler", [HybridSampler(steps=2), NoiseSampler()], ids=["hybrid", "noise"])
def test_every_sampler_acts_alike_without_noise(sampler, make):
    plain, other = make("smolvla"), make("smolvla", sampler=sampler)
    actions = [p.act(make_obs(5), SEEDS, noise_scale=0.0).action for p in (plain, other)]
    assert np.isfinite(actions[0]).all()
    np.testing.assert_array_equal(actions[0], actions[1])


@pytest.mark.parametrize("kind", KINDS)
def test_imitation_loss_is_lerobots_on_the_same_draws(kind, make):
    policy, obs = make(kind), make_obs(4)
    rng = np.random.default_rng(3)
    action = torch.from_numpy(rng.uniform(-1, 1, (4, 3, 2)).astype(np.float32))
    noise = torch.from_numpy(rng.normal(size=(4, 3, 4)).astype(np.float32))
    time = torch.tensor([0.1, 0.4, 0.7, 0.99])
    batch = policy.processors.batch(policy._on_device(policy.imitation_inputs(obs)))
    normal = policy.processors.normalise_action(action)
    padded = torch.nn.functional.pad(normal, (0, 2))
    ours = policy._denoiser.losses(policy._denoiser.condition(batch), padded, noise, time, 1)[..., :2].mean()
    upstream = policy.module.policy
    upstream.model.sample_noise, upstream.model.sample_time = lambda *_: noise, lambda *_: time
    loss, _ = upstream.forward({**batch, "action": normal})
    assert loss > 0.5
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)


def test_training_times_have_lerobots_law():
    """The quantiles of 20,000 draws of each; their standard error is below 0.006."""
    from lerobot.policies.common.flow_matching import sample_time_beta

    torch.manual_seed(0)
    theirs = sample_time_beta(20000, "cpu", alpha=1.5, beta=1.0, scale=0.999, offset=0.001)
    ours = torch.rand(20000) ** (1 / 1.5) * 0.999 + 0.001
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    torch.testing.assert_close(torch.quantile(ours, levels), torch.quantile(theirs, levels), rtol=0, atol=0.02)
