"""Resizing against upstream's TensorFlow, jax.image and scipy."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy.ndimage import map_coordinates

from vla_rlaif.policies.octo.images import centre_crop, resize, resize_frames

GOLDEN = Path(__file__).parents[1] / "golden" / "octo" / "extra_golden.npz"


@cache
def golden(name: str) -> np.ndarray:
    return np.load(GOLDEN)[f"wrappers/resize/{name}"]


def assert_same_grey_levels(got: np.ndarray, want: np.ndarray, share: float = 2e-4) -> None:
    """At most one level apart, in at most ``share`` of the values: a tie rounded the other way."""
    assert got.dtype == np.uint8 and got.shape == want.shape
    apart = np.abs(got.astype(int) - want.astype(int))
    assert apart.max() <= 1 and (apart > 0).mean() <= share, (apart.max(), (apart > 0).mean())


@pytest.mark.parametrize(
    ("name", "size", "crop_area"),
    [("wrist_32", (32, 32), 1.0), ("primary_160_up", (160, 160), 1.0), ("primary_64_crop", (64, 64), 0.9)],
)
def test_resized_images_are_upstreams(name: str, size: tuple[int, int], crop_area: float) -> None:
    assert_same_grey_levels(resize(golden("in"), size, crop_area=crop_area), golden(name))


@pytest.mark.parametrize("size", [(5, 7), (9, 20), (31, 4), (12, 11)])
def test_every_direction_of_resizing_against_jax_image(size: tuple[int, int]) -> None:
    """Smaller, larger, one of each, one axis only; with overshoot at hard edges, which is clipped."""
    frames = np.random.default_rng(0).choice(np.array([0, 30, 255], np.uint8), (2, 3, 12, 10, 3))
    raw = jax.image.resize(frames.astype(np.float32), (2, 3, *size, 3), "lanczos3", antialias=True)
    want = np.clip(np.round(np.asarray(raw)), 0, 255).astype(np.uint8)
    assert np.asarray(raw).min() < -5
    assert_same_grey_levels(resize(frames, size), want, share=2e-3)
    compiled = jax.jit(resize_frames, static_argnums=1)(frames, size)
    assert_same_grey_levels(np.asarray(compiled), want, share=2e-3)


def test_the_right_size_is_left_alone() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (1, 2, 6, 8, 3), np.uint8)
    assert resize(frames, (6, 8)) is frames
    assert "dot_general" not in str(jax.make_jaxpr(lambda x: resize_frames(x, (6, 8)))(frames))
    np.testing.assert_array_equal(centre_crop(frames, 1.0), frames)


def test_centre_crop_against_scipy() -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
    low, high = (1 - 0.9**0.5) / 2, (1 + 0.9**0.5) / 2
    grid = np.meshgrid(8 * np.linspace(low, high, 9), 12 * np.linspace(low, high, 13), indexing="ij")
    want = np.stack([map_coordinates(image[..., c].astype(float), grid, order=1) for c in range(3)], -1)
    assert_same_grey_levels(centre_crop(image), np.round(want).astype(np.uint8), share=2e-2)


@pytest.mark.parametrize(("size", "area"), [((0, 8), 1.0), ((8, 8), 0.0), ((8, 8), 1.5)])
def test_impossible_sizes_are_refused(size: tuple[int, int], area: float) -> None:
    with pytest.raises(ValueError, match="positive pixels"):
        resize(np.zeros((8, 8, 3), np.uint8), size, crop_area=area)
