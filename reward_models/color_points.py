"""Where the things that the instruction names are in each image, found by their colour. Nothing in it is learned.

A pixel belongs to a thing as far as its chromaticity (the shares of red, green and blue in it) is the thing's own, so
brightness and shading hardly matter. What comes out is ordered by mention: "push the red cube onto the green disc"
gives the cube, the disc and what is between them, and another colour in the sentence puts another cube into the same
place. So a reward that has learned what is asked of one cube has learned it of all, and of the wrong cube too. For
scenes whose things differ in colour; the encoders beside it make no such demand.

Axes: N frames, S things named by one instruction (the most of any), C cameras, D features.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, UInt8

from vla_rlaif.types import EnvSpec, Observation

WIDTH = 0.04  # of a thing's colour, in chromaticity; the nearest two colours of the tabletop are 0.16 apart
DARK = 60.0  # r + g + b below which a pixel's chromaticity is noise, out of 765
PER_THING, PER_GAP = 4, 3  # features of each camera


class ColorPointEncoder:
    """``things`` are phrases of the instructions and the colour of each, RGB in [0, 1]."""

    def __init__(self, spec: EnvSpec, things: Mapping[str, tuple[float, float, float]]) -> None:
        self._spec = spec
        self._named = {sentence: _mentioned(sentence, tuple(things)) for sentence in spec.instructions}
        dumb = [sentence for sentence, named in self._named.items() if not named]
        if dumb:
            raise ValueError(
                f"The instruction {dumb[0]!r} names none of reward.encoder.things {list(things)}: add what it is "
                "about, as it is called there, with its colour."
            )
        templates = sorted({_template(sentence, named) for sentence, named in self._named.items()})
        self._templates = {s: templates.index(_template(s, named)) for s, named in self._named.items()}
        self._num_templates = len(templates)
        self._num_slots = max(len(named) for named in self._named.values())
        color = np.array(list(things.values()), np.float32)
        self._chroma = dict(zip(things, color / color.sum(axis=1, keepdims=True), strict=True))

    @property
    def dim(self) -> int:
        per_camera = PER_THING * self._num_slots + PER_GAP * (self._num_slots - 1)
        return len(self._spec.cameras) * per_camera + self._spec.state_dim + self._num_templates

    def encode(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        unknown = sorted(set(obs.instruction) - set(self._named))
        if unknown:
            raise ValueError(f"The reward encoder knows {list(self._named)}, got the instruction {unknown[0]!r}.")
        parts = [self._camera(obs.images[camera], obs.instruction) for camera in self._spec.cameras]
        template = np.eye(self._num_templates, dtype=np.float32)[[self._templates[s] for s in obs.instruction]]
        return np.concatenate([*parts, obs.state.astype(np.float32), template], axis=1)

    def _camera(
        self, images: UInt8[np.ndarray, "N height width 3"], instruction: tuple[str, ...]
    ) -> Float[np.ndarray, "N D"]:
        points = np.zeros((len(images), self._num_slots, PER_THING), np.float32)
        if len(images):
            chroma, bright = _chromaticity(images)
            names = [self._named[sentence] for sentence in instruction]
            for name in sorted({name for named in names for name in named}):
                rows = np.array([i for i, named in enumerate(names) if name in named])
                slots = [names[i].index(name) for i in rows]
                points[rows, slots] = _points(chroma[rows], bright[rows], self._chroma[name])
        gap = points[:, 1:, :2] - points[:, :-1, :2]
        between = np.concatenate([gap, np.linalg.norm(gap, axis=-1, keepdims=True)], axis=-1)
        return np.concatenate([points.reshape(len(points), -1), between.reshape(len(points), -1)], axis=1)


def _mentioned(sentence: str, things: tuple[str, ...]) -> tuple[str, ...]:
    """The things that a sentence names, in the order in which it first names them."""
    return tuple(sorted((thing for thing in things if thing in sentence), key=sentence.index))


def _template(sentence: str, named: tuple[str, ...]) -> str:
    """What is asked, without of what."""
    for thing in named:
        sentence = sentence.replace(thing, "*")
    return sentence


def _chromaticity(
    images: UInt8[np.ndarray, "N height width 3"],
) -> tuple[Float[np.ndarray, "N height width 2"], Float[np.ndarray, "N height width"]]:
    """Shares of red and green (blue is the rest), and how far to trust them, in [0, 1]."""
    pixels = images.astype(np.float32)
    total = pixels.sum(axis=-1)
    return pixels[..., :2] / np.maximum(total, 1.0)[..., None], np.minimum(total / DARK, 1.0)


def _points(
    chroma: Float[np.ndarray, "N height width 2"], bright: Float[np.ndarray, "N height width"], color: np.ndarray
) -> Float[np.ndarray, "N 4"]:
    """Column and row of the centre in [-1, 1] (0 if unseen), log of the size, and 1 if it is seen."""
    height, width = bright.shape[1:]
    weight = bright * np.exp(-((chroma - color[:2]) ** 2).sum(axis=-1) / (2 * WIDTH**2))
    mass = weight.sum(axis=(1, 2))
    x, y = np.linspace(-1, 1, width, dtype=np.float32), np.linspace(-1, 1, height, dtype=np.float32)
    seen = mass / (mass + 0.5)  # half a pixel is half seen
    safe = np.maximum(mass, 1e-6)
    column = (weight.sum(axis=1) @ x) / safe
    row = (weight.sum(axis=2) @ y) / safe
    return np.stack([column * seen, row * seen, np.log1p(mass), seen], axis=1)
