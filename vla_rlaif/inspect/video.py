"""Episodes side by side as the frames of one video, with what is known of each under it.

Axes: F frames.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from vla_rlaif.inspect.source import Episode

FPS = 5.0  # frames a second; there is one a decision
HOLD = 6  # frames that the last one lasts, so that the outcome can be seen
SMALLEST = 192  # pixels; smaller frames are enlarged by a whole number
GAP, LINE = 4, 14  # pixels
INK, PAPER = (236, 239, 243), (24, 27, 32)
GOOD, BAD, UNKNOWN = (76, 175, 110), (214, 96, 77), (133, 145, 160)
Clip = UInt8[np.ndarray, "_ _ _ 3"]  # F height width


def captioned(episode: Episode) -> Clip:
    """The cameras of an episode beside each other, a bar in the colour of its outcome, and its numbers."""
    views = [_enlarged(frames) for frames in episode.frames.values()]
    height = max(view.shape[1] for view in views)
    bare = np.concatenate([_padded(view, height, view.shape[2]) for view in views], axis=2)
    caption = _caption(episode, bare.shape[2])
    return np.concatenate([bare, np.broadcast_to(caption, (len(bare), *caption.shape))], axis=1)


def mosaic(clips: Sequence[Clip]) -> Clip:
    """As square as it can be; shorter clips wait on their last frame. Even sides, as video codecs want them."""
    columns = math.ceil(math.sqrt(len(clips)))
    lines = math.ceil(len(clips) / columns)
    num, height, width = (max(clip.shape[axis] for clip in clips) for axis in range(3))
    high, wide = lines * (height + GAP) + GAP, columns * (width + GAP) + GAP
    whole = np.full((num, high + high % 2, wide + wide % 2, 3), PAPER, np.uint8)
    for place, clip in enumerate(clips):
        top, left = (place // columns) * (height + GAP) + GAP, (place % columns) * (width + GAP) + GAP
        held = clip[np.minimum(np.arange(num), len(clip) - 1)]
        whole[:, top : top + clip.shape[1], left : left + clip.shape[2]] = held
    return whole


def _enlarged(frames: Clip) -> Clip:
    times = max(1, SMALLEST // max(frames.shape[1:3]))
    return frames.repeat(times, axis=1).repeat(times, axis=2)


def _padded(frames: Clip, height: int, width: int) -> Clip:
    room = ((0, 0), (0, height - frames.shape[1]), (0, width - frames.shape[2]), (0, 0))
    return np.pad(frames, room)


def _caption(episode: Episode, width: int) -> UInt8[np.ndarray, "height width 3"]:
    about = episode.about
    success, reward, advantage = (float(column[0]) for column in (about.success, about.reward, about.advantage))
    outcome = "success" if success == 1 else "failure" if success == 0 else "outcome unknown"
    numbers = [f"{name} {value:+.2f}" for name, value in (("r", reward), ("A", advantage)) if not math.isnan(value)]
    lines = [f"{episode.id}  {outcome}", "  ".join(numbers), about.instruction[0]]
    image = Image.new("RGB", (width, 5 + LINE * len(lines) + 3), PAPER)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width, 2), fill=GOOD if success == 1 else BAD if success == 0 else UNKNOWN)
    font = ImageFont.load_default(11)
    for number, line in enumerate(lines):
        draw.text((3, 5 + LINE * number), _cut(draw, line, font, width - 6), INK, font)
    return np.asarray(image)


def _cut(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """What fits, with dots if that is not all."""
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(f"{text}...", font) > width:
        text = text[:-1]
    return f"{text}..."
