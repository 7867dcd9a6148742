"""Small vision-language models of published architectures with random weights, made without any file.

Their vocabulary is the words of an env's instructions and of the prompt; its last 256 ids are the action bins.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PaliGemmaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
    SiglipImageProcessor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from vla_rlaif.policies.tokens.bins import NUM_BINS, action_names
from vla_rlaif.token_config import TinyVLMConfig

_MARKS = ["<pad>", "<unk>", "<bos>", "<eos>"]
_IMAGE_MARKS = {
    "qwen": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
    "idefics3": ["<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"],
    "paligemma": ["<image>"],
}
_CONTEXT = 4096  # tokens


def build_tiny(
    config: TinyVLMConfig, *, sentences: Sequence[str], prompt: str, image_size: int, seed: int
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A model in float32 and its processor, for square images of ``image_size`` pixels."""
    kind = "qwen" if config.family.startswith("qwen") else config.family
    words = word_list([*sentences, re.sub(r"\{\w+\}", " ", prompt)])
    if "{state}" in prompt:
        words += [str(n) for n in range(NUM_BINS) if str(n) not in words]
    tokenizer = _tokenizer(_IMAGE_MARKS[kind], words)
    makers = {"qwen": _qwen_processor, "idefics3": _idefics_processor, "paligemma": _paligemma_processor}
    processor = makers[kind](config, tokenizer, image_size)
    settings = _model_config(config, tokenizer, image_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(settings, dtype=torch.float32).eval(), processor


def word_list(sentences: Sequence[str]) -> list[str]:
    """Words and runs of punctuation, sorted."""
    return sorted({word for sentence in sentences for word in re.findall(r"\w+|[^\w\s]+", sentence)})


def _tokenizer(marks: list[str], words: list[str]) -> PreTrainedTokenizerFast:
    listed = [*_MARKS, *marks, *(w for w in words if w not in (*_MARKS, *marks))]
    listed += reversed(action_names())
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(listed)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "bos", "eos")}
    return PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=marks, **names)


def _model_config(config: TinyVLMConfig, tokenizer: Any, image_size: int) -> Any:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": _CONTEXT,
        **ids,
    }
    if config.family.startswith("qwen"):
        return _qwen_config(config, text, tokenizer)
    text |= {"head_dim": config.hidden_dim // config.num_heads}
    vision = {
        "hidden_size": config.vision_dim,
        "intermediate_size": 2 * config.vision_dim,
        "num_hidden_layers": config.vision_layers,
        "num_attention_heads": config.num_heads,
        "patch_size": config.patch_size,
        "image_size": fixed_size(config, image_size),
    }
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    if config.family == "idefics3":
        llama = {"model_type": "llama", **text}
        ids = {"image_token_id": image_id, "pad_token_id": tokenizer.pad_token_id}
        return AutoConfig.for_model("idefics3", text_config=llama, vision_config=vision, scale_factor=2, **ids)
    return AutoConfig.for_model(
        "paligemma",
        text_config={"model_type": "gemma", **text},
        vision_config={"model_type": "siglip_vision_model", "projection_dim": config.hidden_dim, **vision},
        image_token_index=image_id,
        projection_dim=config.hidden_dim,
        hidden_size=config.hidden_dim,
        tie_word_embeddings=False,
    )


def _qwen_config(config: TinyVLMConfig, text: dict[str, Any], tokenizer: Any) -> Any:
    half = config.hidden_dim // config.num_heads // 2
    side = 3 * half // 8
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * side, side, side]}
    narrow = {"hidden_size": config.vision_dim, "out_hidden_size": config.hidden_dim}
    narrow |= {"intermediate_size": 2 * config.vision_dim}
    vision = {"depth": config.vision_layers, "num_heads": config.num_heads, "patch_size": config.patch_size}
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    marks = {name: tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in names.items()}
    if config.family == "qwen2_vl":
        vision |= {"embed_dim": config.vision_dim, "mlp_ratio": 2, "hidden_size": config.hidden_dim}
    elif config.family == "qwen2_5_vl":
        vision |= {"window_size": 8 * config.patch_size, "fullatt_block_indexes": [config.vision_layers - 1], **narrow}
    else:
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0], **narrow}
        text |= {"head_dim": config.hidden_dim // config.num_heads}
        rope |= {"mrope_interleaved": True}
    text |= {"rope_parameters": rope}
    return AutoConfig.for_model(config.family, text_config=text, vision_config=vision, **marks)


def fixed_size(config: TinyVLMConfig, image_size: int) -> int:
    """Pixels of the images of a model that takes one size only: the next that has whole tokens."""
    unit = 2 * config.patch_size
    return -(-image_size // unit) * unit


def _qwen_processor(config: TinyVLMConfig, tokenizer: Any, image_size: int) -> ProcessorMixin:
    unit = 2 * config.patch_size
    size = {"shortest_edge": unit**2, "longest_edge": max(image_size, unit) ** 2 * 4}
    cut = {"patch_size": config.patch_size, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    images = Qwen2VLImageProcessor(**cut)
    if config.family == "qwen3_vl":
        videos = Qwen3VLVideoProcessor(**cut)
        return Qwen3VLProcessor(image_processor=images, tokenizer=tokenizer, video_processor=videos)
    kind = Qwen2VLProcessor if config.family == "qwen2_vl" else Qwen2_5_VLProcessor
    videos = Qwen2VLVideoProcessor(**cut)
    return kind(image_processor=images, tokenizer=tokenizer, video_processor=videos)


def _idefics_processor(config: TinyVLMConfig, tokenizer: Any, image_size: int) -> ProcessorMixin:
    size = fixed_size(config, image_size)
    edge = {"longest_edge": size}
    images = Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=(size // config.patch_size // 2) ** 2)


def _paligemma_processor(config: TinyVLMConfig, tokenizer: Any, image_size: int) -> ProcessorMixin:
    size = fixed_size(config, image_size)
    images: Any = SiglipImageProcessor(size={"height": size, "width": size})
    images.image_seq_length = (size // config.patch_size) ** 2
    return PaliGemmaProcessor(images, tokenizer)
