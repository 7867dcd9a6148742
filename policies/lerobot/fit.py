"""Whether a described folder fits an env, and how its cameras are fed; checked before anything is loaded."""

import json
from pathlib import Path
from typing import Any

from lerobot.configs.types import FeatureType
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.processor import PolicyProcessorPipeline, TokenizerProcessorStep
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from vla_rlaif.lerobot_config import LeRobotConfig
from vla_rlaif.policies.lerobot.description import Description
from vla_rlaif.policies.lerobot.layout import LAYOUTS
from vla_rlaif.types import EnvSpec


def read_statistics(path: Path) -> dict[str, Any]:
    """A LeRobotDataset's meta/stats.json."""
    try:
        return json.loads(path.expanduser().read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        hint = "Name a dataset's meta/stats.json."
        raise ValueError(f"policy.statistics {path} cannot be read: {error}. {hint}") from None


def check_type(description: Description) -> None:
    if description.type not in LAYOUTS:
        raise ValueError(
            f"the folder holds a policy of type {description.type!r}; those that can be tuned here are "
            f"{', '.join(sorted(LAYOUTS))}."
        )
    if description.config.get("adapt_to_pi_aloha"):
        raise ValueError("adapt_to_pi_aloha converts joints inside the policy, which is not supported here.")


def match_cameras(config: LeRobotConfig, description: Description, spec: EnvSpec) -> dict[str, str]:
    """Camera of the env by LeRobot key.

    Raises:
        ValueError: a key of either side has no partner and the config does not say that it may.
    """
    features = description.config["input_features"]
    empty = [f"{OBS_IMAGES}.empty_camera_{i}" for i in range(description.config.get("empty_cameras", 0))]
    keys = [k for k, feature in features.items() if feature["type"] == FeatureType.VISUAL.value and k not in empty]
    alike = {k: k.removeprefix(f"{OBS_IMAGES}.") for k in keys if k.removeprefix(f"{OBS_IMAGES}.") in spec.cameras}
    found = config.cameras or alike
    sides = f"The policy reads {', '.join(keys) or 'no camera'}; the env has {', '.join(spec.cameras) or 'none'}."
    for key, camera in found.items():
        if key not in keys:
            raise ValueError(f"policy.cameras names {key!r}, which the policy does not read. {sides}")
        if camera not in spec.cameras:
            raise ValueError(f"policy.cameras feeds {key} from {camera!r}, which the env does not have. {sides}")
    unknown = [key for key in config.absent_cameras if key not in keys]
    if unknown:
        raise ValueError(f"policy.absent_cameras names {unknown[0]!r}, which the policy does not read. {sides}")
    lost = [key for key in keys if key not in found and key not in config.absent_cameras]
    if lost or not found:
        raise ValueError(
            f"no camera of the env feeds {', '.join(lost) or 'the policy'}. {sides} Set policy.cameras (LeRobot key: "
            "camera), and policy.absent_cameras for what the policy does without."
        )
    return {key: found[key] for key in keys if key in found}


def adapted(description: Description, spec: EnvSpec, *, has_statistics: bool) -> Description:
    """For states and actions of the env's sizes, in a model that pads them.

    Raises:
        ValueError: it does not, they are larger than it is, or the statistics would be those of others.
    """
    for name, wanted in (("max_state_dim", spec.state_dim), ("max_action_dim", spec.action_dim)):
        room = description.config.get(name)
        if room is None:
            raise ValueError(f"policy.adapt is for models that pad states and actions; a {description.type} does not.")
        if room < wanted:
            raise ValueError(f"policy.adapt: the folder's {name} is {room}, the env needs {wanted}.")
    if not has_statistics:
        raise ValueError(
            "policy.adapt makes the folder's statistics those of other numbers: imitate demonstrations (warm_start) or "
            "name a dataset's stats.json as policy.statistics."
        )
    return description.with_sizes({OBS_STATE: spec.state_dim, ACTION: spec.action_dim})


def check_sizes(description: Description, spec: EnvSpec) -> None:
    """Raises ValueError where the folder's features are not the env's."""
    inputs, outputs = description.config["input_features"], description.config["output_features"]
    state = inputs.get(OBS_STATE, {"shape": [0]})["shape"][0]
    action, chunk = outputs[ACTION]["shape"][0], num_actions(description)
    sizes = ((OBS_STATE, state, spec.state_dim), (ACTION, action, spec.action_dim))
    wrong = [f"{key} of {have} dims, the env's has {want}" for key, have, want in sizes if have != want]
    if chunk < spec.chunk:
        wrong.append(f"chunks of {chunk} actions, the env executes {spec.chunk}")
    other = [k for k, f in inputs.items() if f["type"] not in (FeatureType.VISUAL.value, FeatureType.STATE.value)]
    if other:
        wrong.append(f"the input {other[0]}, which an env here does not give")
    if wrong:
        hint = "Set policy.adapt to imitate the env's." if "max_action_dim" in description.config else ""
        raise ValueError(f"the policy does not fit the env: it has {'; '.join(wrong)}. {hint}".rstrip())


def check_sentences(preprocessor: PolicyProcessorPipeline, spec: EnvSpec) -> None:
    """LeRobot cuts a sentence that is too long.

    Raises:
        ValueError: that would happen to one of the env's.
    """
    found: list[Any] = [step for step in preprocessor.steps if isinstance(step, TokenizerProcessorStep)]
    with_state = any(isinstance(step, Pi05PrepareStateTokenizerProcessorStep) for step in preprocessor.steps)
    for step in found:
        for said in spec.instructions:
            text = f"Task: {said}, State: {'255 ' * spec.state_dim};\nAction: " if with_state else f"{said}\n"
            num = len(step.input_tokenizer(text)["input_ids"])
            if num > step.max_length:
                raise ValueError(
                    f"{said!r} takes {num} tokens, the policy reads {step.max_length}: its end would be cut off. Set "
                    "policy.language_tokens, or tokenizer_max_length in the folder's processor."
                )


def num_actions(description: Description) -> int:
    """How many actions of a decision may be executed."""
    values = description.config
    return values["chunk_size"] if "chunk_size" in values else values["horizon"] - values["n_obs_steps"] + 1
