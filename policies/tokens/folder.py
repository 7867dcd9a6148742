"""Transformers folders in and out. Nothing in a folder is executed, downloaded or unpickled."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from vla_rlaif.checkpoint import WholeFolder
from vla_rlaif.policies.tokens.bins import Bins, action_names
from vla_rlaif.policies.tokens.families import family_of
from vla_rlaif.policies.tokens.policy import TokenPolicy
from vla_rlaif.policies.tokens.tuning import merged_tensors
from vla_rlaif.token_config import FolderVLMConfig, TokenVLAConfig
from vla_rlaif.tune_config import LoraTuning
from vla_rlaif.types import EnvSpec

STATISTICS = "dataset_statistics.json"  # OpenVLA's name for it; its config.json may have the same as `norm_stats`
_NEEDED = ("config.json", "tokenizer_config.json")


def load_model(config: FolderVLMConfig, *, seed: int) -> tuple[PreTrainedModel, Any]:
    """The model, its parameters exactly those of the folder, and the processor.

    Raises:
        ValueError: the folder lacks something, has too much, or holds a model of another kind.
    """
    folder = config.folder
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing or not list(folder.glob("*.safetensors")):
        what = missing[0] if missing else "*.safetensors (a folder of pickled weights must be converted first)"
        raise ValueError(f"{folder} is no transformers folder: {what} is missing.")
    settings = json.loads((folder / "config.json").read_text())
    if "auto_map" in settings and settings.get("model_type") not in known_types():
        raise ValueError(
            f"{folder} holds a {settings.get('model_type')!r}, which brings code of its own; it is not executed. "
            "docs/tokens.md says which models there are."
        )
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=getattr(torch, config.dtype), use_safetensors=True, output_loading_info=True, **local
        )
        model, found = loaded
        processor = AutoProcessor.from_pretrained(folder, **local)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be loaded as an image-text-to-text model: {error}") from None
    wrong = {name: sorted(map(str, values))[:3] for name, values in found.items() if values}
    if wrong:
        raise ValueError(f"the weights in {folder} are not those of its config.json: {wrong}.")
    family_of(model)
    if config.action_ids == "added":
        add_action_tokens(model, processor.tokenizer, seed)
    return model.eval(), processor


def known_types() -> frozenset[str]:
    return frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "paligemma"})


def add_action_tokens(model: Any, tokenizer: Any, seed: int) -> None:
    """Tokens for the bins behind all others, unless the folder has them already; their embeddings are random."""
    if not tokenizer.add_tokens(action_names()):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rows = max(len(tokenizer), model.get_input_embeddings().num_embeddings)
        model.resize_token_embeddings(rows, mean_resizing=False)


def dataset_bins(config: TokenVLAConfig, env: EnvSpec) -> Bins | None:
    """From the statistics in the config's folder; None if there are none.

    Raises:
        ValueError: there are several and ``vlm.dataset`` names none of them, or they do not fit the env.
    """
    assert isinstance(config.vlm, FolderVLMConfig)
    folder, wanted = config.vlm.folder, config.vlm.dataset
    path = folder / STATISTICS
    listed = json.loads((path if path.exists() else folder / "config.json").read_text())
    if not path.exists():
        listed = listed.get("norm_stats", {})
    if not listed and wanted is None:
        return None
    chosen = [name for name in listed if wanted in (None, name)]
    if len(chosen) != 1:
        have = ", ".join(sorted(listed)) or "none"
        raise ValueError(f"vlm.dataset is {wanted!r}; {folder} has statistics of: {have}. Name one of them.")
    entry = listed[chosen[0]]
    if "{state}" in config.prompt and "proprio" not in entry:
        raise ValueError(f"the prompt says the state, but the statistics in {folder} have no entry proprio.")
    return Bins.from_official(entry, env.action_dim, env.state_dim)


def export_folder(policy: TokenPolicy, to: Path, *, dataset: str = "vla_rlaif") -> None:
    """Write a folder that transformers, vLLM and ``vlm.type folder`` load: adapters merged, statistics beside it."""
    with WholeFolder(to) as part:
        save_model(policy, part)
        (part / STATISTICS).write_text(json.dumps({dataset: policy.bins.to_official()}, indent=1))


def save_model(policy: TokenPolicy, folder: Path) -> None:
    """The transformers part of an exported folder."""
    model = policy.module
    if isinstance(policy.config.tune, LoraTuning):
        model = AutoModelForImageTextToText.from_config(model.config, dtype=model.dtype)
        model.load_state_dict(merged_tensors(policy.module), strict=not model.config.tie_word_embeddings)
    model.save_pretrained(folder)
    policy.prompter.processor.save_pretrained(folder)
