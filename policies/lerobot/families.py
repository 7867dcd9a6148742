"""How each of LeRobot's flow policies embeds its prefix and computes a velocity: its own pieces, in its own order.

Nothing here computes anything that LeRobot does not: ``tests/policies/test_lerobot_flow.py`` holds Euler's method on
these pieces to ``predict_action_chunk``, bit for bit, so a change upstream is seen.

Axes: R rows, L prefix tokens, H actions of the model's chunk, W action dims of the model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from transformers import DynamicCache

Condition = Mapping[str, torch.Tensor]  # what a denoising step reads of the observation, leaves "R ..."
Batch = Mapping[str, torch.Tensor]  # LeRobot's batch
MASK, PREFIX_STATE = "mask", "state"
LoadedPolicy = Any  # a PreTrainedPolicy; which attributes it has depends on its class, so pyright cannot know them


@dataclass(frozen=True, kw_only=True)
class FlowFamily:
    """One class of flow policies."""

    steps_key: str  # of the config: the number of denoising steps
    tail: int  # prefix tokens after the language's
    condition: Callable[[LoadedPolicy, Batch], dict[str, torch.Tensor]]  # the prefix pass
    velocity: Callable[
        [LoadedPolicy, Condition, Float[torch.Tensor, "R H W"], Float[torch.Tensor, " R"]], Float[torch.Tensor, "R H W"]
    ]


def _smolvla_condition(policy: LoadedPolicy, batch: Batch) -> dict[str, torch.Tensor]:
    model, batch = policy.model, dict(batch)
    images, image_masks = policy.prepare_images(batch)
    embedded, mask, attention = model.embed_prefix(
        images,
        image_masks,
        batch[OBS_LANGUAGE_TOKENS],
        batch[OBS_LANGUAGE_ATTENTION_MASK],
        state=policy.prepare_state(batch),
    )
    _, cache = model.vlm_with_expert.forward(
        attention_mask=make_att_2d_masks(mask, attention),
        position_ids=torch.cumsum(mask, dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    return {MASK: mask, **_flat(cache)}


def _smolvla_velocity(policy: LoadedPolicy, condition: Condition, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    return policy.model.denoise_step(
        prefix_pad_masks=condition[MASK], past_key_values=_cache(condition), x_t=x, timestep=time
    )


def _gemma_prefix(policy: LoadedPolicy, batch: Batch) -> dict[str, torch.Tensor]:
    model = policy.model
    images, image_masks = policy._preprocess_images(batch)  # upstream has no public name for it
    embedded, mask, attention = model.embed_prefix(
        images, image_masks, batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
    )
    both = model.paligemma_with_expert
    both.paligemma.model.language_model.config._attn_implementation = "eager"  # as sample_actions does
    _, cache = both.forward(
        attention_mask=prepare_attention_masks_4d(make_att_2d_masks(mask, attention)),
        position_ids=torch.cumsum(mask, dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    return {MASK: mask, **_flat(cache)}


def _pi0_condition(policy: LoadedPolicy, batch: Batch) -> dict[str, torch.Tensor]:
    return {PREFIX_STATE: policy.prepare_state(batch), **_gemma_prefix(policy, batch)}


def _pi0_velocity(policy: LoadedPolicy, condition: Condition, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    return policy.model.denoise_step(
        state=condition[PREFIX_STATE],
        prefix_pad_masks=condition[MASK],
        past_key_values=_cache(condition),
        x_t=x,
        timestep=time,
    )


def _pi05_velocity(policy: LoadedPolicy, condition: Condition, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    return policy.model.denoise_step(
        prefix_pad_masks=condition[MASK], past_key_values=_cache(condition), x_t=x, timestep=time
    )


def _flat(cache: Iterable[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """Of a DynamicCache, which gives the keys, the values and something else of every layer."""
    layers = [(layer[0], layer[1]) for layer in cache]
    keys = {f"key/{i}": key for i, (key, _) in enumerate(layers)}
    return keys | {f"value/{i}": value for i, (_, value) in enumerate(layers)}


def _cache(condition: Condition) -> DynamicCache:
    """A fresh one for every call: denoising steps append to it."""
    num = sum(name.startswith("key/") for name in condition)
    return DynamicCache(tuple((condition[f"key/{i}"], condition[f"value/{i}"]) for i in range(num)))


FAMILIES = {
    "smolvla": FlowFamily(steps_key="num_steps", tail=1, condition=_smolvla_condition, velocity=_smolvla_velocity),
    "pi0": FlowFamily(steps_key="num_inference_steps", tail=0, condition=_pi0_condition, velocity=_pi0_velocity),
    "pi05": FlowFamily(steps_key="num_inference_steps", tail=0, condition=_gemma_prefix, velocity=_pi05_velocity),
}
