"""Instructions to token ids, for the learned word table that stands in for T5.

The network itself takes features [B, n, L]; ``t5.py`` has the encoder that official checkpoints come with.
Axes: N sentences, n token slots.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

PAD = 0  # padding slots are attended to like any other, as upstream


class Vocabulary:
    """The words that a task can say. Ids of a sentence are remembered."""

    def __init__(self, words: Sequence[str], num_tokens: int):
        self.words = tuple(words)
        self.num_tokens = num_tokens
        self._ids = {word: i + 1 for i, word in enumerate(self.words)}
        self._known: dict[str, Int[np.ndarray, " n"]] = {}

    @classmethod
    def of(cls, instructions: Iterable[str], num_tokens: int) -> "Vocabulary":
        """All words of the ``instructions``, sorted; every sentence must fit."""
        instructions = tuple(instructions)
        vocabulary = cls(sorted({word for sentence in instructions for word in _split(sentence)}), num_tokens)
        vocabulary.encode(instructions)
        return vocabulary

    @property
    def size(self) -> int:
        """Rows of the table: the words and the padding."""
        return len(self.words) + 1

    def encode(self, instructions: Sequence[str]) -> Int[np.ndarray, "N n"]:
        for sentence in set(instructions) - self._known.keys():
            self._known[sentence] = self._encode_one(sentence)
        return np.stack([self._known[sentence] for sentence in instructions])

    def _encode_one(self, sentence: str) -> Int[np.ndarray, " n"]:
        words = _split(sentence)
        if len(words) > self.num_tokens:
            raise ValueError(f"{sentence!r} has {len(words)} words, language_tokens is {self.num_tokens}.")
        unknown = [word for word in words if word not in self._ids]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} in {sentence!r} is not in the policy's vocabulary: {' '.join(self.words)}."
            )
        ids = np.full(self.num_tokens, PAD, np.int32)
        ids[: len(words)] = [self._ids[word] for word in words]
        return ids


def _split(sentence: str) -> list[str]:
    return sentence.lower().replace(".", " ").replace(",", " ").split()
