"""Clips of known outcome and the negatives made of them, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import SPEC, make_episodes

from vla_rlaif.dataset import Demonstrations
from vla_rlaif.preferences.clips import KINDS, join_clips, make_clips
from vla_rlaif.preferences.data import EpisodeFeatures
from vla_rlaif.preferences.demonstrated import as_episodes, demonstrated_clips


def encode(episodes):
    """Two features: the number of the frame, and which instruction was given."""
    num, frames = episodes.state.shape[:2]
    said = np.array([SPEC.instructions.index(text) for text in episodes.instruction])
    values = np.stack([np.tile(np.arange(frames), (num, 1)), np.tile(said[:, None], (1, frames))], axis=2)
    live = np.arange(frames) <= episodes.num_decisions[:, None]
    return EpisodeFeatures(values=values.astype(np.float32), live=live & episodes.valid[:, None])


def by_kind(clips, kind):
    """Frame numbers, progress and success of the clips of one kind."""
    rows = clips.kind == KINDS.index(kind)
    each = [rows & (clips.clip == c) for c in np.unique(clips.clip[rows])]
    return [(clips.values[one], clips.progress[one], clips.success[one]) for one in each]


def test_a_success_gives_progress_and_five_kinds_of_clips():
    episodes = make_episodes(2, group_size=2)
    clips = make_clips(episodes, np.array([1.0, np.nan]), np.array([True, False]), SPEC.instructions, encode, 0)
    assert clips.held_out.all()
    ((values, progress, success),) = by_kind(clips, "succeeded")
    assert values[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert progress.tolist() == [0, 0.25, 0.5, 0.75, 1.0]
    assert success.tolist() == [0, 0, 0, 0, 1]
    ((values, progress, success),) = by_kind(clips, "near miss")
    assert values[:, 0].tolist() == [0, 1, 2, 3] and progress[-1] == 0.75 and not success.any()
    ((values, progress, success),) = by_kind(clips, "cut")
    assert 2 <= len(values) <= 4 and values[-1, 0] < 4 and not success.any()
    ((values, progress, success),) = by_kind(clips, "rewound")
    turn = len(values) // 2
    assert values[:, 0].tolist() == [*range(turn + 1), *range(turn - 1, -1, -1)]
    assert progress[0] == progress[-1] == 0 and progress[turn] == turn / 4 and not success.any()
    ((values, progress, success),) = by_kind(clips, "other instruction")
    assert values[:, 1].tolist() == [1] * 5  # the episode's own is 0
    assert not progress.any() and not success.any()
    assert not by_kind(clips, "failed")
    assert clips.is_end.sum() == 5


def test_a_failure_says_nothing_of_progress():
    episodes = make_episodes(1, length=np.array([2]))
    clips = make_clips(episodes, np.array([0.2]), np.array([False]), SPEC.instructions, encode, 0)
    ((values, progress, success),) = by_kind(clips, "failed")
    assert values[:, 0].tolist() == [0, 1, 2] and np.isnan(progress).all()
    assert success.tolist() == [0, 0, 0.2]
    assert len(np.unique(clips.clip)) == 1


def test_one_instruction_has_no_other():
    clips = make_clips(make_episodes(4), np.ones(4), np.zeros(4, bool), SPEC.instructions[:1], encode_any, 0)
    assert KINDS.index("other instruction") not in clips.kind


def encode_any(episodes):
    return encode(replace(episodes, instruction=SPEC.instructions[:1] * len(episodes.instruction)))


def test_joined_clips_are_numbered_on():
    one = make_clips(make_episodes(2), np.array([1.0, 0.0]), np.zeros(2, bool), SPEC.instructions, encode, 0)
    both = join_clips([one, one])
    assert both.clip.tolist() == [*one.clip, *(one.clip + one.clip.max() + 1)]
    assert len(both.values) == 2 * len(one.values)
    assert both.source.tolist() == [*one.source, *(one.source + one.source.max() + 1)]


def test_a_clip_and_all_that_starts_where_it_does_are_of_one_source():
    episodes = make_episodes(6, group_size=2)
    outcome = np.array([1.0, 0.0, np.nan, np.nan, 1.0, 1.0])  # of the groups 0, 0, 1, 1, 2, 2
    clips = make_clips(episodes, outcome, np.zeros(6, bool), SPEC.instructions, encode, 0)
    assert clips.source[clips.is_end].tolist() == [0] * 5 + [1] * 8 + [0, 1, 1]  # those of other instructions are last
    assert all(len(set(clips.source[clips.clip == c])) == 1 for c in np.unique(clips.clip))


def demonstrations(length, recorded=9):
    steps = np.arange(recorded)
    state = np.tile(steps[None, :, None], (len(length), 1, 8)).astype(np.float32)
    return Demonstrations(
        images={"top": np.zeros((len(length), recorded, 8, 8, 3), np.uint8)},
        state=state,
        instruction=SPEC.instructions[:1] * len(length),
        action=np.zeros((len(length), recorded, 2), np.float32),
        mask=steps < np.array(length)[:, None],
        success=np.array(length) < recorded,
    )


def test_demonstrations_are_cut_into_decisions():
    demos = demonstrations([6, 3])
    seen = as_episodes(replace(demos, is_end_seen=True), np.arange(2), chunk=2)
    # Six steps of two a decision end in frame 6; three end in frame 3, after a decision and a half.
    assert seen.state[:, :, 0].tolist() == [[0, 2, 4, 6], [0, 2, 3, 3]]
    assert seen.mask.tolist() == [[True] * 3, [True, True, False]]
    unseen = as_episodes(demos, np.arange(2), chunk=2)
    assert unseen.state[:, :, 0].tolist() == [[0, 2, 4, 5], [0, 2, 2, 2]]


def test_only_demonstrations_that_succeeded_teach():
    settings = {"chunk": 2, "held_out": 0.5, "instructions": SPEC.instructions, "encode": encode}
    clips = demonstrated_clips(demonstrations([6, 9, 3, 5, 7]), **settings, seed=0)
    won = clips.kind == KINDS.index("succeeded")
    assert len(np.unique(clips.clip[won])) == 4
    assert len(np.unique(clips.clip[won & clips.held_out])) == 2
    with pytest.raises(ValueError, match="none of them succeeded"):
        demonstrated_clips(demonstrations([9, 9]), **settings, seed=0)
