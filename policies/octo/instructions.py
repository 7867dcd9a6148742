"""Sentences as upstream's tasks hold them, token ids, and the features that a checkpoint's own T5 makes of those.

Axes: B sentences, n token slots, F feature width.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.policies.octo.t5 import T5Encoder, encoder_of, features_of
from vla_rlaif.policies.octo.text import Tokenizer, load_tokenizer

IDS, MASK = "input_ids", "attention_mask"
MAX_IN_MEMORY = 1024  # sentences


class Instructions:
    """Tokenizer and frozen encoder. The encoder's parameters stay on the host but while it reads new sentences.

    Neither needs to be there: a model can be given token ids without a tokenizer, and features without an encoder.
    """

    def __init__(
        self,
        params: Mapping[str, np.ndarray],
        *,
        text_processor: Mapping[str, Any] | None,
        near: Path | None,
        tokenizer: Path | None = None,
    ):
        """``params`` are the encoder's, by full name; ``text_processor`` is the config's; ``near`` is the checkpoint,
        where the tokenizer that it names may lie; ``tokenizer`` is a folder that is used in its place."""
        self.params, self.text_processor, self._near, self._folder = params, text_processor, near, tokenizer
        self._memory: OrderedDict[bytes, Float[np.ndarray, "n F"]] = OrderedDict()  # least recently used first

    @property
    def has_tokenizer(self) -> bool:
        """Whether the config names one. It is loaded when the first sentence comes."""
        return self.text_processor is not None

    @cached_property
    def encoder(self) -> T5Encoder | None:
        """Of the sizes that the parameters have.

        Raises:
            ValueError: the parameters are no T5 encoder's.
        """
        return encoder_of(self._short) if self.params else None

    def tokens(self, sentences: Sequence[str], *, allow_truncation: bool = False) -> dict[str, Int[np.ndarray, "B n"]]:
        """{"input_ids", "attention_mask"}, padded.

        Raises:
            ValueError: there is no tokenizer, or a sentence is too long and may not be cut.
        """
        found = self._tokenizer(sentences, allow_truncation=allow_truncation)
        return {IDS: found.ids, MASK: found.mask}

    def features(self, ids: Int[np.ndarray, "B n"], mask: Int[np.ndarray, "B n"]) -> Float[np.ndarray, "B n F"]:
        """Of every slot, padding included: Octo attends to all of them. Sentences are remembered.

        Raises:
            ValueError: the checkpoint has no encoder, or an id is not in its vocabulary.
        """
        if self.encoder is None:
            raise ValueError(
                "the checkpoint has no language encoder, so token ids mean nothing to it. Give language_instruction as "
                "features [B, tokens, width]."
            )
        if ids.min() < 0 or ids.max() >= self.encoder.vocabulary:
            raise ValueError(
                f"token ids from {ids.min()} to {ids.max()}; the encoder knows 0 to {self.encoder.vocabulary - 1}. Use "
                "the tokenizer that the model was trained with."
            )
        rows = np.stack([ids, mask], axis=1).astype(np.int32)
        keys = [row.tobytes() for row in rows]
        new = [key for key in dict.fromkeys(keys) if key not in self._memory]
        found = {key: self._memory[key] for key in keys if key in self._memory}
        chosen = rows[[keys.index(key) for key in new]]
        found |= dict(zip(new, features_of(self.encoder, self._short, chosen[:, 0], chosen[:, 1]), strict=True))
        self._remember(found)
        return np.stack([found[key] for key in keys])

    @cached_property
    def _short(self) -> dict[str, np.ndarray]:
        """Names from ``shared/embedding`` on."""
        return {name.split("/hf_model/")[1]: value for name, value in self.params.items()}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        text = self.text_processor
        if text is None:
            raise ValueError("the model has no text processor: give language_instruction as token ids or features.")
        kwargs = text.get("kwargs", {})
        if text["name"] != "HFTokenizer" or kwargs.get("encode_with_model", False):
            raise ValueError(
                f"the model's text processor is {text['name']} with {kwargs}; only HFTokenizer without "
                "encode_with_model can read sentences here. Give language_instruction as features."
            )
        name = str(self._folder or kwargs.get("tokenizer_name", "t5-base"))
        length = kwargs.get("tokenizer_kwargs", {}).get("max_length", 16)
        return load_tokenizer(name, near=self._near, local_only=False, max_length=length)

    def _remember(self, found: Mapping[bytes, Float[np.ndarray, "n F"]]) -> None:
        for key, features in found.items():
            self._memory[key] = features
            self._memory.move_to_end(key)
        while len(self._memory) > MAX_IN_MEMORY:
            self._memory.popitem(last=False)
