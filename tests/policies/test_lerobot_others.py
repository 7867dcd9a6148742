"""ACT and diffusion policy through the seam of the flow policies."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from lerobot_tiny import make_obs, make_spec, make_statistics
from safetensors.torch import save_model

from vla_rlaif.config import LearnerConfig
from vla_rlaif.grpo import GRPO
from vla_rlaif.lerobot_config import DdpmSampler, GaussianSampler, LeRobotConfig
from vla_rlaif.policies.lerobot import construct
from vla_rlaif.policies.lerobot.denoisers import Denoiser
from vla_rlaif.policies.lerobot.policy import LeRobotPolicy
from vla_rlaif.torch_learner import TorchLearner
from vla_rlaif.tune_config import FullTuning
from vla_rlaif.types import Batch

SEEDS = np.arange(4, dtype=np.uint32)
needs_diffusers = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="lerobot[diffusion]")
KINDS = ["act", pytest.param("diffusion", marks=needs_diffusers)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Random ones, as LeRobot writes them; their images are normalised by ImageNet's statistics."""
    root, spec = tmp_path_factory.mktemp("others"), make_spec(image_size=32)
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, 32, 32))
    common: dict[str, Any] = {
        "device": "cpu",
        "input_features": {f"{OBS_IMAGES}.{c}": image for c in spec.cameras}
        | {OBS_STATE: PolicyFeature(type=FeatureType.STATE, shape=(3,))},
        "output_features": {ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(2,))},
        "pretrained_backbone_weights": None,
    }
    sizes: dict[str, Any] = {
        "dim_model": 16,
        "n_heads": 2,
        "dim_feedforward": 16,
        "n_encoder_layers": 1,
        "latent_dim": 4,
    }
    act = ACTConfig(**common, **sizes, n_vae_encoder_layers=1, chunk_size=5, n_action_steps=5)
    unet: dict[str, Any] = {"down_dims": (8, 16), "n_groups": 4, "diffusion_step_embed_dim": 8, "kernel_size": 3}
    unet |= {"spatial_softmax_num_keypoints": 4, "use_separate_rgb_encoder_per_camera": False}
    diffusion = DiffusionConfig(
        **common, **unet, n_obs_steps=1, horizon=8, n_action_steps=4, noise_scheduler_type="DDIM",
        num_train_timesteps=20, num_inference_steps=5, crop_shape=None, use_group_norm=True,
    )  # fmt: skip
    colour = {"mean": [[[0.485]], [[0.456]], [[0.406]]], "std": [[[0.229]], [[0.224]], [[0.225]]]}
    stats = {**make_statistics(), **{f"{OBS_IMAGES}.{c}": colour for c in spec.cameras}}
    tensors = {k: {n: torch.tensor(v) for n, v in part.items()} for k, part in stats.items()}
    kinds = {"act": act, "diffusion": diffusion} if needs_diffusers.args[0] is False else {"act": act}
    for name, config in kinds.items():
        torch.manual_seed(0)
        (root / name).mkdir()
        config.save_pretrained(root / name)
        save_model(get_policy_class(name)(config), str(root / name / "model.safetensors"))
        for part in make_pre_post_processors(config, dataset_stats=tensors):
            part.save_pretrained(root / name)
    return root


def load(folders: Path, kind: str, **settings: Any) -> LeRobotPolicy:
    sampler = GaussianSampler(std=0.2) if kind == "act" else DdpmSampler(std_floor=0.15)
    fields: dict[str, Any] = {"path": str(folders / kind), "sampler": sampler, "tune": FullTuning()}
    return construct.from_folder(LeRobotConfig(**(fields | settings)), make_spec(image_size=32), seed=0)


def observed(num: int = 4):
    return make_obs(num, size=32)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_it_is_lerobots_chunk(kind, folders):
    policy, obs = load(folders, kind), observed()
    assert isinstance(policy._denoiser, Denoiser)
    images = {f"{OBS_IMAGES}.{c}": torch.from_numpy(v).permute(0, 3, 1, 2) / 255 for c, v in obs.images.items()}
    batch = policy.processors._pre({**images, OBS_STATE: torch.from_numpy(obs.state), "task": list(obs.instruction)})
    upstream = policy.module.policy
    if kind == "act":
        chunk = upstream.predict_action_chunk(batch)[:, :3]
    else:
        noise = policy._draw(SEEDS)[1]
        batch = {k: v[:, None] if k == OBS_STATE else v for k, v in batch.items()}
        chunk = upstream.predict_action_chunk(batch, noise=noise)[:, :3]
    ours = policy.act(obs, SEEDS, noise_scale=0.0).action
    np.testing.assert_allclose(ours, np.clip(policy.processors._post(chunk).numpy(), -1, 1), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_through_the_learner(kind, folders):
    """lr as good as 0: ratio exactly 1; what was acted is what is scored."""
    policy, obs = load(folders, kind), observed()
    decision = policy.act(obs, SEEDS)
    inputs = policy._on_device(policy.inputs(obs, decision.trace, np.full(4, 3)))
    with torch.no_grad():
        logp, kl = policy.score(inputs, policy.means(inputs))
    np.testing.assert_allclose(logp.numpy(), decision.logp, atol=2e-4)
    assert kl is not None and kl.abs().max() == 0
    rng = np.random.default_rng(0)
    batch = Batch(
        obs=obs,
        trace=decision.trace,
        executed=np.full(4, 3),
        advantage=rng.normal(size=4).astype(np.float32),
        mask=np.ones(4, bool),
        num_valid=4.0,
    )
    algorithm = GRPO(group_size=2, clip_low=0.02, clip_high=0.02)
    log = TorchLearner(policy, algorithm, LearnerConfig(lr=1e-30, epochs=1, minibatch=4, devices=1)).update(batch, 0)
    assert log["ratio_error"] == 0 and log["grad_norm"] > 0


def test_acts_log_density_by_hand(folders):
    """Spread 0.2 around the predicted chunk, over the 2 x 3 numbers that were executed."""
    policy, obs = load(folders, "act", logp_reduction="sum"), observed()
    decision = policy.act(obs, SEEDS)
    quiet = policy.act(obs, SEEDS, noise_scale=0.0)
    std = np.array(make_statistics()["action"]["std"])
    inside = (np.abs(decision.action) < 1) & (np.abs(quiet.action) < 1)
    assert inside.all()
    error = (decision.action - quiet.action) / std / 0.2
    expected = (-0.5 * error**2 - np.log(0.2) - 0.5 * np.log(2 * np.pi)).sum((1, 2))
    np.testing.assert_allclose(decision.logp[:, 0], expected, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_imitation_lowers_its_loss(kind, folders):
    policy, obs = load(folders, kind), observed()
    inputs = policy._on_device(policy.imitation_inputs(obs))
    action = torch.linspace(-0.5, 0.5, 24).reshape(4, 3, 2)
    names = policy.imitable
    optimizer = torch.optim.Adam([v for k, v in policy.module.named_parameters() if k in names], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = policy.imitation_loss(inputs, action, torch.Generator().manual_seed(0), 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_what_does_not_fit(folders):
    with pytest.raises(ValueError, match=r"sampler sde is not for a act; use gaussian"):
        load(folders, "act", sampler={"type": "sde"})
    with pytest.raises(ValueError, match="has no action expert apart"):
        load(folders, "act", tune={"type": "expert"})
    with pytest.raises(ValueError, match="no features"):
        load(folders, "act").features(observed())
