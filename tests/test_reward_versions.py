"""One group is judged by one version of the reward, and episodes by the version of the step that uses them."""

from dataclasses import replace

import numpy as np
from test_train import LEARNED, start

from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.gather import gather
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.parts import Acting
from vla_rlaif.rollout import train_starts
from vla_rlaif.timing import IdleMeter
from vla_rlaif.train import train
from vla_rlaif.types import Episodes

ALGORITHM = {"group_size": 16, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "std_floor": 0.5}
EVERY_STEP = {**LEARNED, "refresh_every": 1, "labels_per_refresh": 10, "initial_labels": 60}


class Logged:
    """A reward that writes down who was judged by which version."""

    def __init__(self, reward) -> None:
        self._reward = reward
        self.judged: list[tuple[int, set[int]]] = []  # version, groups

    @property
    def version(self) -> int:
        return self._reward.version

    def score(self, episodes: Episodes):
        self.judged.append((self.version, set(episodes.starts.group.tolist())))
        return self._reward.score(episodes)


def test_a_group_has_one_version_and_all_rounds_of_a_step_have_the_same(tmp_path):
    """A refit every step, and two rounds in each: std_floor makes groups of middling spread dead."""
    loop = {"steps": 4, "validate_every": 4, "validation_episodes": 64, "checkpoint_every": 4}
    sections: dict[str, dict] = {"reward": EVERY_STEP, "loop": {**loop, "min_live_share": 1.0, "max_refills": 1}}
    sections |= {"monitor": {"action": "off"}, "algorithm": ALGORITHM}
    config, parts = start(tmp_path, **sections)
    logged = Logged(parts.reward)
    with MetricsLog(tmp_path) as log:
        train(config, replace(parts, reward=logged), log, tmp_path, resume=False, say=print)
    versions = [version for version, _ in logged.judged]
    groups = [group for _, found in logged.judged for group in found]
    assert len(groups) == len(set(groups)), "no group is judged twice"
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert len(versions) == 4 + sum(line["groups/refills"] for line in lines) > 4
    assert versions == sorted(versions) and set(versions) == {1, 2, 3, 4}
    assert [line["reward/version"] for line in lines] == [1, 2, 3, 4]


def test_stored_episodes_carry_no_score_and_are_judged_by_the_present_version(tmp_path):
    """Played and stored while the reward had version 1, used in a step after two more fits."""
    config, parts = start(tmp_path / "run", reward=LEARNED, loop={"stored": str(tmp_path / "store")})
    assert parts.preferences is not None and parts.stored is not None
    labelled = parts.rollouts.play(train_starts(5, 0, 4, 16), seed=5).episodes
    played = parts.rollouts.play(train_starts(0, 0, 4, 16), seed=0).episodes
    assert labelled is not None and played is not None
    parts.preferences.refresh(labelled, [str(i) for i in range(64)], -1, 40)
    old = parts.reward.score(played)
    EpisodeStore(tmp_path / "store").append("elsewhere", played)
    for number in (1, 2):
        ids = [f"{number}:{i}" for i in range(64)]
        parts.preferences.refresh(labelled, ids, number, 40)
    assert parts.reward.version == 3
    gathered = gather(config, parts, IdleMeter(), 0, Acting(step=0, version=0, trained=None))
    now = parts.reward.score(played)
    assert not np.allclose(now, old)
    assert gathered.metrics["stored/used"] == 64
    np.testing.assert_allclose(gathered.metrics["reward/mean"], now.mean(), rtol=1e-5)
