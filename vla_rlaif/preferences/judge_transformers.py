"""A vision-language model of a transformers folder, asked in this process. Nothing in the folder is executed.

Axes: Q questions, L labels.
"""

import hashlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from vla_rlaif.labeller_config import TransformersConfig
from vla_rlaif.preferences.questions import Answer, Question

_NEEDED = ("config.json", "tokenizer_config.json")


class TransformersModel:
    """Loads the folder when it is first asked. The probabilities are the model's own, among the labels' tokens."""

    def __init__(self, config: TransformersConfig) -> None:
        """Raises ValueError if the folder lacks something."""
        missing = [name for name in _NEEDED if not (config.folder / name).is_file()]
        if missing or not list(config.folder.glob("*.safetensors")):
            raise ValueError(
                f"backend.folder: {config.folder} is no transformers folder: "
                f"{missing[0] if missing else '*.safetensors'} is missing."
            )
        self._config = config
        self._digest = ""
        self._loaded: tuple[Any, Any] | None = None

    @property
    def identity(self) -> str:
        if not self._digest:  # reads every file: once
            self._digest = folder_digest(self._config.folder)
        return f"transformers {self._config.folder.name}@{self._digest} {self._config.dtype}"

    def probe(self, example: Question) -> None:
        """One-token labels, and an answer to ``example``. Constraint and images are this module's own doing."""
        self._label_ids(example.labels)
        self._probabilities([example])

    def answer(self, questions: Sequence[Question]) -> Generator[tuple[int, Answer]]:
        alike: dict[object, list[int]] = {}  # questions as long as one another need no padding
        for row, question in enumerate(questions):
            alike.setdefault(_form(question), []).append(row)
        for rows in alike.values():
            for start in range(0, len(rows), self._config.batch):
                batch = rows[start : start + self._config.batch]
                for row, values in zip(batch, self._probabilities([questions[i] for i in batch]), strict=True):
                    yield row, Answer(probabilities=values)

    def load(self) -> tuple[Any, Any]:
        """Model and processor, once."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def label_logits(self, questions: Sequence[Question]) -> Float[Tensor, "Q L"]:
        """Of the labels' tokens, unnormalised; of questions that differ in nothing but images of the same sizes."""
        model, processor = self.load()
        ids = self._label_ids(questions[0].labels)
        texts = [
            processor.apply_chat_template(
                [{"role": "user", "content": _content(question)}], tokenize=False, add_generation_prompt=True
            )
            for question in questions
        ]
        images = [[part for part in question.parts if not isinstance(part, str)] for question in questions]
        # Most chat templates write the special tokens themselves.
        inputs = processor(text=texts, images=images, return_tensors="pt", add_special_tokens=False)
        return model(**inputs.to(self._config.device), logits_to_keep=1).logits[:, -1, ids]

    def _load(self) -> tuple[Any, Any]:
        folder, dtype = self._config.folder, getattr(torch, self._config.dtype)
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
            )
            processor: Any = AutoProcessor.from_pretrained(folder, **local)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"{folder} cannot be loaded as an image-text-to-text model: {error}") from None
        model, found = loaded
        wrong = {name: sorted(map(str, values))[:3] for name, values in found.items() if values}
        if wrong:
            raise ValueError(f"the weights in {folder} are not those of its config.json: {wrong}.")
        if not processor.chat_template:
            raise ValueError(f"{folder} has no chat template, so nobody knows how its model is asked a question.")
        return model.eval().requires_grad_(False).to(self._config.device), processor

    def _label_ids(self, labels: Sequence[str]) -> list[int]:
        tokenizer = self.load()[1].tokenizer
        ids = [tokenizer.encode(label, add_special_tokens=False) for label in labels]
        bad = [label for label, tokens in zip(labels, ids, strict=True) if len(tokens) != 1]
        if bad or len({tokens[0] for tokens in ids}) < len(ids):
            raise ValueError(
                f"{self._config.folder}: the answer {(bad or labels)[0]!r} is not a token of its own in this model, so "
                "its probability cannot be read off the next token. Use another model."
            )
        return [tokens[0] for tokens in ids]

    def _probabilities(self, questions: Sequence[Question]) -> Float[np.ndarray, "Q L"]:
        with torch.inference_mode():
            return torch.softmax(self.label_logits(questions).double(), dim=-1).cpu().numpy()


def folder_digest(folder: Path) -> str:
    """16 hex digits that change with any file that answers can depend on."""
    found = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        with path.open("rb") as file:
            found.update(f"{path.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def _content(question: Question) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in question.parts]


def _form(question: Question) -> object:
    return question.labels, tuple(part if isinstance(part, str) else part.shape for part in question.parts)
