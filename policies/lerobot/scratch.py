"""The folder that LeRobot would write for a fresh SmolVLA of the wanted sizes, without weights."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig as UpstreamConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from vla_rlaif.lerobot_config import NamedVLM, SmolVLAConfig
from vla_rlaif.policies.lerobot.description import VLM, Description
from vla_rlaif.policies.lerobot.folder import VLM_FILES, local
from vla_rlaif.policies.lerobot.tiny_vlm import vlm_files
from vla_rlaif.types import EnvSpec


def describe_smolvla(config: SmolVLAConfig, spec: EnvSpec) -> Description:
    """Raises ValueError for a VLM that is not there, and for sizes that do not hold the env's."""
    action_dim, state_dim = config.max_action_dim or spec.action_dim, config.max_state_dim or spec.state_dim
    if action_dim < spec.action_dim or state_dim < spec.state_dim:
        raise ValueError(
            f"policy.max_action_dim {action_dim} and max_state_dim {state_dim} must hold the env's {spec.action_dim} "
            f"action and {spec.state_dim} state dims."
        )
    named = config.vlm if isinstance(config.vlm, NamedVLM) else None
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, spec.image_size, spec.image_size))
    with TemporaryDirectory() as made:
        folder = Path(made)
        upstream = UpstreamConfig(
            device="cpu",
            input_features={f"{OBS_IMAGES}.{camera}": image for camera in spec.cameras}
            | {OBS_STATE: PolicyFeature(type=FeatureType.STATE, shape=(spec.state_dim,))},
            output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(spec.action_dim,))},
            chunk_size=spec.chunk,
            n_action_steps=spec.chunk,
            max_action_dim=action_dim,
            max_state_dim=state_dim,
            resize_imgs_with_padding=(config.vlm.image_size, config.vlm.image_size),
            tokenizer_max_length=config.language_tokens,
            pad_language_to="max_length",
            num_steps=config.flow_steps,
            num_vlm_layers=config.vlm.num_layers,
            vlm_model_name=str(_vlm_folder(config, folder)),
            load_vlm_weights=named is not None and named.weights,
            expert_width_multiplier=config.expert_width,
            self_attn_every_n_layers=config.self_attention_every,
        )
        upstream.save_pretrained(folder)
        for part in make_pre_post_processors(upstream, dataset_stats=None):
            part.save_pretrained(folder)
        described = Description.read(folder)
    if named is None:
        return described
    config_json = {**described.config, "vlm_model_name": named.name}
    return replace(described, config=config_json).with_tokenizer(named.name)


def _vlm_folder(config: SmolVLAConfig, folder: Path) -> Path:
    if isinstance(config.vlm, NamedVLM):
        return local(config.vlm.name, VLM_FILES, "policy.vlm")
    (folder / VLM).mkdir()
    for name, text in vlm_files(config.vlm).items():
        (folder / VLM / name).write_text(text)
    return folder / VLM
