"""Camera images to the size a policy was trained with, as upstream resizes them with TensorFlow.

Resizing is linear, so it is one small matrix for each axis: the same matrices serve NumPy (environments need no
accelerator library) and compiled forwards. Axes: h, w pixels of the input; height, width of the result.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

Size = tuple[int, int]  # height, width in pixels
CROP_AREA = 0.9  # of image_primary in evaluation: the middle of the random crops of training


def resize(
    image: UInt8[np.ndarray, "*b h w 3"], size: Size, *, crop_area: float = 1.0
) -> UInt8[np.ndarray, "*b height width 3"]:
    """Lanczos3 with antialiasing, then a central crop of ``crop_area`` scaled back up; rounded once, at the end.

    The aspect ratio is not kept, as upstream.
    """
    height, width = _matrices(image.shape, size, crop_area)
    if height is None and width is None:
        return image
    x = image.astype(np.float32)
    x = x if height is None else np.einsum("yh,...hwc->...ywc", height, x, optimize=True)
    x = x if width is None else np.einsum("xw,...ywc->...yxc", width, x, optimize=True)
    return np.clip(np.round(x), 0, 255).astype(np.uint8)


def centre_crop(image: UInt8[np.ndarray, "*b h w 3"], area: float = CROP_AREA) -> UInt8[np.ndarray, "*b h w 3"]:
    """The middle ``area`` of an image that has the right size, scaled back up bilinearly.

    An image that is resized too is cropped by ``resize``, as upstream: rounding and clipping twice shifts hard edges by
    several grey levels.
    """
    return resize(image, (image.shape[-3], image.shape[-2]), crop_area=area)


def resize_frames(frames: UInt8[jax.Array, "B T h w 3"], size: Size) -> UInt8[jax.Array, "B T height width 3"]:
    """``resize`` without a crop, for use inside a compiled function."""
    height, width = _matrices(frames.shape, size, 1.0)
    if height is None and width is None:
        return frames
    x, precision = frames.astype(jnp.float32), jax.lax.Precision.HIGHEST
    x = x if height is None else jnp.einsum("yh,bthwc->btywc", height, x, precision=precision)
    x = x if width is None else jnp.einsum("xw,btywc->btyxc", width, x, precision=precision)
    return jnp.clip(jnp.round(x), 0, 255).astype(jnp.uint8)


def _matrices(
    shape: tuple[int, ...], size: Size, crop_area: float
) -> tuple[Float[np.ndarray, "height h"] | None, Float[np.ndarray, "width w"] | None]:
    """What each axis is multiplied with; None where nothing changes."""
    if min(size) < 1 or not 0 < crop_area <= 1:
        raise ValueError(f"size {size}, crop_area {crop_area}: wanted positive pixels and an area in (0, 1].")
    pairs = zip(shape[-3:-1], size, strict=True)
    height, width = (None if old == new and crop_area == 1 else _matrix(old, new, crop_area) for old, new in pairs)
    return height, width


@cache
def _matrix(old: int, new: int, crop_area: float) -> Float[np.ndarray, "new old"]:
    matrix = np.eye(old) if old == new else _lanczos(old, new)
    matrix = matrix if crop_area == 1 else _crop(new, crop_area) @ matrix
    return matrix.astype(np.float32)


def _lanczos(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Rows are Lanczos windows of 3 lobes around pixel centres, widened when shrinking, normalised at the border."""
    centre = (np.arange(new) + 0.5) * old / new - 0.5
    x = np.abs(centre[:, None] - np.arange(old)) / max(old / new, 1.0)
    weights = np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
    return weights / weights.sum(1, keepdims=True)


def _crop(size: int, area: float) -> Float[np.ndarray, "size size"]:
    """Rows interpolate linearly between the two pixels around each point of the crop; corners map to corners."""
    side = np.sqrt(area)
    at = (size - 1) * np.linspace((1 - side) / 2, (1 + side) / 2, size)
    return np.maximum(0.0, 1 - np.abs(at[:, None] - np.arange(size)))
