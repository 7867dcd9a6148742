"""Episodes as small animations inside the page: GIF bytes as base64 data URIs."""

import base64
import io

import numpy as np
from einops import rearrange
from jaxtyping import UInt8
from PIL import Image

FRAME_MS = 150
HOLD_MS = 1200  # on the last frame, so that the outcome can be seen


def animation(frames: UInt8[np.ndarray, "F height width 3"]) -> str:
    """A looping GIF as a data URI. One palette for the whole clip: with one a frame, colours flicker."""
    palette = Image.fromarray(rearrange(frames, "f h w c -> (f h) w c")).quantize(256, Image.Quantize.MEDIANCUT)
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (len(images) - 1) + [HOLD_MS]
    data = io.BytesIO()
    images[0].save(data, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
    return _uri(data, "gif")


def still(frame: UInt8[np.ndarray, "height width 3"]) -> str:
    """One frame as a data URI, for readers who ask for reduced motion."""
    data = io.BytesIO()
    Image.fromarray(frame).save(data, "PNG", optimize=True)
    return _uri(data, "png")


def _uri(data: io.BytesIO, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode('ascii')}"
