"""LeRobot policies, made: from scratch, from a `pretrained_model` folder, from what ``save_policy`` stored."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_IMAGES

from vla_rlaif.lerobot_config import (
    AdapterTuning,
    DdpmSampler,
    GaussianSampler,
    HybridSampler,
    LeRobotConfig,
    LeRobotSettings,
    NamedVLM,
    NoiseSampler,
    SdeSampler,
    SmolVLAConfig,
)
from vla_rlaif.policies.lerobot.denoisers import Denoiser, FlowDenoiser
from vla_rlaif.policies.lerobot.description import VLM, WEIGHTS, Description
from vla_rlaif.policies.lerobot.families import FAMILIES
from vla_rlaif.policies.lerobot.fit import (
    adapted,
    check_sentences,
    check_sizes,
    check_type,
    match_cameras,
    read_statistics,
)
from vla_rlaif.policies.lerobot.folder import instantiate, local, read_weights, take_weights, whole, with_options
from vla_rlaif.policies.lerobot.layout import LAYOUTS, Groups
from vla_rlaif.policies.lerobot.network import (
    Network,
    NoiseHead,
    add_adapters,
    plain_policy,
)
from vla_rlaif.policies.lerobot.others import ActDenoiser, DiffusionDenoiser
from vla_rlaif.policies.lerobot.policy import LeRobotPolicy
from vla_rlaif.policies.lerobot.processors import Pipelines, Processors, identity
from vla_rlaif.policies.lerobot.scratch import describe_smolvla
from vla_rlaif.policies.specs import spec_from_json
from vla_rlaif.torch_weights import load_strictly
from vla_rlaif.types import EnvSpec, Weights

Statistics = Mapping[str, Mapping[str, Any]]  # LeRobot's, by feature and name
OUR_KEYS = LeRobotSettings.model_fields.keys()


def from_scratch(
    config: SmolVLAConfig, spec: EnvSpec, *, seed: int, statistics: Statistics | None = None
) -> LeRobotPolicy:
    """SmolVLA with random parameters (of a named VLM its own, if wanted); without ``statistics`` nothing is
    normalised."""
    description = describe_smolvla(config, spec)
    description = description.with_statistics(statistics or identity(spec.action_dim, spec.state_dim))
    pretrained = isinstance(config.vlm, NamedVLM) and config.vlm.weights
    policy, pipelines = instantiate(description, seed=seed, pretrained=pretrained)
    description = whole(description)
    cameras = {f"{OBS_IMAGES}.{camera}": camera for camera in spec.cameras}
    return assemble(config, spec, policy, pipelines, description=description, cameras=cameras, seed=seed)


def from_folder(
    config: LeRobotConfig, spec: EnvSpec, *, seed: int, statistics: Statistics | None = None
) -> LeRobotPolicy:
    """A policy that LeRobot trained. ``statistics`` are those of the demonstrations that it will imitate, in place of
    the folder's.

    Raises:
        ValueError: the folder is not whole, or does not fit the env.
    """
    folder = local(config.path, ("*.json", "*.safetensors", f"{VLM}/*"), "policy.path", config.revision)
    description = with_options(whole(Description.read(folder)), config.options)
    check_type(description)
    if config.adapt:
        description = adapted(description, spec, has_statistics=statistics is not None or config.statistics is not None)
    if config.statistics is not None:
        description = description.with_statistics(read_statistics(config.statistics))
    if statistics is not None:
        description = description.with_statistics(statistics)
    if config.tokenizer is not None:
        description = description.with_tokenizer(str(config.tokenizer.expanduser().resolve()))
    cameras = match_cameras(config, description, spec)
    check_sizes(description, spec)
    policy, pipelines = instantiate(description, seed=seed)
    take_weights(policy, read_weights(folder), str(folder / WEIGHTS))
    return assemble(config, spec, policy, pipelines, description=description, cameras=cameras, seed=seed)


def from_parts(config: SmolVLAConfig | LeRobotConfig, metadata: Mapping[str, Any], weights: Weights) -> LeRobotPolicy:
    """Rebuild a stored policy. ``config`` may choose other settings for it (LeRobotSettings), not other sizes."""
    if isinstance(config, SmolVLAConfig):
        for name in sorted(SmolVLAConfig.model_fields.keys() - OUR_KEYS):
            have, want = metadata["config"][name], config.model_dump(mode="json")[name]
            if have != want:
                raise ValueError(f"{name} is {want}, but the stored policy has {have}.")
    made = type(config).model_validate(metadata["config"])
    description, spec = Description.from_json(metadata["lerobot"]), spec_from_json(metadata["spec"])
    policy, pipelines = instantiate(description, seed=0)
    network = make_network(made, policy, description, seed=0)
    load_strictly(network, weights)
    same = made.tune == config.tune and made.sampler == config.sampler
    return assemble(
        config,
        spec,
        network.policy if same else plain_policy(network),
        pipelines,
        description=description,
        cameras=metadata["cameras"],
        seed=0,
        network=network if same else None,
    )


def assemble(
    config: SmolVLAConfig | LeRobotConfig,
    spec: EnvSpec,
    policy: PreTrainedPolicy,
    pipelines: Pipelines,
    *,
    description: Description,
    cameras: Mapping[str, str],
    seed: int,
    network: Network | None = None,
) -> LeRobotPolicy:
    """``network``: with adapters and noise head, where there is one already."""
    network = network or make_network(config, policy, description, seed=seed)
    low, high = (config.action_low, config.action_high) if isinstance(config, LeRobotConfig) else (None, None)
    if low is not None and len(low) != spec.action_dim:
        raise ValueError(f"policy.action_low has {len(low)} numbers, the env {spec.action_dim} action dims.")
    check_sentences(pipelines[0], spec)
    processors = Processors(
        pipelines,
        cameras=cameras,
        action_low=None if low is None else np.array(low, np.float32),
        action_high=None if high is None else np.array(high, np.float32),
    )
    names = [name for name, _ in network.named_parameters()]
    groups = Groups.of(names, LAYOUTS[description.type])
    if not groups.trained(config.tune):
        raise ValueError(f"a {description.type} has no action expert apart; set policy.tune to {{type: full}}.")
    return LeRobotPolicy(
        config,
        spec,
        description=description,
        network=network,
        groups=groups,
        denoiser=make_denoiser(config, network, description),
        processors=processors,
        origin={"cameras": dict(cameras)},
        window=description.config["n_obs_steps"],
    )


def make_network(config: LeRobotSettings, policy: PreTrainedPolicy, description: Description, *, seed: int) -> Network:
    """The policy with the parameters that the settings add to it."""
    if isinstance(config.tune, AdapterTuning):
        add_adapters(policy, LAYOUTS[description.type].expert, config.tune, seed=seed)
    if not isinstance(config.sampler, NoiseSampler):
        return Network(policy, None)
    sampler = config.sampler
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = NoiseHead(action_width(description), hidden=sampler.hidden, low=sampler.low, high=sampler.high)
    return Network(policy, head)


def make_denoiser(config: LeRobotSettings, network: Network, description: Description) -> Denoiser:
    """The chain that the settings want of the policy.

    Raises:
        ValueError: they want one that it does not have.
    """
    values, sampler, kind = description.config, config.sampler, description.type
    fits = {"act": GaussianSampler, "diffusion": DdpmSampler}.get(kind, SdeSampler | HybridSampler | NoiseSampler)
    if not isinstance(sampler, fits):
        wanted = {"act": "gaussian", "diffusion": "ddpm"}.get(kind, "sde, hybrid or noise")
        raise ValueError(f"policy.sampler {sampler.type} is not for a {kind}; use {wanted}.")
    compute = torch.bfloat16 if config.compute == "bfloat16" else torch.float32
    if isinstance(sampler, GaussianSampler):
        shape = values["chunk_size"], action_width(description)
        return ActDenoiser(network=network, shape=shape, std=sampler.std, compute=compute)
    if isinstance(sampler, DdpmSampler):
        return DiffusionDenoiser(
            network=network,
            shape=(values["horizon"], action_width(description)),
            num_steps=config.denoising_steps or values["num_inference_steps"] or values["num_train_timesteps"],
            offset=values["n_obs_steps"] - 1,
            std_floor=sampler.std_floor,
            compute=compute,
        )
    family = FAMILIES[kind]
    num_steps = config.denoising_steps or values[family.steps_key]
    if isinstance(sampler, HybridSampler) and sampler.steps > num_steps:
        raise ValueError(f"policy.sampler.steps {sampler.steps} exceeds the {num_steps} denoising steps.")
    law = (1.5, 0.999, 0.001)  # SmolVLA has these in its code
    if "time_sampling_beta_alpha" in values:
        if values["time_sampling_beta_beta"] != 1.0:
            raise ValueError(f"time_sampling_beta_beta is {values['time_sampling_beta_beta']}; only 1 is supported.")
        law = tuple(values[f"time_sampling_{name}"] for name in ("beta_alpha", "scale", "offset"))
    return FlowDenoiser(
        network=network,
        family=family,
        num_steps=num_steps,
        shape=(values["chunk_size"], action_width(description)),
        noise=0.0 if isinstance(sampler, NoiseSampler) else sampler.noise,
        time_law=law,
        compute=compute,
        checkpointing=config.checkpointing,
        compiled=config.compiled,
    )


def action_width(description: Description) -> int:
    """Action dims of the model, padding included."""
    return description.config.get("max_action_dim") or description.config["output_features"][ACTION]["shape"][0]
