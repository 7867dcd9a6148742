"""The card of a run's final reward model, of what the run still has: its labels and the features of their episodes.

Their frames are not kept, so mistakes are named without clips; `vla-rlaif reward eval` on episodes on disk shows them.
"""

from pathlib import Path

import numpy as np

from vla_rlaif.preferences.data import EpisodeFeatures
from vla_rlaif.preferences.refresh import PreferenceLearner
from vla_rlaif.reward_card import Judged, failed_gates, make_card, write_card_json
from vla_rlaif.reward_card_page import write_card_page
from vla_rlaif.reward_judged import clip_ends, sigmoid
from vla_rlaif.reward_models.preference import PreferenceReward

NAME = "reward_card"


def write_run_card(preferences: PreferenceLearner, reward: PreferenceReward, run_dir: Path) -> list[str]:
    """``reward_card.json`` and ``.html`` in the run directory; returns what it warns of. Nothing without labels."""
    judged = _judged(preferences, reward)
    if judged is None:
        return []
    about = {
        "reward.heads": ", ".join(reward.heads),
        "reward.score": reward.config.score,
        "reward.frames": reward.config.frames,
        "reward.members": str(reward.config.num_members),
        "labels": str(preferences.num_labels),
        "version": str(reward.version),
    }
    card = make_card(judged, about)
    write_card_json(card, run_dir / f"{NAME}.json")
    write_card_page(card, run_dir / f"{NAME}.html", {})
    return failed_gates(card)


def _judged(preferences: PreferenceLearner, reward: PreferenceReward) -> Judged | None:
    labelled = preferences.labelled
    if labelled is None or not reward.version:
        return None
    ids, data = labelled
    said = preferences.instructions()
    features = EpisodeFeatures(values=data.values, live=data.live)
    logits = reward.member_logits(features).mean(axis=0)
    pairs, label = data.pairs[data.held_out], data.target[data.held_out]
    kinds, success, p = clip_ends(reward, preferences.clips)
    return Judged(
        ids=ids,
        instruction=[said.get(name, "") for name in ids],
        score=reward.score_features(features),
        group=np.arange(len(ids)),  # which start states they had is not kept
        pairs=pairs,
        label=label,
        p_first=sigmoid(logits[pairs[:, 0]] - logits[pairs[:, 1]]),
        clip_kinds=kinds,
        clip_success=success,
        clip_p=p,
        threshold=reward.threshold,
        false_positive_rate=reward.config.false_positive_rate if "success" in reward.heads else float("nan"),
    )
