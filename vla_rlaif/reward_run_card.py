"""The card of a run's final reward model, of what the run still has: its labels, the features of their episodes, and
the frames of those that it has recorded.

The reward may be in this process or on workers. Which start states labelled episodes had is not kept, nor the truth.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from vla_rlaif.build_reward import fittable
from vla_rlaif.config import RunConfig
from vla_rlaif.inspect.recorded import RecordedSource
from vla_rlaif.parts import Parts
from vla_rlaif.preferences.data import EpisodeFeatures
from vla_rlaif.preferences.refresh import FittableReward, PreferenceLearner
from vla_rlaif.reward_card import failed_gates, make_card, write_card_json
from vla_rlaif.reward_card_data import Card, Judged
from vla_rlaif.reward_card_page import Clips, write_card_page
from vla_rlaif.reward_config import PreferenceRewardConfig, learned_part
from vla_rlaif.reward_judged import judge_features

NAME = "reward_card"
NOT_RECORDED = "not among the episodes that this run has recorded (record.every, record.groups)"


def write_run_card(config: RunConfig, parts: Parts, run_dir: Path, say: Callable[[str], None]) -> None:
    """``reward_card.json`` and ``.html`` in the run directory, and what they warn of. Nothing where nothing is learned
    from labels."""
    settings = learned_part(config.reward)
    if settings is None or parts.preferences is None:
        return
    reward = fittable(parts.reward)
    judged = _judged(parts.preferences, reward, settings)
    if judged is None:
        return
    about = {
        "reward.heads": ", ".join(settings.heads),
        "reward.score": settings.score,
        "reward.frames": settings.frames,
        "reward.members": str(settings.members),
        "labels": str(parts.preferences.num_labels),
        "version": str(reward.version),
    }
    card = make_card(judged, about)
    write_card_json(card, run_dir / f"{NAME}.json")
    write_card_page(card, run_dir / f"{NAME}.html", recorded_clips(card, run_dir / "episodes"), missing=NOT_RECORDED)
    for sentence in failed_gates(card):
        say(f"reward card: {sentence}")


def recorded_clips(card: Card, folder: Path) -> Clips:
    """Of the episodes that the card's mistakes name and that the run has recorded: frames of the first camera."""
    source = RecordedSource(folder)
    named = {name for mistake in card.mistakes for name in (mistake.first, mistake.second)}
    clips = {}
    for name in sorted(named & set(source.table.id)):
        frames = source.frames(name)
        if frames:
            clips[name] = next(iter(frames.values()))
    return clips


def _judged(preferences: PreferenceLearner, reward: FittableReward, settings: PreferenceRewardConfig) -> Judged | None:
    labelled = preferences.labelled
    if labelled is None or not reward.version:
        return None
    ids, data = labelled
    return judge_features(
        reward,
        settings,
        EpisodeFeatures(values=data.values, live=data.live),
        ids,
        instruction=_instructions(preferences, ids),
        group=np.arange(len(ids)),
        pairs=data.pairs[data.held_out],
        label=data.target[data.held_out],
        clips=preferences.clips,
    )


def _instructions(preferences: PreferenceLearner, ids: Sequence[str]) -> list[str]:
    said = preferences.instructions()
    return [said.get(name, "") for name in ids]
