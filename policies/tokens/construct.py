"""Token policies, made: with random weights, from a transformers folder, from what ``save_policy`` stored."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from vla_rlaif.policies.specs import spec_from_json
from vla_rlaif.policies.tokens.bins import NUM_BINS, Bins, action_names
from vla_rlaif.policies.tokens.families import family_of
from vla_rlaif.policies.tokens.folder import dataset_bins, load_model
from vla_rlaif.policies.tokens.policy import TokenPolicy
from vla_rlaif.policies.tokens.prompts import Prompter
from vla_rlaif.policies.tokens.tiny import build_tiny
from vla_rlaif.policies.tokens.tuning import adapt, merged_tensors
from vla_rlaif.token_config import FolderVLMConfig, TokenVLAConfig
from vla_rlaif.torch_weights import as_arrays
from vla_rlaif.tune_config import FullTuning, LoraTuning, TuneConfig
from vla_rlaif.types import EnvSpec, Weights


def build(config: TokenVLAConfig, env: EnvSpec, *, seed: int, bins: Bins | None = None) -> TokenPolicy:
    """A fresh policy. ``bins`` are those of the demonstrations that it will imitate; without them the folder's, or, for
    a tiny model, the env's bounds.

    Raises:
        ValueError: the folder is damaged or of the wrong kind, or has no statistics where they are needed.
    """
    if isinstance(config.vlm, FolderVLMConfig):
        model, processor = load_model(config.vlm, seed=seed)
        bins = bins or dataset_bins(config, env)
    else:
        pixels = config.image_size or env.image_size
        model, processor = build_tiny(
            config.vlm, sentences=env.instructions, prompt=config.prompt, image_size=pixels, seed=seed
        )
    if bins is None and (config.action_scale, config.bins) != ("env", "uniform"):
        raise ValueError(
            f"policy.action_scale {config.action_scale} with bins {config.bins} is measured on demonstrations: add a "
            "warm_start, or take a folder with statistics."
        )
    adapt(model, config.tune, seed)
    return _assembled(model, processor, config, env, bins or Bins.of_env(env.action_dim, env.state_dim))


def measured_bins(config: TokenVLAConfig, action: np.ndarray, state: np.ndarray) -> Bins:
    """Of demonstrations: rows of single actions and states in env units."""
    return Bins.measured(action, state, scale=config.action_scale, bins=config.bins)


def from_parts(config: TokenVLAConfig, metadata: Mapping[str, Any], weights: Weights) -> TokenPolicy:
    """Rebuild a stored policy. ``config`` may choose another way of acting and tuning for it; adapters that were
    trained are merged into the model then."""
    made = TokenVLAConfig.model_validate(metadata["config"])
    for name in ("vlm", "prompt", "image_size"):
        have, want = getattr(made, name), getattr(config, name)
        if have != want and not (name == "vlm" and _same_model(made, config)):
            raise ValueError(f"policy.{name} is {want!r}, but the stored policy has {have!r}.")
    env, bins = spec_from_json(metadata["spec"]), Bins.from_lists(metadata["bins"])
    if _adapters(made.tune) == _adapters(config.tune):
        policy = build(config, env, seed=0, bins=bins)
        policy.load(weights, 0)
        return policy
    merged = merged_weights(made, env, bins, weights)
    plain = build(config.model_copy(update={"tune": FullTuning()}), env, seed=0, bins=bins)
    plain.load(merged, 0)
    adapt(plain.module, config.tune, 0)
    return _assembled(plain.module, plain.prompter.processor, config, env, bins)


def merged_weights(config: TokenVLAConfig, env: EnvSpec, bins: Bins, weights: Weights) -> Weights:
    """Stored weights under the names of the model without adapters."""
    policy = build(config, env, seed=0, bins=bins)
    policy.load(weights, 0)
    return as_arrays(merged_tensors(policy.module))


def _adapters(tune: TuneConfig) -> LoraTuning | None:
    return tune if isinstance(tune, LoraTuning) else None


def _same_model(made: TokenVLAConfig, config: TokenVLAConfig) -> bool:
    """Folders may have moved, and parameters may be kept in another precision: the weights decide."""
    if not (isinstance(made.vlm, FolderVLMConfig) and isinstance(config.vlm, FolderVLMConfig)):
        return False
    return made.vlm.action_ids == config.vlm.action_ids


def _assembled(model: Any, processor: Any, config: TokenVLAConfig, env: EnvSpec, bins: Bins) -> TokenPolicy:
    dims = len(bins.action_low), len(bins.state_low)
    if dims != (env.action_dim, env.state_dim):
        raise ValueError(f"the bins are for {dims} action and state dims, the env has {env.action_dim, env.state_dim}.")
    prompter = Prompter(
        processor, family_of(model), template=config.prompt, spec=env, image_size=config.image_size, bins=bins
    )
    return TokenPolicy(model, prompter, config=config, spec=env, allowed=action_ids(config, processor.tokenizer))


def action_ids(config: TokenVLAConfig, tokenizer: Any) -> Int[np.ndarray, " D"]:
    """The vocabulary id of each bin; OpenVLA counts from the end: bin b is the last id but b."""
    if isinstance(config.vlm, FolderVLMConfig) and config.vlm.action_ids == "added":
        return np.array(tokenizer.convert_tokens_to_ids(action_names()))
    return tokenizer.vocab_size - 1 - np.arange(NUM_BINS)
