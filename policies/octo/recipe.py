"""The model that a config asks for, for one environment: built from scratch, or adapted from an official folder's.

Light on purpose: ``vla-rlaif plan`` uses it, so neither jax nor flax is imported here.
"""

import re
from collections.abc import Iterable, Sequence

from vla_rlaif.policies.octo.adapt import PROPRIO as PROPRIO_TOKENS
from vla_rlaif.policies.octo.adapt import adapted_spec
from vla_rlaif.policies.octo.spec import (
    DiffusionSpec,
    EncoderSpec,
    ImageSpec,
    KeypointSpec,
    LanguageSpec,
    LowdimSpec,
    ModelSpec,
    StemSpec,
    TransformerSpec,
)
from vla_rlaif.policy_config import OctoCheckpointConfig, OctoConfig, SmallStemConfig

PROPRIO = "proprio"  # the observation's key


def scratch_spec(config: OctoConfig, *, cameras: Sequence[str], chunk: int, action_dim: int) -> ModelSpec:
    """The model that an ``octo`` section describes."""
    goals = isinstance(config.stem, SmallStemConfig) and config.stem.goal_images
    images = [(c, _image_spec(_encoder(config), f"image_{c}", goals)) for c in cameras]
    proprio = [(PROPRIO, LowdimSpec(obs_keys=(PROPRIO,)))] if config.proprio else []
    head = DiffusionSpec(
        readout_key="readout_action",
        action_horizon=chunk,
        action_dim=action_dim,
        max_action=config.max_action,
        time_dim=config.time_dim,
        num_blocks=config.head_blocks,
        hidden_dim=config.head_dim,
        diffusion_steps=config.diffusion_steps,
    )
    return ModelSpec(
        observation_tokenizers=(*images, *proprio),
        task_tokenizers=(("language", LanguageSpec()),),
        readouts=(("action", 1),),
        heads=(("action", head),),
        transformer=TransformerSpec(
            num_layers=config.num_layers, mlp_dim=config.mlp_dim, num_attention_heads=config.num_heads
        ),
        token_embedding_size=config.token_dim,
        max_horizon=config.max_horizon,
        repeat_task_tokens=config.repeat_task_tokens,
        use_correct_attention=True,
    )


def adopted_spec(
    config: OctoCheckpointConfig, spec: ModelSpec, keys: Sequence[str], *, chunk: int, action_dim: int
) -> ModelSpec:
    """The folder's model with tokenizers for new cameras and proprioception, and a new head if wanted.

    Args:
        spec: of the folder.
        keys: the observation keys that are fed with images.
    """
    if not any(isinstance(part, LanguageSpec) for _, part in spec.task_tokenizers):
        raise ValueError("the model has no language tokenizer; a policy here is told its task in words.")
    images = {name: part for name, part in spec.observation_tokenizers if isinstance(part, ImageSpec)}
    readers = {name: matching(part.obs_stack_keys, keys) for name, part in images.items()}
    read = {key for found in readers.values() for key in found}
    wanted = {name: readers[name][0] if readers[name] else images[name].obs_stack_keys[0] for name in images}
    wanted |= {key.removeprefix("image_"): key for key in keys if key not in read}
    if config.proprio and proprio_reader(spec) is None:
        spec = adapted_spec(spec, add_lowdim={PROPRIO: PROPRIO_TOKENS})
    if len(wanted) > len(images):
        spec = adapted_spec(spec, cameras=wanted)
    if config.new_head:
        head = spec.head if isinstance(spec.head, DiffusionSpec) else DiffusionSpec(readout_key=spec.head.readout_key)
        return adapted_spec(spec, head=head, action_horizon=chunk, action_dim=action_dim)
    return spec


def proprio_reader(spec: ModelSpec) -> str | None:
    """Name of the tokenizer that reads proprioception."""
    parts = [(name, part) for name, part in spec.observation_tokenizers if isinstance(part, LowdimSpec)]
    return next((name for name, part in parts if matching(part.obs_keys, [PROPRIO])), None)


def matching(patterns: Sequence[str], keys: Iterable[str]) -> list[str]:
    """Keys that a pattern matches from the start (``re.match``), sorted."""
    return sorted(key for key in keys if any(re.match(pattern, key) for pattern in patterns))


def _encoder(config: OctoConfig) -> EncoderSpec:
    stem = config.stem
    if not isinstance(stem, SmallStemConfig):
        return KeypointSpec(channels=stem.channels)
    depth = len(stem.features)
    return StemSpec(
        patch_size=stem.patch_size,
        kernel_sizes=(3,) * depth,
        strides=(2,) * depth,
        padding=(1,) * depth,
        features=stem.features,
        num_features=stem.embedding,
        num_groups=stem.groups,
    )


def _image_spec(encoder: EncoderSpec, key: str, goals: bool) -> ImageSpec:
    return ImageSpec(encoder=encoder, obs_stack_keys=(key,), task_stack_keys=(key,) if goals else ())
