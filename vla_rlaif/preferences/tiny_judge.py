"""The smallest judge: a Qwen3-VL of about a million parameters, made here and taught by labelled pairs.

For tests, notebooks and a first look at the whole chain on a laptop. It knows the words of our prompts and of an env's
instructions, and nothing of the world; what it can judge is what it was taught.
Axes: see types.py; B questions of a minibatch, L labels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from vla_rlaif.checkpoint import WholeFolder
from vla_rlaif.labeller_config import TransformersConfig
from vla_rlaif.policies.tokens.tiny import build_tiny
from vla_rlaif.preferences import judge, rubric
from vla_rlaif.preferences.frames import clip
from vla_rlaif.preferences.judge_transformers import TransformersModel
from vla_rlaif.preferences.questions import Question
from vla_rlaif.token_config import TinyVLMConfig
from vla_rlaif.types import EnvSpec, Episodes

CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """How the judge is taught."""

    steps: int = 300
    batch: int = 32
    lr: float = 1e-3  # after a linear rise over a tenth of the steps; then it falls linearly to 0
    seed: int = 0


def write_tiny_judge(
    folder: Path,
    spec: EnvSpec,
    *,
    frames: UInt8[np.ndarray, "K height width 3"] | None = None,
    config: TinyVLMConfig | None = None,
    seed: int = 0,
) -> None:
    """A transformers folder with random weights, for this env's images and instructions.

    ``frames``: what the env looks like; a judge that is to be taught needs them. Its images are scaled to zero mean and
    unit variance over these. With the scale of photographs, dots on black are a constant with a little ripple on top of
    it, and a model from random weights learns next to nothing in a few hundred steps.
    """
    sentences = [judge.PROMPT, judge.NEITHER, *judge.LABELS, rubric.PROMPT, *rubric.LABELS, *spec.instructions]
    names = ("{neither}", "{instruction}", "{first}", "{second}", "{clip}")
    for name in names:
        sentences = [sentence.replace(name, " ") for sentence in sentences]
    made: Any = build_tiny(
        config or TinyVLMConfig(family="qwen3_vl"),
        sentences=sentences,
        prompt="",
        image_size=spec.image_size,
        seed=seed,
    )
    model, processor = made
    _spread(model, seed)
    processor.chat_template = CHAT_TEMPLATE
    if frames is not None:
        pixels = frames.reshape(-1, 3) / 255
        processor.image_processor.image_mean = pixels.mean(axis=0).tolist()
        processor.image_processor.image_std = [float(pixels.std())] * 3
    with WholeFolder(folder) as part:
        model.save_pretrained(part)
        processor.save_pretrained(part)


def _spread(model: torch.nn.Module, seed: int) -> None:
    """Weights whose outputs are as large as their inputs. The std of 0.02 that large models start from makes signals
    six times smaller with every layer of width 64, and nothing is learned in a few hundred steps."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, torch.nn.Linear | torch.nn.Conv3d):
                part.weight.normal_(0, part.weight[0].numel() ** -0.5, generator=rng)
            elif isinstance(part, torch.nn.Embedding):
                part.weight.normal_(0, 0.5, generator=rng)


def teach(
    folder: Path,
    to: Path,
    lesson: Callable[[np.random.Generator, int], tuple[list[Question], Float[np.ndarray, "B L"]]],
    lessons: Lessons,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> list[float]:
    """Fine-tune the judge of ``folder`` and write it ``to``; returns the loss of each step, cross-entropy in nats.

    ``lesson(rng, num)`` draws questions of one form and the wanted probabilities of their labels.
    """
    asked = TransformersModel(TransformersConfig(folder=folder))
    model, processor = asked.load()
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lessons.lr, weight_decay=0.01)
    rise = max(lessons.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (lessons.steps - step) / (lessons.steps - rise + 1))
    )
    rng, losses = np.random.default_rng(lessons.seed), []
    for step in range(lessons.steps):
        questions, wanted = lesson(rng, lessons.batch)
        logits = asked.label_logits(questions)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(wanted, dtype=logits.dtype))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 50 == 0:
            say(f"step {step + 1}: loss {np.mean(losses[-50:]):.4f} nats")
    with WholeFolder(to) as part:
        model.eval().save_pretrained(part)
        processor.save_pretrained(part)
    return losses


@dataclass(frozen=True, kw_only=True)
class PairLesson:
    """Labelled pairs, in both orders, as a labeller with ``ties: false`` asks about them. A prompt may use the words of
    ours only; every other word is the same unknown one."""

    episodes: Episodes
    pairs: Int[np.ndarray, "M 2"]
    p_first: Float[np.ndarray, " M"]  # NaN: not taught
    num_frames: int = 1
    cameras: Sequence[str] = ()
    prompt: str | None = None

    def __call__(self, rng: np.random.Generator, num: int) -> tuple[list[Question], Float[np.ndarray, "B 2"]]:
        rows = rng.choice(np.flatnonzero(~np.isnan(self.p_first)), num)
        swap = rng.random(num) < 0.5
        shown = np.where(swap[:, None], self.pairs[rows][:, ::-1], self.pairs[rows])
        first = np.where(swap, 1 - self.p_first[rows], self.p_first[rows])
        prompt = judge.PROMPT.replace("{neither}", "") if self.prompt is None else self.prompt
        questions = [
            judge.comparison(prompt, judge.LABELS[:2], self.episodes.instruction[a], self._clip(a), self._clip(b))
            for a, b in shown.tolist()
        ]
        return questions, np.stack([first, 1 - first], axis=1)

    def _clip(self, row: int) -> tuple[np.ndarray, ...]:
        return clip(self.episodes, row, self.num_frames, self.cameras)


@dataclass(frozen=True, kw_only=True)
class RatingLesson:
    """Rated episodes, as mode `rubric` asks about them: a score in [0, 1] is taught as the two ratings next to it."""

    episodes: Episodes
    score: Float[np.ndarray, " N"]
    num_frames: int = 1
    cameras: Sequence[str] = ()
    prompt: str | None = None

    def __call__(self, rng: np.random.Generator, num: int) -> tuple[list[Question], Float[np.ndarray, "B 5"]]:
        rows = rng.choice(np.flatnonzero(self.episodes.valid), num)
        prompt = rubric.PROMPT if self.prompt is None else self.prompt
        questions = [
            rubric.rating(
                prompt, self.episodes.instruction[row], clip(self.episodes, row, self.num_frames, self.cameras)
            )
            for row in rows.tolist()
        ]
        place = np.arange(len(rubric.LABELS))
        return questions, np.maximum(0.0, 1 - np.abs(4 * self.score[rows][:, None] - place))
