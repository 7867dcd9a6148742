"""Ratings of single clips on a rubric of 1 to 5, as rewards and as labels.

After RoboReward (https://arxiv.org/abs/2601.00675), which rates the end of an episode by five levels of progress. Here
the rating is the expected value over the model's probabilities of the five digits, not the digit that it writes, and an
answer that is none of them is unscorable, never a 1.
Axes: see types.py; R rows that are rated.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.preferences.asking import Asker
from vla_rlaif.preferences.data import Answers
from vla_rlaif.preferences.frames import clip
from vla_rlaif.preferences.judge import ROUNDING, filled, noise_clip, short_hash
from vla_rlaif.preferences.questions import Question
from vla_rlaif.types import EnvSpec, Episodes

LABELS = ("1", "2", "3", "4", "5")
PROMPT = """A robot tried a task. The clip shows a few frames of the try in the order of time, the first and the last \
included. Rate how far the task is done at the end, by what is to be seen in the last frame:
1: nothing that the task asks for has changed.
2: a small step towards it, most is missing.
3: about half of it is done.
4: almost done, a small error is left.
5: completely done.
Task: {instruction}
Clip: {clip}
The rating is:"""


class Rater:
    """Ratings of episodes by a vision-language model."""

    def __init__(
        self, asker: Asker, *, num_frames: int, cameras: Sequence[str] = (), prompt: str | None = None
    ) -> None:
        """``prompt`` holds {instruction} and {clip} once each."""
        self.asker, self._num_frames, self._cameras = asker, num_frames, cameras
        self._prompt = PROMPT if prompt is None else prompt

    @property
    def name(self) -> str:
        return (
            f"{self.asker.model.identity}, rubric 1-5, frames={self._num_frames}, cameras={'+'.join(self._cameras)}, "
            f"prompt={short_hash(self._prompt)}"
        )

    def probe(self, spec: EnvSpec) -> None:
        """Prove that the model can be trusted with questions about this env; see ``VisionLanguageModel.probe``."""
        self.asker.probe(
            rating(self._prompt, spec.instructions[0], tuple(noise_clip(spec, self._num_frames, self._cameras, 0)))
        )

    def probabilities(self, episodes: Episodes, rows: Int[np.ndarray, " R"]) -> Float[np.ndarray, "R 5"]:
        """Of the ratings 1 to 5; NaN for an invalid episode or answer."""
        result = np.full((len(rows), len(LABELS)), np.nan)
        valid = episodes.valid[rows]
        questions = [
            rating(self._prompt, episodes.instruction[row], clip(episodes, row, self._num_frames, self._cameras))
            for row in rows[valid].tolist()
        ]
        if questions:
            result[valid] = self.asker.ask(questions)
        return result

    def scores(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        """(s - 1) / 4 in [0, 1], s the expected rating."""
        return self.probabilities(episodes, np.arange(len(episodes.valid))) @ (np.arange(len(LABELS)) / 4)


def rating(prompt: str, instruction: str, images: Sequence[np.ndarray]) -> Question:
    """The question about one clip."""
    return Question(parts=filled(prompt, {"{instruction}": (instruction,), "{clip}": images}), labels=LABELS)


class RubricLabeller:
    """Labels pairs by two ratings: the probability that the first is rated higher, equal ratings counting half, with
    the two ratings drawn independently from what the model says. Each episode is rated once."""

    def __init__(self, rater: Rater, *, tie_margin: float = 0.0) -> None:
        self._rater, self._tie_margin = rater, tie_margin

    @property
    def name(self) -> str:
        return f"vlm/1({self._rater.name}, tie_margin={self._tie_margin})"

    def probe(self, spec: EnvSpec) -> None:
        self._rater.probe(spec)

    def answers(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Answers:
        """``seed`` has no effect."""
        asker = self._rater.asker
        asked, invalid = asker.num_asked, asker.num_invalid
        rows, index = np.unique(pairs, return_inverse=True)
        first, second = np.moveaxis(self._rater.probabilities(episodes, rows)[index.reshape(-1, 2)], 1, 0)
        below = np.cumsum(second, axis=1) - second
        p_first = (first * (below + second / 2)).sum(axis=1)
        p_first[np.abs(p_first - 0.5) <= max(self._tie_margin, ROUNDING)] = 0.5
        return Answers(p_first=p_first, num_asked=asker.num_asked - asked, num_invalid=asker.num_invalid - invalid)

    def label(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Float[np.ndarray, " M"]:
        return self.answers(episodes, pairs, seed).p_first

    def outcomes(self, episodes: Episodes, rows: Int[np.ndarray, " R"], seed: int) -> Float[np.ndarray, " R"]:
        """The probability of the highest rating, "completely done"."""
        return self._rater.probabilities(episodes, rows)[:, -1]
