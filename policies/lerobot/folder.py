"""LeRobot's own objects from a described folder, and its weights: strictly, and without waiting for an absent hub."""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import draccus
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from safetensors import SafetensorError
from safetensors.torch import load_file

from vla_rlaif.policies.lerobot.description import PROCESSORS, WEIGHTS, Description
from vla_rlaif.policies.lerobot.processors import Pipelines

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json")
VLM_FILES = ("*.json", "*.model", "*.txt")
HUB_TIMEOUT_S = 2.0


def local(name: str, wanted: Sequence[str], what: str, revision: str | None = None) -> Path:
    """A folder for a path or hub id: what the hub's cache has of it is taken without asking the hub.

    Raises:
        ValueError: there is neither, and the hub does not answer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")):
        raise ValueError(f"{what}: there is no folder {name}.")
    for offline in (True, False):
        try:
            found = snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(wanted),
                local_files_only=offline,
                etag_timeout=HUB_TIMEOUT_S,
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
            reason = str(error).splitlines()[0]
            continue
        if any(Path(found).glob(pattern) for pattern in wanted):
            return Path(found)
        reason = f"it has none of {', '.join(wanted)}"
    raise ValueError(
        f"{what} {name!r} is no folder, not in the hub's cache, and the hub did not give it ({reason}). Download it "
        "where there is a network (`hf download`), or name a folder."
    )


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {WEIGHTS}; copy the folder again.") from None
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged or incomplete: {error}. Copy it again.") from None


def whole(description: Description) -> Description:
    """As a folder whose own weights are all that it needs: LeRobot would fetch those of its VLM first, and hold that in
    bfloat16."""
    if "load_vlm_weights" not in description.config:
        return description
    return Description(**{**vars(description), "config": {**description.config, "load_vlm_weights": False}})


def with_options(description: Description, options: Mapping[str, Any]) -> Description:
    for name in options:
        if name not in description.config or name in ("type", "input_features", "output_features"):
            near = get_close_matches(name, list(description.config), n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(description.config))}."
            raise ValueError(f"policy.options names {name!r}, no key of a {description.type}'s config.json; {hint}")
    return Description(**{**vars(description), "config": {**description.config, **options}})


def instantiate(description: Description, *, seed: int, pretrained: bool = False) -> tuple[PreTrainedPolicy, Pipelines]:
    """LeRobot's policy with random weights, on the CPU, and its processors. ``pretrained``: with those of the VLM or
    image encoder that the config names.

    Raises:
        ValueError: LeRobot cannot make it, or a file that it needs is not there.
    """
    with TemporaryDirectory() as made, _quiet():
        folder = Path(made)
        described = _resolved(description, folder)
        described.write(folder, final=folder)
        try:
            config = PreTrainedConfig.from_pretrained(folder)
        except draccus.utils.DecodingError as error:
            raise ValueError(f"LeRobot does not read this config.json: {error}") from None
        wanted = (
            ("compile_model",) if pretrained else ("compile_model", "load_vlm_weights", "pretrained_backbone_weights")
        )
        for name in wanted:
            if name in description.config:
                setattr(config, name, None if name.startswith("pretrained") else False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy = get_policy_class(config.type)(config)
        if pretrained:
            policy.float()  # upstream loads a VLM, and makes its expert, in bfloat16, in which small updates are lost
        pipelines = _pipelines(config, described, folder)
    return policy.to("cpu").eval(), pipelines


def _pipelines(config: PreTrainedConfig, description: Description, folder: Path) -> Pipelines:
    """On the CPU, whatever machine saved them."""
    cpu = {"device_processor": {"device": "cpu"}}
    names = [{s.get("registry_name") for s in description.processors[name]["steps"]} for name in PROCESSORS]
    pre, post = (cpu if "device_processor" in found else {} for found in names)
    try:
        return make_pre_post_processors(
            config, pretrained_path=str(folder), preprocessor_overrides=pre, postprocessor_overrides=post
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"LeRobot cannot make the processors of this {config.type}: {error}") from None


def _resolved(description: Description, folder: Path) -> Description:
    """With paths in place of hub ids, so that no library asks the hub on its own, with retries."""
    config = dict(description.config)
    tokenizer, vlm = description.tokenizer, config.get("vlm_model_name")
    if description.vlm:
        return description
    if vlm is not None:
        wanted = (*VLM_FILES, "*.safetensors") if config.get("load_vlm_weights") else VLM_FILES
        config["vlm_model_name"] = str(local(vlm, wanted, "the VLM of this policy"))
    changed = Description(**{**vars(description), "config": config})
    if tokenizer is None:
        return changed
    found = local(tokenizer, TOKENIZER_FILES, "the tokenizer of this policy")
    if not any((found / name).exists() for name in TOKENIZER_FILES[:3]):
        raise ValueError(f"{found} has no tokenizer ({' or '.join(TOKENIZER_FILES[:3])}); set policy.tokenizer.")
    return changed.with_tokenizer(str(found))


@torch.no_grad()
def take_weights(policy: PreTrainedPolicy, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Every tensor of the policy from the file, and every tensor of the file into the policy: LeRobot's own loader of
    pi0 prints what went wrong and goes on with random weights.

    Raises:
        ValueError: a name is missing, unexpected or has another shape.
    """
    own = policy.state_dict(keep_vars=True)
    if not any(name in own for name in weights):
        weights = {f"model.{name}": value for name, value in weights.items()}  # openpi's names, as LeRobot takes them
    groups: dict[int, list[str]] = {}  # tied parameters are one group, of which a file may have any
    for name, value in own.items():
        groups.setdefault(id(value), []).append(name)
    missing = [names[0] for names in groups.values() if not any(name in weights for name in names)]
    unexpected = sorted(weights.keys() - own.keys())
    shared = {name: value for name, value in weights.items() if name in own}
    wrong = [f"{k} {tuple(v.shape)}, not {tuple(own[k].shape)}" for k, v in shared.items() if v.shape != own[k].shape]
    problems = (("lacks", missing), ("has beyond the policy", unexpected), ("has of another shape", wrong))
    found = [f"{text} {len(names)} tensors ({', '.join(names[:3])})" for text, names in problems if names]
    if found:
        raise ValueError(f"{source} does not fit the policy of its config.json: it {'; '.join(found)}.")
    for name, value in weights.items():
        own[name].copy_(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """LeRobot prints while it constructs."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
