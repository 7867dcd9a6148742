"""MuJoCo Warp's renderer on its CPU device against the other two. `make test-warp` installs the extra and runs this."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.envs.tabletop.scene import CAMERAS

pytest.importorskip("mujoco_warp", reason="renderer warp needs the extra: pip install 'vla_rlaif[warp]'")
NUM_ENVS, SIZE = 3, 32
Images = dict[str, list[dict[str, np.ndarray]]]


def played(renderer: str, **settings: Any) -> list[dict[str, np.ndarray]]:
    """The images of a start and of what follows, the same for all renderers."""
    env = Tabletop("push", num_envs=NUM_ENVS, image_size=SIZE, max_steps=20, renderer=renderer, **settings)
    images = [dict(env.reset(np.arange(NUM_ENVS)).obs.images)]
    for i in range(3):
        images.append(dict(env.step(np.random.default_rng(i).uniform(-1, 1, (NUM_ENVS, 4, 7))).obs.images))
    env.close()
    return images


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    yield {renderer: played(renderer) for renderer in ("egl", "ray", "warp")}


@pytest.mark.parametrize("camera", CAMERAS)
@pytest.mark.parametrize("other", ["egl", "ray"])
def test_warp_images_look_like_the_others(images: Images, other: str, camera: str) -> None:
    for mine, theirs in zip(images["warp"], images[other], strict=True):
        a, b = mine[camera].astype(int), theirs[camera].astype(int)
        assert np.abs(a - b).mean() < 6  # of 255
        assert (np.abs(a - b).max(axis=-1) > 60).mean() < 0.005  # edges only
        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.97


def test_equal_states_give_equal_images_and_others_do_not() -> None:
    env = Tabletop("push", num_envs=NUM_ENVS, image_size=SIZE, renderer="warp")
    first = env.reset(np.array([4, 4, 5])).obs.images["primary"]
    np.testing.assert_array_equal(first[0], first[1])
    assert not np.array_equal(first[0], first[2])
    np.testing.assert_array_equal(env.reset(np.array([4, 4, 5])).obs.images["primary"], first)


def test_each_member_has_its_own_look() -> None:
    randomize = {"texture": 0.5, "camera": 0.05}
    for mine, theirs in zip(played("warp", randomize=randomize), played("egl", randomize=randomize), strict=True):
        for camera in CAMERAS:
            assert np.abs(mine[camera].astype(int) - theirs[camera]).mean() < 8


def test_lighting_cannot_vary() -> None:
    with pytest.raises(ValueError, match="one headlight for all members"):
        Tabletop("push", num_envs=1, image_size=SIZE, renderer="warp", randomize={"lighting": 0.1})
