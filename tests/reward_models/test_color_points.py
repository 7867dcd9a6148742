"""Key points of what the instruction names: where they are, what they depend on, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.interfaces import Encoder
from vla_rlaif.reward_config import TABLETOP_THINGS
from vla_rlaif.reward_models.color_points import ColorPointEncoder
from vla_rlaif.types import EnvSpec, Observation

THINGS = {"red cube": (0.9, 0.1, 0.1), "blue cube": (0.1, 0.2, 0.9), "disc": (0.2, 0.8, 0.2)}
SPEC = EnvSpec(
    cameras=("top",),
    image_size=21,
    state_dim=2,
    action_dim=2,
    chunk=1,
    max_decisions=1,
    instructions=("push the red cube onto the disc", "push the blue cube onto the disc", "touch the disc"),
)


def scene(brightness=1.0, red=(5, 10), blue=(10, 15), disc=(18, 2)):
    """A grey ground with three squares of 3 pixels, their centres at (row, column)."""
    image = np.full((1, 21, 21, 3), 120, np.uint8)
    for name, (row, column) in (("red cube", red), ("blue cube", blue), ("disc", disc)):
        color = np.array(THINGS[name]) * 250 * brightness
        image[0, row - 1 : row + 2, column - 1 : column + 2] = color.astype(np.uint8)
    return image


def encode(image, instruction, state=(1.0, 2.0)):
    obs = Observation(images={"top": image}, state=np.array([state]), instruction=(instruction,))
    return ColorPointEncoder(SPEC, THINGS).encode(obs)[0]


def test_points_are_the_centres_of_the_squares():
    encoder = ColorPointEncoder(SPEC, THINGS)
    assert isinstance(encoder, Encoder)
    values = encode(scene(), SPEC.instructions[0])
    assert values.shape == (encoder.dim,)
    # Pixel p of 21 lies at (p - 10) / 10: red at row 5, column 10 is (0, -0.5); the disc is (-0.8, 0.8).
    np.testing.assert_allclose(values[[0, 1]], [0.0, -0.5], atol=0.04)
    np.testing.assert_allclose(values[[4, 5]], [-0.8, 0.8], atol=0.06)
    np.testing.assert_allclose(values[[2, 3]], [np.log1p(9), 9 / 9.5], atol=0.05)
    np.testing.assert_allclose(values[8:11], [-0.8, 1.3, np.hypot(0.8, 1.3)], atol=0.1)  # from cube to disc
    assert values[11:13].tolist() == [1.0, 2.0]
    assert values[13:].tolist() == [1.0, 0.0]  # "push the * onto the *", not "touch the *"


def test_the_instruction_chooses_the_cube():
    moved = scene(blue=(3, 3))
    here, there = encode(scene(), SPEC.instructions[0]), encode(moved, SPEC.instructions[0])
    np.testing.assert_allclose(here, there, atol=1e-6)
    asked = encode(scene(), SPEC.instructions[1])
    np.testing.assert_allclose(asked[[0, 1]], [0.5, 0.0], atol=0.04)
    # One thing is named: the second place is empty.
    assert not encode(scene(), SPEC.instructions[2])[4:8].any()


def test_brightness_hardly_matters_and_absence_is_told():
    light, dark = encode(scene(), SPEC.instructions[0]), encode(scene(brightness=0.5), SPEC.instructions[0])
    np.testing.assert_allclose(light, dark, atol=0.05)
    nothing = encode(np.full((1, 21, 21, 3), 120, np.uint8), SPEC.instructions[0])
    assert abs(nothing[:8]).max() < 1e-3


def test_a_pixel_belongs_to_the_nearest_colour_alone():
    """Two greens 0.11 apart in chromaticity: shares by nearness alone (a sixth) would pull the centres together."""
    things = {"red cube": (0.2, 0.7, 0.35), "disc": (0.2, 0.8, 0.25)}
    image = np.full((1, 21, 21, 3), 120, np.uint8)
    image[0, 4:7, 9:12] = (50, 175, 88)
    image[0, 17:20, 1:4] = (50, 200, 63)
    obs = Observation(images={"top": image}, state=np.ones((1, 2)), instruction=SPEC.instructions[:1])
    spec = replace(SPEC, instructions=SPEC.instructions[:1])
    values = ColorPointEncoder(spec, things).encode(obs)[0]
    seen = 9 / 9.5  # of 9 pixels, half a pixel is in doubt
    np.testing.assert_allclose(values[[0, 1, 4, 5]], np.array([0.0, -0.5, -0.8, 0.8]) * seen, atol=1e-3)


@pytest.mark.parametrize("renderer", ["ray", "egl"])
def test_the_things_of_the_tabletop_are_found_where_they_are(renderer):
    """Of 40 scenes the places on the table follow from the centres in the image within millimetres. The camera looks at
    a plane, so a quadratic of the centre is enough; the oracle is the simulator."""
    env = Tabletop("push", num_envs=40, renderer=renderer)
    try:
        obs = env.reset(np.arange(40)).obs
        places = env._positions()
        values = ColorPointEncoder(env.spec, TABLETOP_THINGS).encode(obs)
    finally:
        env.close()
    for thing, place in enumerate((places.cube, places.goal)):
        x, y = values[:, 4 * thing], values[:, 4 * thing + 1]
        terms = np.stack([np.ones(40), x, y, x * x, x * y, y * y], axis=1)
        error = place[:, :2] - terms @ np.linalg.lstsq(terms, place[:, :2])[0]
        assert np.sqrt((error**2).sum(axis=1).mean()) < 0.005  # metres; a pixel is 0.01


def test_rows_do_not_depend_on_their_neighbours():
    images = np.concatenate([scene(), scene(red=(15, 5))])
    obs = Observation(images={"top": images}, state=np.ones((2, 2)), instruction=SPEC.instructions[:2])
    both = ColorPointEncoder(SPEC, THINGS).encode(obs)
    alone = encode(scene(red=(15, 5)), SPEC.instructions[1], state=(1.0, 1.0))
    np.testing.assert_allclose(both[1], alone, rtol=1e-6)


def test_what_cannot_be_grounded_is_named():
    with pytest.raises(ValueError, match=r"'push the red cube onto the disc' names none of reward.encoder.things"):
        ColorPointEncoder(SPEC, {"bowl": (1.0, 0.0, 0.0)})
    with pytest.raises(ValueError, match="got the instruction 'dance'"):
        encode(scene(), "dance")
