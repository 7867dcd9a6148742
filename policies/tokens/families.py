"""What differs between the vision-language models of transformers that a token policy can be: a class each.

A model that is not listed is refused: its logits may be post-processed, or its positions counted, in another way.
Axes: N rows, C cameras, L prompt tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

Images = UInt8[Tensor, "N C 3 height width"]


@runtime_checkable
class Family(Protocol):
    """How a model is told of images, beyond token ids."""

    @property
    def image_mark(self) -> str:
        """What stands for one image in a prompt that the model's own processor expands."""
        ...

    def image_text(self, num_tokens: int) -> str:
        """What that becomes for an image that takes ``num_tokens`` tokens."""
        ...

    def pixels(self, image_processor: Any, images: Images) -> dict[str, Tensor]:
        """The images as the model's forward takes them."""
        ...

    def num_tokens(self, processor: Any, pixels: Mapping[str, Tensor], num_images: int) -> int:
        """Of one image, given ``pixels`` of ``num_images`` equal ones."""
        ...

    def forward_keys(self, ids: Int[Tensor, "N L"], mask: Int[Tensor, "N L"], num_written: int) -> dict[str, Tensor]:
        """What forward wants besides ids, mask and pixels; the last ``num_written`` tokens are the model's own."""
        ...


def positions(mask: Int[Tensor, "N L"], first: int) -> Int[Tensor, "N L"]:
    """Of the tokens behind left padding, counted from ``first``; as transformers' generate counts."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0) + first


@dataclass(frozen=True, kw_only=True)
class Qwen:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: images of any size, three-dimensional positions that forward counts itself."""

    image_id: int
    image_mark: str = "<|vision_start|><|image_pad|><|vision_end|>"

    def image_text(self, num_tokens: int) -> str:
        return "<|vision_start|>" + "<|image_pad|>" * num_tokens + "<|vision_end|>"

    def pixels(self, image_processor: Any, images: Images) -> dict[str, Tensor]:
        out = image_processor(images=list(images.flatten(0, 1)), return_tensors="pt")
        return {"pixel_values": out["pixel_values"], "image_grid_thw": out["image_grid_thw"]}

    def num_tokens(self, processor: Any, pixels: Mapping[str, Tensor], num_images: int) -> int:
        return int(pixels["image_grid_thw"].prod(-1).sum()) // processor.image_processor.merge_size**2 // num_images

    def forward_keys(self, ids: Int[Tensor, "N L"], mask: Int[Tensor, "N L"], num_written: int) -> dict[str, Tensor]:
        return {"mm_token_type_ids": (ids == self.image_id).int()}


@dataclass(frozen=True, kw_only=True)
class Idefics:
    """Idefics3 and SmolVLM: images are scaled to one size and not split into tiles."""

    image_mark: str = "<image>"

    def image_text(self, num_tokens: int) -> str:
        around = "<fake_token_around_image>"
        return around + "<global-img>" + "<image>" * num_tokens + around

    def pixels(self, image_processor: Any, images: Images) -> dict[str, Tensor]:
        rows = [list(row) for row in images]
        out = image_processor(images=rows, do_image_splitting=False, return_tensors="pt")
        return {"pixel_values": out["pixel_values"], "pixel_attention_mask": out["pixel_attention_mask"]}

    def num_tokens(self, processor: Any, pixels: Mapping[str, Tensor], num_images: int) -> int:
        return processor.image_seq_len

    def forward_keys(self, ids: Int[Tensor, "N L"], mask: Int[Tensor, "N L"], num_written: int) -> dict[str, Tensor]:
        return {"position_ids": positions(mask, 0)}


@dataclass(frozen=True, kw_only=True)
class PaliGemma:
    """PaliGemma (pi0-FAST's model): prompt tokens attend to each other both ways, positions count from 1."""

    image_mark: str = "<image>"

    def image_text(self, num_tokens: int) -> str:
        return "<image>" * num_tokens

    def pixels(self, image_processor: Any, images: Images) -> dict[str, Tensor]:
        out = image_processor(images=list(images.flatten(0, 1)), return_tensors="pt")
        return {"pixel_values": out["pixel_values"]}

    def num_tokens(self, processor: Any, pixels: Mapping[str, Tensor], num_images: int) -> int:
        return processor.image_seq_length

    def forward_keys(self, ids: Int[Tensor, "N L"], mask: Int[Tensor, "N L"], num_written: int) -> dict[str, Tensor]:
        written = torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - num_written
        return {"position_ids": positions(mask, 1), "token_type_ids": written.long().expand_as(ids)}


def family_of(model: Any) -> Family:
    """Of a transformers model.

    Raises:
        ValueError: the model is none of those above.
    """
    kind = model.config.model_type
    if kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        return Qwen(image_id=model.config.image_token_id)
    if kind in ("idefics3", "smolvlm"):
        return Idefics()
    if kind == "paligemma":
        if model.config.text_config.model_type != "gemma":
            raise ValueError(
                f"paligemma on {model.config.text_config.model_type}: only on gemma; the second caps its logits."
            )
        return PaliGemma()
    raise ValueError(
        f"the folder holds a {kind}; a token policy can be a qwen2_vl, qwen2_5_vl, qwen3_vl, idefics3, smolvlm or "
        "paligemma."
    )
