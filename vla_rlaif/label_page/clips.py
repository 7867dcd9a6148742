"""Clips as the page gets them: one picture per clip and camera that holds every frame, kept compressed.

A browser shows any frame of such a sheet at once, which is what scrubbing two clips in step needs.

Axes: F frames.
"""

import io
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vla_rlaif.label_page.catalogue import Catalogue, Shown

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


class ClipCache:
    """Sheets by episode and camera. The least recently used ones go when ``max_bytes`` are held.

    May be used from any thread; one at a time reads frames.
    """

    def __init__(self, catalogue: Catalogue, *, max_bytes: int = 256 * 2**20) -> None:
        self._catalogue, self._max_bytes = catalogue, max_bytes
        self._sheets: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._reading, self._keeping = threading.Lock(), threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return self._num_bytes

    def shown(self, name: str) -> Shown | None:
        return self._catalogue.shown(name)

    def sheet(self, name: str, camera: str, *, also: Sequence[str] = ()) -> bytes:
        """One sheet. ``also`` names episodes that will be wanted soon: those in the same file cost little more."""
        if (found := self._kept(name, camera)) is not None:
            return found
        with self._reading:
            if (found := self._kept(name, camera)) is not None:  # another thread was faster
                return found
            missing = [other for other in dict.fromkeys((name, *also)) if self._kept(other, camera) is None]
            sheets = _sheets(self._catalogue, missing)
            for key, data in sheets.items():
                if key[0] != name:
                    self._keep(key, data)
            for key, data in sheets.items():  # last, so that what is asked for is not what goes first
                if key[0] == name:
                    self._keep(key, data)
            return sheets[name, camera]

    def _kept(self, name: str, camera: str) -> bytes | None:
        with self._keeping:
            if (name, camera) not in self._sheets:
                return None
            self._sheets.move_to_end((name, camera))
            return self._sheets[name, camera]

    def _keep(self, key: tuple[str, str], data: bytes) -> None:
        with self._keeping:
            self._num_bytes += len(data) - len(self._sheets.pop(key, b""))
            self._sheets[key] = data
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._sheets.popitem(last=False)[1])


def _sheets(catalogue: Catalogue, names: Sequence[str]) -> Mapping[tuple[str, str], bytes]:
    frames = catalogue.frames(names)
    return {
        (name, camera): encode_sheet(images)
        for name, by_camera in frames.items()
        for camera, images in by_camera.items()
    }
