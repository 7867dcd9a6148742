"""Asks a vision-language model: probed before the first question, answers from the cache, a budget of invalid ones.

Axes: Q questions, L labels.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from jaxtyping import Float

from vla_rlaif.preferences.judge_cache import JudgeCache
from vla_rlaif.preferences.questions import JudgeFault, Question, VisionLanguageModel

KEPT_TOGETHER = 32  # answers that one transaction of the cache takes; a killed run asks at most these again


class Asker:
    """Counts what it does: questions asked, answers found in the cache, invalid answers."""

    def __init__(self, model: VisionLanguageModel, *, cache: Path, invalid_budget: int) -> None:
        self.model, self._path, self._invalid_budget = model, cache, invalid_budget
        self.num_asked, self.num_known, self.num_invalid = 0, 0, 0
        self._is_probed = False

    def ask(self, questions: Sequence[Question]) -> Float[np.ndarray, "Q L"]:
        """Probabilities of the labels, which all questions share. NaN for an invalid answer.

        Raises:
            ValueError: the model fails its probe.
            JudgeFault: it cannot be asked any more, or has used up ``invalid_budget``.
        """
        result = np.full((len(questions), len(questions[0].labels) if questions else 0), np.nan)
        keys = [question.digest(self.model.identity) for question in questions]
        cache = JudgeCache(self._path)  # opened here: in the thread that asks
        try:
            unknown: dict[bytes, list[int]] = {}  # equal questions are asked once
            for row, key in enumerate(keys):
                known = cache.get(key)
                if known is None:
                    unknown.setdefault(key, []).append(row)
                else:
                    result[row] = known
            self.num_known += len(questions) - len(unknown)
            if unknown:
                self._ask(questions, unknown, result, cache)
        finally:
            cache.close()
        return result

    def probe(self, example: Question) -> None:
        """As the model's; once is enough."""
        if not self._is_probed:
            self.model.probe(example)
            self._is_probed = True

    def _ask(
        self,
        questions: Sequence[Question],
        unknown: dict[bytes, list[int]],
        result: Float[np.ndarray, "Q L"],
        cache: JudgeCache,
    ) -> None:
        asked = list(unknown.items())
        self.probe(max((questions[rows[0]] for _, rows in asked), key=lambda question: len(question.parts)))
        fresh: list[tuple[bytes, np.ndarray]] = []
        try:
            with closing(self.model.answer([questions[rows[0]] for _, rows in asked])) as answers:
                for index, answer in answers:
                    self.num_asked += 1
                    if answer.probabilities is None:
                        self._count_invalid(answer.problem)
                        continue
                    key, rows = asked[index]
                    result[rows] = answer.probabilities
                    fresh.append((key, answer.probabilities))
                    if len(fresh) == KEPT_TOGETHER:
                        cache.put(fresh)
                        fresh = []
        finally:  # a fault loses no answer
            cache.put(fresh)

    def _count_invalid(self, problem: str) -> None:
        self.num_invalid += 1
        if self.num_invalid > self._invalid_budget:
            raise JudgeFault(
                f"{self.num_invalid} of {self.num_asked} answers of {self.model.identity} were invalid, more than "
                f"invalid_budget {self._invalid_budget}. The last one: {problem}."
            )
