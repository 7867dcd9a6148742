"""An official Octo folder as a policy for an environment, and a policy as an official folder.

Axes: K sentences, n tokens of one, L feature width.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_rlaif.policies.octo.action_stats import ActionStatistics
from vla_rlaif.policies.octo.adapt import PROPRIO as PROPRIO_TOKENS
from vla_rlaif.policies.octo.adapt import adapted_spec, merge
from vla_rlaif.policies.octo.construct import adapters, make_embodiment, make_origin, plain_weights, settings_of
from vla_rlaif.policies.octo.initial import initial_params
from vla_rlaif.policies.octo.language import Sentences
from vla_rlaif.policies.octo.network import PROPRIO, REFERENCE, TABLE, OctoNetwork
from vla_rlaif.policies.octo.official import OfficialFolder, read_folder, statistics_for, write_folder
from vla_rlaif.policies.octo.policy import OctoPolicy
from vla_rlaif.policies.octo.spec import DiffusionSpec, ImageSpec, LanguageSpec, LowdimSpec, ModelSpec
from vla_rlaif.policies.octo.statistics import Statistics
from vla_rlaif.policies.octo.text import T5Features, load_tokenizer
from vla_rlaif.policies.octo.tokenizers import matching
from vla_rlaif.policy_config import OctoCheckpointConfig
from vla_rlaif.types import EnvSpec

T5 = "octo_transformer/task_tokenizers_"  # parameters of language encoders begin with this
CACHE = Path("~/.cache/vla_rlaif/t5")


def from_folder(
    config: OctoCheckpointConfig, env: EnvSpec, *, seed: int, statistics: Statistics | None = None
) -> OctoPolicy:
    """Read, adapt to the env, and say in ``origin["adaptation"]`` what was taken over.

    ``statistics`` are those of the demonstrations that the policy will imitate, in place of the folder's.

    Raises:
        ValueError: something that the env needs is missing in the folder, or the other way round, and the config does
            not say that it may be; or the sentences of the env cannot be encoded.
    """
    official = read_folder(config.folder, config.step)
    cameras = _cameras(config, official, env)
    model = _adapted(config, official, env, cameras)
    sentences = _features(config, official, env)
    body = make_embodiment(env, cameras, (sentences.shape[1], sentences.shape[2]))
    network = OctoNetwork(model, settings_of(config), body)
    shapes = network.shapes()
    loaded = {k: v for k, v in official.params.items() if not k.startswith(T5)}
    passengers = {k: v for k, v in loaded.items() if k not in shapes and _of_absent_camera(k, model, cameras)}
    new = (*config.allow_new, *(["heads_action/*"] if config.new_head else []))
    new += ("*obs_proprio_*",) if config.proprio and _proprio(official.spec) is None else ()
    skip = (*config.skip, *(["heads_action/*"] if config.new_head else []))
    params, report = merge(
        {k: v for k, v in loaded.items() if k not in passengers},
        initial_params(shapes, seed),
        allow_new=new,
        skip=skip,
    )
    adaptation = {**report.to_json(), "summary": str(report)}
    origin = make_origin(config, network, env) | {"adaptation": adaptation}
    return OctoPolicy(
        network,
        env,
        language=Sentences(env.instructions),
        statistics=statistics or _statistics(config, official, env),
        params=params | passengers | adapters(network, seed) | {TABLE: sentences},
        origin=origin | {"source": {"folder": str(config.folder.resolve()), "step": official.step}},
    )


def export_folder(policy: OctoPolicy, to: Path, *, step: int) -> None:
    """Write an official folder that the original Octo code loads. Adapters are added into their kernels.

    The language encoder and all that the policy did not change come from the folder that it was made from.

    Raises:
        ValueError: the policy was not made from an official folder, so upstream has no parts for it.
    """
    source = policy.origin.get("source")
    if source is None:
        raise ValueError(
            "this policy was made from scratch, with a word table for language that upstream does not have. Export "
            "needs one that began as an official folder (policy.type: octo_checkpoint)."
        )
    official = read_folder(Path(source["folder"]), source["step"])
    kept = {k: v for k, v in official.params.items() if k.startswith(T5)}
    own = {k: np.asarray(v) for k, v in policy.params.items() if k != TABLE and not k.startswith(REFERENCE)}
    params = plain_weights(own, policy.network.settings)
    config = {**official.config, "model": policy.network.model.to_official(), "window_size": policy.window}
    write_folder(
        to,
        step=step,
        params=dict(sorted((kept | params).items())),
        config=json.loads(json.dumps(config)),
        example_batch=_example_batch(policy, official),
        statistics=_official_statistics(policy, official),
    )


def _cameras(config: OctoCheckpointConfig, official: OfficialFolder, env: EnvSpec) -> tuple[tuple[str, str, int], ...]:
    """(observation key, camera, pixels that the model wants) of every camera that is fed."""
    seen: Mapping[str, Any] = official.example_batch["observation"]
    keys = ", ".join(sorted(k for k in seen if k.startswith("image_")))
    if not config.cameras:
        raise ValueError(f"policy.cameras is empty: name at least one of the model's inputs {keys}.")
    found = []
    for key, camera in config.cameras.items():
        if camera not in env.cameras:
            raise ValueError(
                f"policy.cameras feeds {key} from {camera!r}; the env has the cameras {', '.join(env.cameras)}, "
                f"the model the inputs {keys}. Change the mapping, or leave {key} out."
            )
        if key in seen and key in config.image_sizes:
            raise ValueError(f"policy.image_sizes sets {key}, but the folder says {seen[key].shape[-2]} pixels.")
        pixels = seen[key].shape[-2] if key in seen else config.image_sizes.get(key, env.image_size)
        found.append((key, camera, int(pixels)))
    idle = sorted(config.image_sizes.keys() - config.cameras.keys())
    if idle:
        raise ValueError(f"policy.image_sizes names {idle[0]!r}, which is not in policy.cameras.")
    return tuple(found)


def _adapted(
    config: OctoCheckpointConfig, official: OfficialFolder, env: EnvSpec, cameras: tuple[tuple[str, str, int], ...]
) -> ModelSpec:
    """The folder's model, with tokenizers for new cameras and proprioception, and a new head if wanted."""
    spec = official.spec
    if not any(isinstance(part, LanguageSpec) for _, part in spec.task_tokenizers):
        raise ValueError("the model has no language tokenizer; a policy here is told its task in words.")
    images = {name: part for name, part in spec.observation_tokenizers if isinstance(part, ImageSpec)}
    readers = {name: matching(part.obs_stack_keys, [key for key, _, _ in cameras]) for name, part in images.items()}
    read = {key for keys in readers.values() for key in keys}
    wanted = {
        name: keys[0] if keys else part.obs_stack_keys[0]
        for (name, part), keys in zip(images.items(), readers.values(), strict=True)
    }
    wanted |= {key.removeprefix("image_"): key for key, _, _ in cameras if key not in read}
    proprio = _proprio(spec)
    if config.proprio and proprio is None:
        spec = adapted_spec(spec, add_lowdim={PROPRIO: PROPRIO_TOKENS})
    if len(wanted) > len(images):
        spec = adapted_spec(spec, cameras=wanted)
    if config.new_head:
        head = spec.head if isinstance(spec.head, DiffusionSpec) else DiffusionSpec(readout_key=spec.head.readout_key)
        return adapted_spec(spec, head=head, action_horizon=env.chunk, action_dim=env.action_dim)
    return spec


def _proprio(spec: ModelSpec) -> str | None:
    """The tokenizer that reads proprioception."""
    return next(
        (n for n, p in spec.observation_tokenizers if isinstance(p, LowdimSpec) and matching(p.obs_keys, [PROPRIO])),
        None,
    )


def _of_absent_camera(name: str, model: ModelSpec, cameras: tuple[tuple[str, str, int], ...]) -> bool:
    """Whether a parameter serves only inputs that are not fed: such tokens are left out, and kept for the export."""
    fed = [key for key, _, _ in cameras]
    absent = [
        n for n, p in model.observation_tokenizers if isinstance(p, ImageSpec) and not matching(p.obs_stack_keys, fed)
    ]
    parts = name.split("/")[1] if "/" in name else name
    return any(parts == f"observation_tokenizers_{n}" or parts.startswith(f"obs_{n}_p") for n in absent)


def _features(config: OctoCheckpointConfig, official: OfficialFolder, env: EnvSpec) -> np.ndarray:
    """[K n L] of the sentences that the env can say."""
    name = next(n for n, part in official.spec.task_tokenizers if isinstance(part, LanguageSpec))
    return encoder(official, config.folder, config.tokenizer, name)(env.instructions)


def encoder(official: OfficialFolder, folder: Path, tokenizer: Path | None, name: str = "language") -> T5Features:
    """The folder's language encoder as a function of sentences, cached on disk."""
    text = official.config.get("text_processor") or {}
    kwargs = text.get("kwargs", {})
    wanted = str(tokenizer or kwargs.get("tokenizer_name", "t5-base"))
    length = kwargs.get("tokenizer_kwargs", {}).get("max_length", 16)
    rules = load_tokenizer(wanted, near=folder, local_only=False, max_length=length)
    return T5Features(official.params, rules, CACHE.expanduser(), task_tokenizer=name)


def _statistics(config: OctoCheckpointConfig, official: OfficialFolder, env: EnvSpec) -> Statistics:
    """Of the folder's data, for the env's dims; whoever imitates measures new ones on the demonstrations."""
    if config.new_head:
        if config.dataset is not None:
            raise ValueError("policy.dataset names statistics of old actions, but policy.new_head starts new ones.")
        return Statistics.identity(env.action_dim, env.state_dim)
    chosen = statistics_for(official.statistics, config.dataset)
    action = ActionStatistics.from_official(chosen["action"], dataset=config.dataset)
    if len(action.mean) != env.action_dim:
        raise ValueError(
            f"the statistics of {config.dataset or 'the folder'} have {len(action.mean)} action dims, the env has "
            f"{env.action_dim}: another robot's actions mean nothing here. Use policy.new_head: true and imitate."
        )
    return Statistics.from_official(action, _state_statistics(chosen.get("proprio"), official.spec, env))


def _state_statistics(proprio: Mapping[str, Any] | None, spec: ModelSpec, env: EnvSpec) -> ActionStatistics:
    """Proprioception as the model was trained to read it; raw for one that does not read it."""
    if _proprio(spec) is None:
        ones = np.ones(env.state_dim, np.float32)
        return ActionStatistics(mean=0 * ones, std=ones, mask=ones > 0)
    if proprio is None:
        raise ValueError("the model reads proprioception, but the folder has no statistics of it.")
    found = ActionStatistics.from_official(proprio)
    if len(found.mean) != env.state_dim:
        raise ValueError(f"the model reads {len(found.mean)} numbers of proprioception, the env has {env.state_dim}.")
    return found


def _official_statistics(policy: OctoPolicy, official: OfficialFolder) -> dict[str, Any]:
    """As a fine-tuned folder has them: flat, of the one robot that this policy is for."""
    own = policy.statistics
    action = {"mean": own.action_mean, "std": own.action_std, "mask": np.ones(len(own.action_mean), bool)}
    return {"action": action, "proprio": {"mean": own.state_mean, "std": own.state_std}}


def _example_batch(policy: OctoPolicy, official: OfficialFolder) -> dict[str, Any]:
    """The folder's example with this policy's inputs, window and chunk; only shapes matter to upstream."""
    old, window, head = official.example_batch, policy.window, policy.network.head_spec
    absent = {k: v for k, v in old["observation"].items() if k.startswith("image_")}
    shapes = {k: v.shape[-3:] for k, v in absent.items()} | {k: (s, s, 3) for k, _, s in policy.network.body.cameras}
    images = {k: np.zeros((1, window, *shape), np.uint8) for k, shape in shapes.items()}
    observation: dict[str, Any] = {
        **images,
        "timestep": np.arange(window, dtype=np.int32)[None],
        "timestep_pad_mask": np.ones((1, window), bool),
        "task_completed": np.zeros((1, window, head.action_horizon), bool),
    }
    if _proprio(policy.network.model) is not None:
        observation[PROPRIO] = np.zeros((1, window, policy.spec.state_dim), np.float32)
    flags = {
        k: np.ones((1, window), bool) for k in (*images, "timestep", *([PROPRIO] if PROPRIO in observation else []))
    }
    task: dict[str, Any] = {k: v for k, v in old["task"].items() if not k.startswith("image_") and k != "pad_mask_dict"}
    task |= {k: v[:, 0] for k, v in images.items()}
    task["pad_mask_dict"] = {k: np.ones(1, bool) for k in task}
    chunk = (1, window, head.action_horizon, head.action_dim)
    return {
        "observation": observation | {"pad_mask_dict": flags},
        "task": task,
        "action": np.zeros(chunk, np.float32),
        "action_pad_mask": np.ones(chunk, bool),
    }
