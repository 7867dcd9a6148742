"""Instructions to rows of the policy's language table: of words that it learns, or of whole sentences that T5 read.

Axes: N sentences, n token slots, L feature width.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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

    learned = True  # the table is trained with the policy

    @property
    def size(self) -> int:
        """Rows of the table: the words and the padding."""
        return len(self.words) + 1

    def to_json(self) -> dict[str, Any]:
        return {"kind": "words", "words": list(self.words), "num_tokens": self.num_tokens}

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


class Sentences:
    """Sentences whose T5 features the policy carries, one row each [n, L]; the encoder itself stays in its folder."""

    learned = False

    def __init__(self, sentences: Sequence[str]):
        self.sentences = tuple(sentences)
        self._row = {sentence: i for i, sentence in enumerate(self.sentences)}

    @property
    def size(self) -> int:
        return len(self.sentences)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "sentences", "sentences": list(self.sentences)}

    def encode(self, instructions: Sequence[str]) -> Int[np.ndarray, " N"]:
        unknown = set(instructions) - self._row.keys()
        if unknown:
            raise ValueError(
                f"the policy carries no language features of {sorted(unknown)[0]!r}. It knows: "
                f"{'; '.join(self.sentences)}. Add it to the env's instructions and load the Octo folder again."
            )
        return np.array([self._row[sentence] for sentence in instructions], np.int32)


Language = Vocabulary | Sentences


def language_from_json(values: Mapping[str, Any]) -> Language:
    if values["kind"] == "words":
        return Vocabulary(values["words"], values["num_tokens"])
    return Sentences(values["sentences"])


def _split(sentence: str) -> list[str]:
    return sentence.lower().replace(".", " ").replace(",", " ").split()
