"""A vision-language model as a labeller of pairs, asked in both orders.

Axes: see types.py; L labels. A judge that says "the first" whatever it sees comes out at exactly 0.5, and as
inconsistent.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.preferences.asking import Asker
from vla_rlaif.preferences.data import Answers
from vla_rlaif.preferences.frames import clip
from vla_rlaif.preferences.questions import Image, Question
from vla_rlaif.types import EnvSpec, Episodes

LABELS = ("A", "B", "C")  # the first shown is better, the second, neither
PROMPT = """A robot tried the same task twice. Each try is a clip: a few frames in the order of time, the first and \
the last included. Judge only what is to be seen. The try that is nearer to having done the task at its end is better; \
if both are equally near, the one that was quicker, smoother and safer. \
Say A if clip A is better and B if clip B is better{neither}.
Task: {instruction}
Clip A: {first}
Clip B: {second}
The better clip is:"""
NEITHER = ", or C if neither is"
ROUNDING = 1e-6  # models compute in float32 at best: nothing is known of smaller differences


class VLMJudge:
    """P(first is better) = (p_AB + 1 - p_BA) / 2, where p_XY is the model's probability for the clip shown first when X
    is; an offered "neither" counts half. An invalid answer in either order skips the pair."""

    def __init__(
        self,
        asker: Asker,
        *,
        num_frames: int,
        cameras: Sequence[str] = (),
        prompt: str | None = None,
        ties: bool = True,
        tie_margin: float = 0.0,
    ) -> None:
        """``prompt`` holds {instruction}, {first} and {second} once each, in any order."""
        self._asker, self._num_frames, self._cameras, self._tie_margin = asker, num_frames, cameras, tie_margin
        self._labels = LABELS if ties else LABELS[:2]
        self._prompt = PROMPT.replace("{neither}", NEITHER if ties else "") if prompt is None else prompt

    @property
    def name(self) -> str:
        return (
            f"vlm/1({self._asker.model.identity}, pairwise {''.join(self._labels)}, frames={self._num_frames}, "
            f"cameras={'+'.join(self._cameras)}, tie_margin={self._tie_margin}, prompt={short_hash(self._prompt)})"
        )

    def probe(self, spec: EnvSpec) -> None:
        """Prove that the model can be trusted with questions about this env; see ``VisionLanguageModel.probe``."""
        clips = [noise_clip(spec, self._num_frames, self._cameras, seed) for seed in (0, 1)]
        self._asker.probe(comparison(self._prompt, self._labels, spec.instructions[0], *clips))

    def answers(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Answers:
        """Pairs with an invalid episode are skipped without asking. ``seed`` has no effect: the judge does not draw."""
        asked, invalid = self._asker.num_asked, self._asker.num_invalid
        usable = np.flatnonzero(episodes.valid[pairs].all(axis=1))
        both = np.full((len(pairs), 2), np.nan)
        orders = [pairs[usable], pairs[usable][:, ::-1]]
        questions = [self._compare(episodes, first, second) for order in orders for first, second in order.tolist()]
        if questions:
            both[usable] = first_wins(self._asker.ask(questions)).reshape(2, len(usable)).T
        p_first = 0.5 + (both[:, 0] - both[:, 1]) / 2  # exactly 0.5 if equal
        p_first[np.abs(p_first - 0.5) <= max(self._tie_margin, ROUNDING)] = 0.5
        return Answers(
            p_first=p_first,
            both_orders=both,
            num_asked=self._asker.num_asked - asked,
            num_invalid=self._asker.num_invalid - invalid,
        )

    def label(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Float[np.ndarray, " M"]:
        return self.answers(episodes, pairs, seed).p_first

    def _compare(self, episodes: Episodes, first: int, second: int) -> Question:
        clips = [clip(episodes, row, self._num_frames, self._cameras) for row in (first, second)]
        return comparison(self._prompt, self._labels, episodes.instruction[first], *clips)


def comparison(
    prompt: str, labels: tuple[str, ...], instruction: str, first: Sequence[Image], second: Sequence[Image]
) -> Question:
    """The question about two clips, in this order."""
    values = {"{instruction}": (instruction,), "{first}": first, "{second}": second}
    return Question(parts=filled(prompt, values), labels=labels)


def first_wins(probabilities: Float[np.ndarray, "Q L"]) -> Float[np.ndarray, " Q"]:
    """Of answers A, B and perhaps C: the probability of A and half of that of C."""
    if probabilities.shape[1] == len(LABELS):
        return probabilities[:, 0] + probabilities[:, 2] / 2
    return probabilities[:, 0]


def filled(prompt: str, values: Mapping[str, Sequence[str | Image]]) -> tuple[str | Image, ...]:
    """The prompt with each name replaced by texts or images; texts that meet become one."""
    parts: list[str | Image] = [prompt]
    for name, value in values.items():
        split: list[str | Image] = []
        for part in parts:
            before, found, after = part.partition(name) if isinstance(part, str) else (part, "", "")
            split += [before, *(value if found else ()), after]
        parts = split
    joined: list[str | Image] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return tuple(part for part in joined if not isinstance(part, str) or part)


def noise_clip(spec: EnvSpec, num_frames: int, cameras: Sequence[str], seed: int) -> list[Image]:
    """A clip of the env's size with nothing on it: for probes."""
    size = spec.image_size
    shape = (min(num_frames, spec.max_decisions + 1), size, size * max(len(cameras), 1), 3)
    return list(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
