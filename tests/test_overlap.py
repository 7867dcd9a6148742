"""The real loop with steps played ahead: which weights act, what is counted, and that nothing but the seeds matters."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_train import BASE, LEARNED, comparable, go, start

from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.config import parse_config
from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.evaluate import play_all
from vla_rlaif.interfaces import Rollouts
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.rollout import Split, take, train_starts
from vla_rlaif.train import train
from vla_rlaif.types import Played, Starts

SEQUENTIAL: dict[str, Any] = {"policy": {"type": "gaussian", "backend": "torch"}}  # nothing to compile


def overlapping(staleness: int = 1, **loop: Any) -> dict[str, Any]:
    return {**SEQUENTIAL, "loop": {**BASE["loop"], "overlap": True, "staleness": staleness, **loop}}


class Faulty:
    """Rollouts that count what is ordered, and change what comes back of some training rounds, by their number."""

    def __init__(self, rollouts: Rollouts, faults: dict[int, Callable[[Played], Played]]) -> None:
        self.spec, self.num_envs, self.window = rollouts.spec, rollouts.num_envs, rollouts.window
        self._rollouts, self._faults = rollouts, faults
        self.num_rounds = self.num_ordered = 0

    def play(self, starts: Starts, *, seed: int, noise_scale: float = 1.0) -> Played:
        played = self._rollouts.play(starts, seed=seed, noise_scale=noise_scale)
        if starts.seed[0] >> 48 != Split.TRAIN:
            return played
        fault = self._faults.get(self.num_rounds, lambda unchanged: unchanged)
        self.num_rounds += 1
        self.num_ordered += len(starts.seed)
        return fault(played)


def lose_all(played: Played) -> Played:
    return Played(episodes=None, lost_groups=4)


def lose_one_group(played: Played) -> Played:
    assert played.episodes is not None
    return Played(episodes=take(played.episodes, np.arange(16, 64)), lost_groups=1)


def too_old(played: Played) -> Played:
    assert played.episodes is not None
    return Played(episodes=replace(played.episodes, version=played.episodes.version - 2))


def faulty(folder: Path, faults: dict[int, Callable[[Played], Played]], *, until: int, **sections: Any):
    """(lines of metrics, the rollouts)."""
    config, parts = start(folder, **sections)
    rollouts = Faulty(parts.rollouts, faults)
    with MetricsLog(folder) as log:
        train(config, replace(parts, rollouts=rollouts), log, folder, resume=False, say=print, until=until)
    return read_metrics(folder / "metrics.jsonl"), rollouts


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_steps_are_played_with_older_weights_and_weighted_for_it(tmp_path, backend):
    policy = {"type": "gaussian", "backend": backend}
    lines = go(tmp_path, until=6, **{**overlapping(staleness=2), "policy": policy})
    assert [line["rollout/version"] for line in lines] == [0, 0, 0, 2, 2, 4]
    assert [line.get("importance") is not None for line in lines] == [False, True, True, True, True, True]
    assert all(line["ratio_error_first"] == 0 for line in lines)
    assert all(0 <= line[f"idle/{pool}"] <= 1 for line in lines for pool in ("rollout", "learner"))


def test_learns_with_rollouts_one_step_ahead(tmp_path):
    history = go(tmp_path, **overlapping())
    first, last = (np.mean([h["rollout/success"] for h in part]) for part in (history[:3], history[-3:]))
    assert last > first + 0.3


@pytest.mark.parametrize(("staleness", "checkpoint_every"), [(1, 2), (1, 5), (2, 2), (2, 5)])
def test_resumes_bit_equal_with_a_learned_reward(tmp_path, staleness, checkpoint_every):
    """Of 8 steps with a validation after the fifth, stopped after the fifth: its checkpoint is of step 4 or 5."""
    loop = overlapping(staleness, checkpoint_every=checkpoint_every)
    straight = go(tmp_path / "a", until=8, reward=LEARNED, **loop)
    go(tmp_path / "b", until=5, reward=LEARNED, **loop)
    resumed = go(tmp_path / "b", until=8, resume=True, reward=LEARNED, **loop)
    assert comparable(resumed) == comparable(straight)
    assert [line["labels/total"] for line in straight if "labels/total" in line] == [140, 180, 200]


RESUME = """
import random, sys
from pathlib import Path
import numpy as np, torch
from test_train import go
import yaml

random.seed(1); np.random.seed(2); torch.manual_seed(3)
go(Path(sys.argv[1]), until=5, resume=True, **yaml.safe_load(sys.argv[2]))
"""


@pytest.mark.parametrize("overlap", [False, True])
def test_another_process_with_other_global_randomness_goes_on_bit_equal(tmp_path, overlap):
    """After an unplanned stop: the run is asked to leave its machine after step 3."""
    sections = {"reward": LEARNED, **(overlapping(checkpoint_every=100) if overlap else SEQUENTIAL)}
    straight = go(tmp_path / "a", until=5, **sections)
    config, parts = start(tmp_path / "b", **sections)
    answers = iter([False, False, True])
    with MetricsLog(tmp_path / "b") as log:
        state = train(config, parts, log, tmp_path / "b", resume=False, say=print, should_stop=lambda: next(answers))
    assert state.step == 3
    command = [sys.executable, "-c", RESUME, str(tmp_path / "b"), yaml.safe_dump(sections)]
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**environment}, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    assert comparable(read_metrics(tmp_path / "b" / "metrics.jsonl")) == comparable(straight)


def test_a_run_goes_on_with_another_staleness_and_without_overlap(tmp_path):
    """The weights that were to play step 2 are 2 updates old, too old for the new bound: the newest play it."""
    go(tmp_path, until=2, **overlapping(2))
    go(tmp_path, until=4, resume=True, **overlapping(1))
    lines = go(tmp_path, until=6, resume=True, **SEQUENTIAL)
    assert [line["step"] for line in lines] == list(range(6))
    assert [line["rollout/version"] for line in lines] == [0, 0, 2, 2, 4, 5]


@pytest.mark.parametrize("overlap", [False, True])
def test_lost_rounds_are_played_again_and_every_episode_is_counted_once(tmp_path, overlap):
    """The third round is lost whole, the fifth in part; the counts of the lines are all that was ordered."""
    sections = overlapping() if overlap else SEQUENTIAL
    plain = go(tmp_path / "a", until=5, **sections)
    lines, rollouts = faulty(tmp_path / "b", {2: lose_all, 5: lose_one_group}, until=5, **sections)
    assert [line["groups/lost"] for line in lines] == [0, 0, 4, 0, 1]
    assert comparable(lines)[:2] == comparable(plain)[:2]
    assert [line["loss"] for line in lines[:4]] == [line["loss"] for line in plain[:4]]  # from the same starts
    for line in lines:
        ends = line["episodes/trained"] + line["episodes/failed"] + line["episodes/evicted"]
        assert ends == line["episodes/ordered"]
    assert [line["episodes/ordered"] for line in lines] == [64, 64, 128, 64, 64]
    assert [line["episodes/failed"] for line in lines] == [0, 0, 64, 0, 16]
    assert sum(line["episodes/ordered"] for line in lines) == rollouts.num_ordered
    assert lines[-1]["episodes/carried"] == 0


def test_groups_older_than_the_bound_are_counted_and_never_trained_on(tmp_path):
    """A worker acts with weights that are 2 updates older than it should: with a bound of 1 that is one too many."""
    plain = go(tmp_path / "a", until=4, **overlapping())
    lines, _ = faulty(tmp_path / "b", {3: too_old}, until=4, **overlapping())
    assert [line["groups/evicted"] for line in lines] == [0, 0, 0, 4]
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]
    assert lines[3]["episodes/ordered"] == 128 and lines[3]["episodes/evicted"] >= 64


def test_rollouts_that_bring_nothing_end_the_run(tmp_path):
    with pytest.raises(RuntimeError, match=r"3 rounds of rollouts in a row.*12 groups were lost"):
        faulty(tmp_path, dict.fromkeys(range(1, 9), lose_all), until=3, **SEQUENTIAL)


def test_an_evaluation_plays_again_what_it_lost(tmp_path):
    config, parts = start(tmp_path, **SEQUENTIAL)
    starts = train_starts(config.seed, 7, 4, 16)
    whole = play_all(parts.rollouts, starts, seed=1)
    rollouts = Faulty(parts.rollouts, {0: lose_one_group, 1: lose_all})
    again = play_all(rollouts, starts, seed=1)
    assert rollouts.num_ordered == 64 + 16 + 16
    np.testing.assert_array_equal(again.starts.group, whole.starts.group)
    np.testing.assert_array_equal(again.success, whole.success)
    with pytest.raises(RuntimeError, match="64 of 64 episodes were lost with their workers 3 times"):
        play_all(Faulty(parts.rollouts, dict.fromkeys(range(3), lose_all)), starts, seed=1)


def test_stored_groups_must_be_fresh_enough_when_they_are_trained_on(tmp_path):
    """Step 1 is gathered before the first update and trained on after it: version 0 is one update old by then."""
    store = EpisodeStore(tmp_path / "store")
    config, parts = start(tmp_path / "a", **overlapping(stored=str(tmp_path / "store")))
    for step in range(3):
        played = parts.rollouts.play(train_starts(9, step, 4, 16), seed=9).episodes
        assert played is not None
        store.append("night", played)
    with MetricsLog(tmp_path / "a") as log:
        train(config, parts, log, tmp_path / "a", resume=False, say=print, until=4)
    lines = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [line["stored/used"] for line in lines] == [64, 64, 0, 0]
    assert [line.get("stored/age") for line in lines] == [0, 1, None, None]
    assert [line["groups/evicted"] for line in lines] == [0, 0, 4, 0]
    assert lines[2]["episodes/ordered"] == 128


def test_checkpoints_hold_the_acting_weights_only_if_steps_are_ahead(tmp_path):
    go(tmp_path / "a", until=2, **SEQUENTIAL)
    go(tmp_path / "b", until=2, **overlapping())
    names = [set(RunCheckpoints(tmp_path / run / "checkpoints", 2).load_latest()[1]) for run in "ab"]
    assert names[0] < names[1] and all(name.startswith("acting/") for name in names[1] - names[0])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loop": {"overlap": True, "staleness": 0}}, "loop.staleness is 0"),
        (
            {
                "loop": {"overlap": True},
                "policy": {
                    "type": "token_vla",
                    "engine": {"type": "vllm", "python": "python", "device": "cuda", "sleep": True},
                },
            },
            "cannot sleep and act",
        ),
    ],
)
def test_overlaps_that_cannot_be(sections, message):
    algorithm = {"clip_low": 0.2, "clip_high": 0.2}
    with pytest.raises(ValueError, match=message):
        parse_config({"algorithm": algorithm, **sections}, source="test")
