"""The files of a small SmolVLM, made here: a config with the wanted sizes and a tokenizer whose tokens are bytes.

LeRobot's SmolVLA wants a folder or hub id with a config, a processor and a tokenizer that knows three special tokens.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, SmolVLMConfig

from vla_rlaif.lerobot_config import TinyVLM

PAD = "<pad>"
SPECIAL = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>",
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, after the special ones: any sentence can be written, none is known."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, *SPECIAL.values(), *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, extra_special_tokens=SPECIAL)


def vlm_files(config: TinyVLM) -> dict[str, str]:
    """Text by file name."""
    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = dict(
        image_token_id=tokenizer.convert_tokens_to_ids(SPECIAL["image_token"]),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        scale_factor=config.merged_patches,
        vision_config={
            "hidden_size": config.vision_dim,
            "intermediate_size": config.vision_mlp_dim,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": config.vision_heads,
            "image_size": config.image_size,
            "patch_size": config.patch_size,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": config.hidden_dim,
            "intermediate_size": config.mlp_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.hidden_dim // config.num_heads,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": True,
        },
    )
    model = SmolVLMConfig(**sizes)
    # The processor class only brings the tokenizer; SmolVLM's own one would ask for num2words, for videos.
    processor = {"processor_class": "Idefics3Processor", "image_processor_type": "Idefics3ImageProcessor"}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return {path.name: path.read_text() for path in sorted(folder.iterdir())}
