"""Windows and chunks against upstream's numbers and by hand."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from vla_rlaif.policies.octo.windows import action_chunks, action_pad_mask, history_windows

GOLDEN = Path(__file__).parents[1] / "golden" / "octo" / "extra_golden.npz"


@cache
def golden(case: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(f"chunk/{case}/"): v for k, v in np.load(GOLDEN).items() if k.startswith(f"chunk/{case}/")}


@pytest.mark.parametrize("case", ["goal", "nogoal"])
def test_chunks_are_upstreams(case: str) -> None:
    g = golden(case)
    steps, is_real = history_windows(6, 2)
    np.testing.assert_array_equal(steps, g["x"])
    np.testing.assert_array_equal(is_real, g["timestep_pad_mask"])
    actions = np.arange(12, dtype=np.float32).reshape(6, 2)
    np.testing.assert_array_equal(action_chunks(actions, 2, 3), g["action"])
    goal_step = np.full(6, 5) if case == "goal" else None
    mask = action_pad_mask(6, 2, 3, goal_step=goal_step, upstream_offset=True)
    np.testing.assert_array_equal(mask, ~g["task_completed"])
    np.testing.assert_array_equal(np.broadcast_to(mask[..., None], (6, 2, 3, 2)), g["action_pad_mask"])


def test_masked_actions_are_exactly_the_repeated_ones() -> None:
    """Upstream's offset leaves two of them in: the same chunk has 1 masked action there, 3 here."""
    time = np.arange(6.0)[:, None]  # action t is the number t, so a repeated one shows
    chunks, mask = action_chunks(time, 2, 3)[..., 0], action_pad_mask(6, 2, 3)
    for chunk, row in zip(chunks.reshape(-1, 3), mask.reshape(-1, 3), strict=True):
        want = chunk[0] + np.arange(3) <= 5
        np.testing.assert_array_equal(row, want)
    # windows of t=4: frames 3, 4; of t=5: frames 4, 5. Actions 6 and 7 do not exist.
    assert mask[4].tolist() == [[True, True, True], [True, True, False]]
    assert mask[5].tolist() == [[True, True, False], [True, False, False]]
    assert (~mask).sum() == 4 and (~action_pad_mask(6, 2, 3, upstream_offset=True)).sum() == 1


def test_actions_after_the_goal_are_masked() -> None:
    """Window 1: the chunk of frame t has actions t, t+1; the goal of frames 0, 1, 2, 3 is frame 2, 2, 3, 9."""
    mask = action_pad_mask(4, 1, 2, goal_step=np.array([2, 2, 3, 9]))
    assert mask[:, 0].tolist() == [[True, True], [True, False], [True, False], [True, False]]


def test_a_window_longer_than_the_trajectory() -> None:
    steps, is_real = history_windows(2, 4)
    assert steps.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
    assert is_real.tolist() == [[False, False, False, True], [False, False, True, True]]
    # frames before the start carry the chunk of the first frame
    assert action_chunks(np.array([[1.0], [2.0]]), 4, 2)[1, :, :, 0].tolist() == [[1, 2], [1, 2], [1, 2], [2, 2]]


def test_impossible_sizes_are_refused() -> None:
    for call in (lambda: history_windows(0, 2), lambda: history_windows(3, 0), lambda: action_pad_mask(3, 2, 0)):
        with pytest.raises(ValueError, match=r"positive|at least 1"):
            call()
