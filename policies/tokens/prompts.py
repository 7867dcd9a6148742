"""Observations as prompts: token ids and images.

Axes: see types.py; C cameras, L prompt tokens (padded on the left to the longest of the batch).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from vla_rlaif.policies.tokens.bins import Bins
from vla_rlaif.policies.tokens.families import Family
from vla_rlaif.types import EnvSpec, Observation


class Prompter:
    """Knows the tokenizer and the image processor of one model, and what its prompt says."""

    def __init__(
        self, processor: Any, family: Family, *, template: str, spec: EnvSpec, image_size: int | None, bins: Bins
    ):
        self.processor, self.family, self.bins = processor, family, bins
        self._tokenizer, self._template, self._spec = processor.tokenizer, template, spec
        self._image_size = image_size or spec.image_size
        blank = np.zeros((1, self._image_size, self._image_size, 3), np.uint8)
        pixels = family.pixels(processor.image_processor, self.frames(dict.fromkeys(spec.cameras, blank)))
        num = family.num_tokens(processor, pixels, len(spec.cameras))
        self._images_text = family.image_text(num) * len(spec.cameras)
        pad = self._tokenizer.pad_token_id
        self._pad = self._tokenizer.eos_token_id if pad is None else pad

    @property
    def pad_id(self) -> int:
        return self._pad

    @property
    def max_tokens(self) -> int:
        """Of a prompt with the longest of the env's instructions; every bin's number is one to three digits."""
        blank = np.zeros((1, self._image_size, self._image_size, 3), np.uint8)
        num, state = len(self._spec.instructions), np.full((1, self._spec.state_dim), 1e9)
        longest = Observation(
            images=dict.fromkeys(self._spec.cameras, np.repeat(blank, num, axis=0)),
            state=np.repeat(state, num, axis=0),  # the last bin, 255: as many digits as any
            instruction=self._spec.instructions,
        )
        return self.encode(longest)["ids"].shape[1]

    def texts_around(self, obs: Observation) -> list[tuple[str, str]]:
        """What the prompts say before the images and after them."""
        texts = [self._template] * len(obs.instruction)
        if "{state}" in self._template:
            said = [" ".join(str(b) for b in row) for row in self.bins.encode_state(obs.state)]
            texts = [text.replace("{state}", numbers) for text, numbers in zip(texts, said, strict=True)]
        pairs = [text.split("{images}") for text in texts]
        say = lambda text, words: text.replace("{instruction}", words)  # noqa: E731
        return [(say(a, words), say(b, words)) for (a, b), words in zip(pairs, obs.instruction, strict=True)]

    def encode(self, obs: Observation) -> dict[str, np.ndarray]:
        """Leaves "N ...": the ids, which of them are not padding, and the images as the image processor is given them.

        Raises:
            ValueError: a camera is missing, or a word is not in the vocabulary.
        """
        texts = [before + self._images_text + after for before, after in self.texts_around(obs)]
        rows = [np.array(row) for row in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]
        self._refuse_unknown(rows, obs)
        length = max(len(row) for row in rows)
        ids = np.stack([np.pad(row, (length - len(row), 0), constant_values=self._pad) for row in rows])
        used = np.arange(length) >= length - np.array([len(row) for row in rows])[:, None]
        return {"ids": ids, "mask": used.astype(np.int64), "images": self.frames(obs.images).numpy()}

    def forward_keys(
        self, inputs: Mapping[str, Tensor], written: Int[Tensor, "N W"], *, is_generating: bool = False
    ) -> dict[str, Any]:
        """All that the model's forward takes, for prompts with W tokens written behind each. ``generate`` counts
        positions itself."""
        ids = torch.cat([inputs["ids"], written], dim=1)
        mask = torch.cat([inputs["mask"], torch.ones_like(written)], dim=1)
        pixels = self.family.pixels(self.processor.image_processor, inputs["images"])
        keys = self.family.forward_keys(ids, mask, written.shape[1])
        if is_generating:
            keys.pop("position_ids", None)
        on_device = {name: value.to(ids.device) for name, value in pixels.items()}
        return {"input_ids": ids, "attention_mask": mask, **on_device, **keys}

    def frames(self, images: Mapping[str, np.ndarray]) -> UInt8[Tensor, "N C 3 height width"]:
        """As the model's image processor is given them."""
        missing = [camera for camera in self._spec.cameras if camera not in images]
        if missing:
            raise ValueError(f"no image of camera {missing[0]!r}; the policy sees {', '.join(self._spec.cameras)}.")
        stacked = np.stack([images[camera] for camera in self._spec.cameras], axis=1)
        frames = torch.from_numpy(stacked).permute(0, 1, 4, 2, 3)
        if frames.shape[-1] == self._image_size:
            return frames.contiguous()
        size = [self._image_size, self._image_size]
        return resize(frames.flatten(0, 1), size, InterpolationMode.BICUBIC, antialias=True).unflatten(
            0, frames.shape[:2]
        )

    def _refuse_unknown(self, rows: list[np.ndarray], obs: Observation) -> None:
        unknown = self._tokenizer.unk_token_id
        bad = [] if unknown is None else [i for i, row in enumerate(rows) if (row == unknown).any()]
        if bad:
            raise ValueError(
                f"the instruction {obs.instruction[bad[0]]!r} has words that the model's vocabulary lacks. A tiny "
                "model knows those of its env's instructions only."
            )
