"""Where the things that the instruction names are in each image, found by their colour. Nothing in it is learned.

A pixel belongs to the thing whose chromaticity (the shares of red, green and blue in it) is nearest to its own, as far
as it is near, so brightness and shading hardly matter. What comes out is ordered by mention: "push the red cube onto
the green disc" gives the cube, the disc and what is between them, and another colour in the sentence puts another cube
into the same place. So a reward that has learned what is asked of one cube has learned it of all, and of the wrong cube
too. For scenes whose things differ in colour; the encoders beside it make no such demand.

Axes: N frames, T things, S things named by one instruction (the most of any), C cameras, D features.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int, UInt8

from vla_rlaif.types import EnvSpec, Observation

WIDTH = 0.06  # std of a thing's colour, in chromaticity: a renderer moves the tabletop's disc by up to 0.1
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
        self._names = tuple(things)
        self._chroma = color / color.sum(axis=1, keepdims=True)

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
            owner, weight = _owners(images, self._chroma)
            names = [self._named[sentence] for sentence in instruction]
            for name in sorted({name for named in names for name in named}):
                rows = np.array([i for i, named in enumerate(names) if name in named])
                slots = [names[i].index(name) for i in rows]
                points[rows, slots] = _points(weight[rows] * (owner[rows] == self._names.index(name)))
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


def _owners(
    images: UInt8[np.ndarray, "N height width 3"], chroma: Float[np.ndarray, "T 3"]
) -> tuple[Int[np.ndarray, "N height width"], Float[np.ndarray, "N height width"]]:
    """The thing that each pixel is nearest to, and how much of the pixel is the thing's, in [0, 1].

    Only the nearest gets a share: half a share of another thing's pixels would move the centre to between the two.
    """
    pixels = images.astype(np.float32)
    total = pixels.sum(axis=-1)
    pixels /= np.maximum(total, 1.0)[..., None]
    owner = np.zeros(total.shape, np.int64)
    nearest = np.full(total.shape, np.inf, np.float32)
    for thing, color in enumerate(chroma):
        distance = ((pixels - color) ** 2).sum(axis=-1)
        closer = distance < nearest
        owner[closer], nearest[closer] = thing, distance[closer]
    return owner, np.minimum(total / DARK, 1.0) * np.exp(-nearest / (2 * WIDTH**2))


def _points(weight: Float[np.ndarray, "N height width"]) -> Float[np.ndarray, "N 4"]:
    """Column and row of the centre in [-1, 1] (0 if unseen), log of the size, and 1 if it is seen."""
    height, width = weight.shape[1:]
    mass = weight.sum(axis=(1, 2))
    x, y = np.linspace(-1, 1, width, dtype=np.float32), np.linspace(-1, 1, height, dtype=np.float32)
    seen = mass / (mass + 0.5)  # half a pixel is half seen
    safe = np.maximum(mass, 1e-6)
    column = (weight.sum(axis=1) @ x) / safe
    row = (weight.sum(axis=2) @ y) / safe
    return np.stack([column * seen, row * seen, np.log1p(mass), seen], axis=1)
