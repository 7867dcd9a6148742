"""What a plan promises of a LeRobot policy is what the policy has."""

import subprocess
import sys

import pytest
import torch
from lerobot_tiny import make_gemma, make_obs, make_smolvla, small_gemma, smolvla_config

from vla_rlaif.config import parse_config
from vla_rlaif.lerobot_config import AdapterTuning, ExpertTuning, NoiseSampler, TinyVLM
from vla_rlaif.plan import describe
from vla_rlaif.plan_lerobot import added_shapes, cached_numbers, prefix_tokens, shapes_in, smolvla_shapes
from vla_rlaif.policies.lerobot.denoisers import FlowDenoiser
from vla_rlaif.policies.lerobot.layout import LAYOUTS, Groups
from vla_rlaif.policies.lerobot.policy import LeRobotPolicy
from vla_rlaif.tune_config import FullTuning

OTHER = TinyVLM(
    image_size=24, patch_size=4, merged_patches=3, vision_dim=24, vision_layers=2, vision_heads=3, num_layers=3
)


def prefix_of(policy: LeRobotPolicy) -> dict[str, torch.Tensor]:
    denoiser = policy._denoiser
    assert isinstance(denoiser, FlowDenoiser)
    with torch.no_grad():
        inputs = policy._on_device(policy.imitation_inputs(make_obs(2)))
        return denoiser.condition(policy.processors.batch(inputs))


@pytest.mark.parametrize("tune", [ExpertTuning(), AdapterTuning(rank=3), FullTuning()], ids=lambda t: t.type)
@pytest.mark.parametrize("changes", [{}, {"vlm": OTHER, "expert_width": 1.5, "self_attention_every": 1}], ids=str)
def test_smolvlas_shapes_are_its_own(changes, tune):
    config = smolvla_config(tune=tune, sampler=NoiseSampler(hidden=5), **changes)
    policy = make_smolvla(**{name: getattr(config, name) for name in ("tune", "sampler", *changes)})
    assert isinstance(config.vlm, TinyVLM)
    shapes = smolvla_shapes(config, config.vlm, 2, 3)
    planned = {**shapes, **added_shapes(config, "smolvla", shapes)}
    have = {name.replace(".base_layer.", "."): tuple(v.shape) for name, v in policy.module.named_parameters()}
    assert planned == have
    trained = Groups.of(list(planned), LAYOUTS["smolvla"]).trained(config.tune)
    assert trained == {name.replace(".base_layer.", ".") for name in policy.trainable}


def test_a_prefix_has_the_planned_size(tmp_path):
    config = smolvla_config()
    assert isinstance(config.vlm, TinyVLM)
    shapes = smolvla_shapes(config, config.vlm, 2, 3)
    prefix = prefix_of(make_smolvla())
    assert prefix["mask"].shape[1] == prefix_tokens(shapes, 2, 20)
    kept = sum(v[0].numel() for k, v in prefix.items() if k.startswith(("key", "value")))
    assert kept == prefix_tokens(shapes, 2, 20) * cached_numbers(shapes, "smolvla")
    policy = make_gemma(tmp_path, "pi0")
    shapes = shapes_in(tmp_path / "pi0" / "model.safetensors")
    prefix = prefix_of(policy)
    assert prefix["mask"].shape[1] == prefix_tokens(shapes, 2, 64)
    kept = sum(v[0].numel() for k, v in prefix.items() if k.startswith(("key", "value")))
    assert kept == prefix_tokens(shapes, 2, 64) * cached_numbers(shapes, "pi0")


def test_a_plan_in_words(tmp_path):
    with small_gemma():
        make_gemma(tmp_path, "pi05")
    pieces = {
        "smolvla": {"type": "smolvla", "sampler": {"type": "hybrid", "steps": 2}},
        "pi05": {"type": "lerobot", "path": str(tmp_path / "pi05"), "tune": {"type": "lora"}},
        "hub": {"type": "lerobot", "path": "lerobot/pi0_base"},
        "named": {"type": "smolvla", "vlm": {"type": "named"}},
    }
    text = {
        k: describe(parse_config({"policy": p, "reward": {"type": "success"}}, source="")) for k, p in pieces.items()
    }
    assert "10 steps, 2 of them stochastic (hybrid)" in text["smolvla"] and "prefixes of a step" in text["smolvla"]
    assert "pi05, " in text["pi05"] and "(lora)" in text["pi05"]
    assert "download it" in text["hub"] and "not estimated" in text["named"]


def test_a_plan_loads_no_torch():
    code = """
import sys
from vla_rlaif.config import parse_config
from vla_rlaif.plan import describe
describe(parse_config({"policy": {"type": "smolvla"}}, source=""))
print(sorted({"torch", "lerobot", "jax", "mujoco"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
