"""Octo policies, made: from scratch, from an official folder, from what ``save_policy`` stored; and written back.

Axes: K sentences, n tokens of one, L feature width.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from vla_rlaif.policies.octo import lora
from vla_rlaif.policies.octo.embodiment import Embodiment
from vla_rlaif.policies.octo.initial import initial_params
from vla_rlaif.policies.octo.language import Vocabulary, language_from_json
from vla_rlaif.policies.octo.network import PROPRIO, TABLE, OctoNetwork
from vla_rlaif.policies.octo.policy import OctoPolicy
from vla_rlaif.policies.octo.spec import (
    DiffusionSpec,
    ImageSpec,
    KeypointSpec,
    LanguageSpec,
    LowdimSpec,
    ModelSpec,
    StemSpec,
    TransformerSpec,
)
from vla_rlaif.policies.octo.statistics import Statistics
from vla_rlaif.policies.specs import spec_from_json, spec_to_json
from vla_rlaif.policy_config import OctoCheckpointConfig, OctoConfig, OctoSettings, SmallStemConfig
from vla_rlaif.tune_config import LoraTuning
from vla_rlaif.types import EnvSpec, Weights


def from_scratch(config: OctoConfig, env: EnvSpec, *, seed: int) -> OctoPolicy:
    """Random parameters, a word table for the sentences of the env, no normalisation."""
    language = Vocabulary.of(env.instructions, config.language_tokens)
    cameras = tuple((f"image_{c}", c, config.image_sizes.get(c, env.image_size)) for c in env.cameras)
    unknown = sorted(config.image_sizes.keys() - set(env.cameras))
    if unknown:
        raise ValueError(f"policy.image_sizes names {unknown[0]!r}; the env has the cameras {', '.join(env.cameras)}.")
    body = make_embodiment(env, cameras, (config.language_tokens, config.language_dim))
    network = OctoNetwork(scratch_spec(config, env), settings_of(config), body)
    table = np.random.default_rng([seed, 0]).standard_normal((language.size, config.language_dim))
    params = initial_params(network.shapes(), seed) | {TABLE: table.astype(np.float32)}
    return OctoPolicy(
        network,
        env,
        language=language,
        statistics=Statistics.identity(env.action_dim, env.state_dim),
        params=params | adapters(network, seed),
        origin=make_origin(config, network, env),
    )


def from_parts(config: OctoConfig | OctoCheckpointConfig, metadata: Mapping[str, Any], weights: Weights) -> OctoPolicy:
    """Rebuild a stored policy. ``config`` may choose other settings for it (OctoSettings), not other sizes."""
    needed = OctoConfig.model_fields if isinstance(config, OctoConfig) else OctoSettings.model_fields
    if unsaid := sorted(needed.keys() - metadata["config"].keys()):
        raise ValueError(
            f"The stored policy does not say its {', '.join(unsaid)}: it is of an older version. Make it again (train "
            "with --overwrite), or read it with the version that made it."
        )
    if isinstance(config, OctoConfig):
        for name in sorted(OctoConfig.model_fields.keys() - OctoSettings.model_fields.keys()):
            have, want = metadata["config"][name], config.model_dump(mode="json")[name]
            if have != want:
                raise ValueError(f"{name} is {want}, but the stored policy has {have}.")
    body = dict(metadata["embodiment"])
    cameras = tuple((key, camera, pixels) for key, camera, pixels in body.pop("cameras"))
    body = Embodiment(cameras=cameras, language=tuple(body.pop("language")), **body)
    network = OctoNetwork(ModelSpec.from_official(metadata["model"]), settings_of(config), body)
    missing = sorted((network.shapes().keys() | {TABLE}) - weights.keys())
    if missing:
        raise ValueError(f"The weights lack {len(missing)} parameters, the first is {missing[0]!r}.")
    made = OctoSettings.model_validate({k: metadata["config"][k] for k in OctoSettings.model_fields})
    policy = OctoPolicy(
        network,
        spec_from_json(metadata["spec"]),
        language=language_from_json(metadata["language"]),
        statistics=Statistics.from_lists(metadata["statistics"]),
        params=_readapted(weights, made, network),
        origin={**metadata, "config": config.model_dump(mode="json")},
    )
    shapes = network.shapes()
    wrong = [
        f"{k} {policy.params[k].shape}, not {v.shape}" for k, v in shapes.items() if policy.params[k].shape != v.shape
    ]
    if wrong:
        raise ValueError(f"The weights do not fit the stored model: {'; '.join(wrong[:5])}.")
    return policy


def scratch_spec(config: OctoConfig, env: EnvSpec) -> ModelSpec:
    """The model that an ``octo`` section describes, for one env."""
    stem = config.stem
    if isinstance(stem, SmallStemConfig):
        depth = len(stem.features)
        encoder = StemSpec(
            patch_size=stem.patch_size,
            kernel_sizes=(3,) * depth,
            strides=(2,) * depth,
            padding=(1,) * depth,
            features=stem.features,
            num_features=stem.embedding,
            num_groups=stem.groups,
        )
    else:
        encoder = KeypointSpec(channels=stem.channels)
    goals = isinstance(stem, SmallStemConfig) and stem.goal_images
    images = [
        (
            c,
            ImageSpec(
                encoder=encoder, obs_stack_keys=(f"image_{c}",), task_stack_keys=(f"image_{c}",) if goals else ()
            ),
        )
        for c in env.cameras
    ]
    proprio = [(PROPRIO, LowdimSpec(obs_keys=(PROPRIO,)))] if config.proprio else []
    head = DiffusionSpec(
        readout_key="readout_action",
        action_horizon=env.chunk,
        action_dim=env.action_dim,
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


def settings_of(config: OctoSettings) -> OctoSettings:
    """The settings alone: they hash, and equal ones share their compiled functions."""
    return OctoSettings(**{name: getattr(config, name) for name in OctoSettings.model_fields})


def make_embodiment(env: EnvSpec, cameras: tuple[tuple[str, str, int], ...], language: tuple[int, int]) -> Embodiment:
    return Embodiment(
        cameras=cameras, state_dim=env.state_dim, action_dim=env.action_dim, chunk=env.chunk, language=language
    )


def make_origin(config: OctoConfig | OctoCheckpointConfig, network: OctoNetwork, env: EnvSpec) -> dict[str, Any]:
    return {
        "config": config.model_dump(mode="json"),
        "model": network.model.to_official(),
        "embodiment": dataclasses.asdict(network.body),
        "spec": spec_to_json(env),
    }


def adapters(network: OctoNetwork, seed: int) -> dict[str, Float[np.ndarray, "..."]]:
    tune = network.settings.tune
    if not isinstance(tune, LoraTuning):
        return {}
    shapes = {name: leaf.shape for name, leaf in network.shapes().items()}
    return lora.initial_adapters(lora.adapted_kernels(shapes, network.first_tuned_block), tune.rank, seed)


def _readapted(weights: Weights, made: OctoSettings, network: OctoNetwork) -> dict[str, np.ndarray]:
    """Adapters of the same shape are kept; others are added into their kernels, and fresh ones start at 0."""
    wanted = adapters(network, seed=0)
    have = {name: value for name, value in weights.items() if name.startswith(lora.PREFIX)}
    same_scale = made.tune == network.settings.tune
    if same_scale and {k: v.shape for k, v in have.items()} == {k: v.shape for k, v in wanted.items()}:
        return dict(weights)
    return plain_weights(weights, made) | wanted


def plain_weights(weights: Weights, settings: OctoSettings) -> dict[str, np.ndarray]:
    """The weights with adapters added into their kernels."""
    if not isinstance(settings.tune, LoraTuning):
        return dict(weights)
    merged = lora.merged(dict(weights), settings.tune.alpha / settings.tune.rank)
    return {name: np.asarray(value, np.float32) for name, value in merged.items()}
