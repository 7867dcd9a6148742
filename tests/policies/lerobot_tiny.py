"""LeRobot policies with random weights that take milliseconds: a SmolVLA of ours, and pi0 and pi0.5 made small.

LeRobot fixes the sizes of pi0 and pi0.5 in its code, so those are replaced while one is constructed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from safetensors.torch import save_model

from vla_rlaif.lerobot_config import LeRobotConfig, SmolVLAConfig, TinyVLM
from vla_rlaif.policies.lerobot import construct
from vla_rlaif.policies.lerobot.policy import LeRobotPolicy
from vla_rlaif.policies.lerobot.processors import measured
from vla_rlaif.policies.lerobot.tiny_vlm import byte_tokenizer
from vla_rlaif.types import EnvSpec, Observation

VLM = TinyVLM(
    image_size=16,
    patch_size=4,
    vision_dim=16,
    vision_layers=1,
    vision_mlp_dim=16,
    hidden_dim=32,
    num_layers=2,
    mlp_dim=32,
)
GEMMA = {"pi0": modeling_pi0, "pi05": modeling_pi05}
KINDS = ("smolvla", "pi0", "pi05")


def make_spec(**changes: Any) -> EnvSpec:
    fields: dict[str, Any] = {
        "cameras": ("primary", "wrist"),
        "image_size": 16,
        "state_dim": 3,
        "action_dim": 2,
        "chunk": 3,
        "max_decisions": 4,
        "instructions": ("push the red cube", "lift it"),
    }
    return EnvSpec(**(fields | changes))


def make_obs(num: int, seed: int = 0, size: int = 16) -> Observation:
    rng, spec = np.random.default_rng(seed), make_spec()
    return Observation(
        images={camera: rng.integers(0, 256, (num, size, size, 3), np.uint8) for camera in spec.cameras},
        state=rng.normal(size=(num, spec.state_dim)).astype(np.float32),
        instruction=tuple(spec.instructions[i % 2] for i in range(num)),
    )


def make_statistics(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return measured(rng.normal(0.1, 0.5, (40, 2)).astype(np.float32), rng.normal(0.2, 1.0, (40, 3)).astype(np.float32))


def smolvla_config(**changes: Any) -> SmolVLAConfig:
    fields: dict[str, Any] = {
        "vlm": VLM,
        "language_tokens": 20,
        "flow_steps": 4,
        "max_action_dim": 4,
        "max_state_dim": 5,
    }
    return SmolVLAConfig(**(fields | changes))


def make_smolvla(**changes: Any) -> LeRobotPolicy:
    return construct.from_scratch(smolvla_config(**changes), make_spec(), seed=0, statistics=make_statistics())


@contextmanager
def small_gemma() -> Iterator[None]:
    """pi0 and pi0.5 are constructed with two layers of 16 numbers, and 8 heads, which their attention wants."""
    sizes = modeling_pi0.GemmaConfig(width=16, depth=2, mlp_dim=16, num_heads=8, num_kv_heads=1, head_dim=4)
    with (
        patch.multiple(modeling_pi0, **_shrunk(modeling_pi0, sizes)),
        patch.multiple(modeling_pi05, **_shrunk(modeling_pi05, sizes)),
    ):
        yield


def _shrunk(module, sizes):
    paligemma, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def small_paligemma(config):
        text, vision = config.text_config, config.vision_config
        text.vocab_size = config._vocab_size = 300
        vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers = 16, 16, 1
        vision.num_attention_heads, vision.projection_dim = 2, sizes.width
        return paligemma(config=config)

    def small_expert(config):
        config.vocab_size = 4
        return expert(config=config)

    return {
        "get_gemma_config": lambda variant: sizes,
        "PaliGemmaForConditionalGenerationWithPiGemma": small_paligemma,
        "PiGemmaForCausalLM": small_expert,
    }


def write_gemma(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """A pretrained_model folder as LeRobot writes it; its processor names Google's tokenizer."""
    spec = make_spec()
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, spec.image_size, spec.image_size))
    fields: dict[str, Any] = {
        "device": "cpu",
        "input_features": {f"{OBS_IMAGES}.{c}": image for c in spec.cameras}
        | {OBS_STATE: PolicyFeature(type=FeatureType.STATE, shape=(spec.state_dim,))},
        "output_features": {ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(spec.action_dim,))},
        "chunk_size": spec.chunk,
        "n_action_steps": spec.chunk,
        "max_action_dim": 4,
        "max_state_dim": 5,
        "image_resolution": (28, 28),
        "num_inference_steps": 4,
        "tokenizer_max_length": 64,
    }
    config = {"pi0": PI0Config, "pi05": PI05Config}[kind](**(fields | changes))
    make = {"pi0": make_pi0_pre_post_processors, "pi05": make_pi05_pre_post_processors}[kind]
    stats = {k: {n: torch.tensor(v) for n, v in part.items()} for k, part in make_statistics().items()}
    with patch("lerobot.processor.tokenizer_processor.AutoTokenizer.from_pretrained", lambda name: byte_tokenizer()):
        pipelines = make(config, stats)
    torch.manual_seed(seed)
    with small_gemma():
        policy = {"pi0": modeling_pi0.PI0Policy, "pi05": modeling_pi05.PI05Policy}[kind](config)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_model(policy, str(folder / "model.safetensors"))
    for part in pipelines:
        part.save_pretrained(folder)
    return folder


def make_gemma(folder: Path, kind: str, **settings: Any) -> LeRobotPolicy:
    tokenizer = folder / "tokenizer"
    byte_tokenizer().save_pretrained(tokenizer)
    if not (folder / kind).exists():
        write_gemma(folder / kind, kind)
    fields: dict[str, Any] = {"path": str(folder / kind), "tokenizer": tokenizer}
    with small_gemma():
        return construct.from_folder(LeRobotConfig(**(fields | settings)), make_spec(), seed=0)
