"""Which frames a judge is shown."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_episodes

from vla_rlaif.preferences.frames import clip, frame_indices


@pytest.mark.parametrize(
    ("num_live", "num", "indices"),
    [
        (5, 5, [0, 1, 2, 3, 4]),
        (5, 2, [0, 4]),
        (5, 1, [4]),
        (9, 3, [0, 4, 8]),
        (11, 4, [0, 3, 7, 10]),  # 0, 3.33, 6.67, 10
        (3, 8, [0, 1, 2]),
        (1, 4, [0]),
    ],
)
def test_by_hand(num_live: int, num: int, indices: list[int]) -> None:
    assert frame_indices(num_live, num).tolist() == indices


@given(st.integers(1, 400), st.integers(2, 64))
def test_the_first_and_the_last_are_in_and_the_rest_is_even(num_live: int, num: int) -> None:
    found = frame_indices(num_live, num)
    assert (found[0], found[-1], len(found)) == (0, num_live - 1, min(num, num_live))
    assert np.ptp(np.diff(found)) <= 1 if len(found) > 1 else True


def test_frames_after_the_end_are_not_shown() -> None:
    episodes = make_episodes(2, length=np.array([2, 4]))
    images = episodes.images["top"]
    assert len(clip(episodes, 0, 8)) == 3 and len(clip(episodes, 1, 8)) == 5
    np.testing.assert_array_equal(clip(episodes, 0, 1)[0], images[0, 2])


def test_cameras_side_by_side() -> None:
    episodes = make_episodes(2)
    wide = replace(episodes, images={"top": episodes.images["top"], "wrist": 255 - episodes.images["top"]})
    (frame,) = clip(wide, 1, 1, ("wrist", "top"))
    assert frame.shape == (8, 16, 3)
    np.testing.assert_array_equal(frame[:, 8:], episodes.images["top"][1, -1])
    np.testing.assert_array_equal(frame[:, :8], 255 - frame[:, 8:])
