"""A clip as one picture that holds every frame: a browser shows any frame of such a sheet at once, which is what
scrubbing clips in step needs.

Axes: F frames.
"""

import io
import math

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

MAX_SIDE = 16383  # pixels of a WebP picture, by its format
MAX_LOSSLESS = 128  # pixels; in smaller frames a lossy picture smears the few pixels that matter
QUALITY = 88


def columns_of(num_frames: int) -> int:
    """Frames side by side in a sheet, which is as square as it can be."""
    return math.ceil(math.sqrt(num_frames))


def encode_sheet(frames: UInt8[np.ndarray, "F height width 3"]) -> bytes:
    """All frames in one WebP picture, row by row."""
    num, height, width, _ = frames.shape
    columns = columns_of(num)
    lines = math.ceil(num / columns)
    if columns * width > MAX_SIDE or lines * height > MAX_SIDE:
        raise ValueError(
            f"a clip of {num} frames of {width} x {height} pixels is too large for a picture of {MAX_SIDE} pixels a "
            "side: record smaller images or shorter episodes."
        )
    padded = np.zeros((lines * columns, height, width, 3), np.uint8)
    padded[:num] = frames
    sheet = padded.reshape(lines, columns, height, width, 3).swapaxes(1, 2).reshape(lines * height, columns * width, 3)
    data = io.BytesIO()
    is_small = max(height, width) <= MAX_LOSSLESS
    Image.fromarray(sheet).save(data, "WEBP", lossless=is_small, quality=50 if is_small else QUALITY, method=2)
    return data.getvalue()


def decode_sheet(data: bytes, num_frames: int, size: tuple[int, int]) -> UInt8[np.ndarray, "F height width 3"]:
    """The frames of ``encode_sheet``: exactly those up to MAX_LOSSLESS pixels, nearly those above. ``size`` is the
    height and width of a frame. Raises ValueError if the picture is another or damaged."""
    (height, width), columns = size, columns_of(num_frames)
    lines = math.ceil(num_frames / columns)
    try:
        with Image.open(io.BytesIO(data)) as image:
            sheet = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"a clip's picture cannot be read: {error}") from None
    if sheet.shape != (lines * height, columns * width, 3):
        raise ValueError(
            f"a clip's picture is {sheet.shape[1]} x {sheet.shape[0]} pixels, wanted {columns * width} x "
            f"{lines * height} of {num_frames} frames of {width} x {height}."
        )
    frames = sheet.reshape(lines, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
    return np.ascontiguousarray(frames[:num_frames])
