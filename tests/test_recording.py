"""What a run keeps for looking at: which groups, exactly as judged, once each, and without a trace in its numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest
from synthetic import make_episodes

from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.config import parse_config
from vla_rlaif.inspect.recorded import RecordedSource
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.record_config import RecordConfig
from vla_rlaif.recording import Recorded, Recording, choose
from vla_rlaif.train import train

RUN = {
    "env": {"type": "point_reach", "num_envs": 16},
    "policy": {"type": "gaussian"},
    "reward": {"type": "pixel_distance"},
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
    "learner": {"lr": 0.05, "minibatch": 64},
    "loop": {"steps": 7, "validate_every": 50, "validation_episodes": 16, "checkpoint_every": 2},
}


class Steady:
    """A reward model that says how far each frame is: the first state number."""

    version = 0
    heads = ("return", "progress")

    def score(self, episodes):
        return episodes.state[:, -1, 0]

    def progress(self, episodes):
        return episodes.state[..., 0]


def chosen(step=0, judge=None, episodes=None, **config):
    episodes = make_episodes(16, length=np.array([4, 3, 2, 1] * 4)) if episodes is None else episodes
    number = np.arange(16.0)
    settings = RecordConfig(**config)
    return choose(settings, seed=3, step=step, episodes=episodes, reward=number, advantage=-number, judge=judge)


def kept_of(**options) -> Recorded:
    kept = chosen(**options)
    assert kept is not None
    return kept


def go(folder, *, resume=False, until=None, record, loop=None):
    sections = {"out": str(folder), "record": record, "loop": {**RUN["loop"], **(loop or {})}}
    config = parse_config({**RUN, **sections}, source="test")
    env = build_env(config.env)
    parts = build_parts(config, env, build_policy(config.policy, env.spec, config.seed), folder)
    with MetricsLog(folder) as log:
        train(config, parts, log, folder, resume=resume, say=print, until=until)
    timed = ("time/", "minutes", "jax/", "idle/", "sync/", "episodes/carried")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in read_metrics(folder / "metrics.jsonl")
    ]


def test_whole_groups_of_every_so_many_steps():
    kept = kept_of(groups=2)
    assert kept.row.tolist() == [r for r in range(16) if r // 4 in set(kept.row // 4)] and len(kept.row) == 8
    assert chosen(step=3, every=2) is None and chosen(step=4, every=2) is not None and chosen(every=0) is None
    assert len(kept_of(groups=9).row) == 16
    drawn = {tuple(kept_of(step=step, every=1, groups=1).row) for step in range(40)}
    assert len(drawn) == 4  # every group has its turn


def test_what_is_written_is_read_back_to_the_bit(tmp_path):
    episodes = make_episodes(16, length=np.array([4, 3, 2, 1] * 4))
    kept = kept_of(judge=Steady(), episodes=episodes, groups=4)
    Recording(tmp_path).write(0, kept)
    source = RecordedSource(tmp_path)
    assert source.table.id == tuple(f"0:{row}" for row in range(16))
    for row in range(16):
        numbers, length = source.numbers(f"0:{row}"), int(episodes.num_decisions[row])
        np.testing.assert_array_equal(numbers.state, episodes.state[row, : length + 1])
        np.testing.assert_array_equal(numbers.action, episodes.action[row, :length])
        np.testing.assert_array_equal(numbers.progress, episodes.state[row, : length + 1, 0])
        np.testing.assert_array_equal(source.frames(f"0:{row}")["top"], episodes.images["top"][row, : length + 1])
    assert source.table.reward.tolist() == list(range(16)) and source.table.advantage.tolist() == [
        -r for r in range(16)
    ]


def test_large_frames_are_scaled_down():
    episodes = make_episodes(16)
    wide = {"top": np.repeat(np.repeat(episodes.images["top"], 4, axis=2), 2, axis=3)}  # 32 x 16
    kept = kept_of(episodes=replace(episodes, images=wide), size=16)
    assert kept.episodes.images["top"].shape[2:] == (16, 8, 3)
    first = np.round(wide["top"][kept.row[0], 0, :2, :2].astype(float).mean((0, 1)))  # a pixel is the mean of four
    np.testing.assert_allclose(kept.episodes.images["top"][0, 0, 0, 0], first, atol=1)


def test_nan_rewards_are_no_json(tmp_path):
    kept = kept_of(groups=4)
    Recording(tmp_path).write(0, replace(kept, reward=np.full(16, np.nan)))
    assert "NaN" not in (tmp_path / "index.jsonl").read_text()
    assert np.isnan(RecordedSource(tmp_path).table.reward).all()


def test_recording_changes_no_number_of_a_run(tmp_path):
    without = go(tmp_path / "a", record={"every": 0})
    assert go(tmp_path / "b", record={"every": 1, "groups": 2}) == without
    assert not (tmp_path / "a/episodes").exists()
    source = RecordedSource(tmp_path / "b/episodes")
    assert sorted(set(source.table.step.tolist())) == list(range(7)) and len(source.table.id) == 7 * 8
    means = [line["reward/mean"] for line in without]
    whole = go(tmp_path / "c", record={"every": 1, "groups": 4})
    table = RecordedSource(tmp_path / "c/episodes").table
    found = [table.reward[table.step == step].mean() for step in range(7)]
    np.testing.assert_allclose(found, means, rtol=1e-6)  # the rewards are those that were trained on
    assert whole == without


@pytest.mark.parametrize("loop", [{}, {"overlap": True, "staleness": 1}])
def test_a_resumed_run_has_every_step_once(tmp_path, loop):
    go(tmp_path / "a", record={"every": 1}, loop=loop)
    go(tmp_path / "b", record={"every": 1}, loop=loop, until=5)  # the checkpoint is of step 4
    with (tmp_path / "b/episodes/index.jsonl").open("a") as file:
        file.write('{"step": 5, "fi')  # the machine died here
    (tmp_path / "b/episodes/step-000005.zip").write_bytes(b"half")
    go(tmp_path / "b", record={"every": 1}, loop=loop, resume=True)
    one, two = ((tmp_path / run / "episodes/index.jsonl").read_text() for run in "ab")
    assert [json.loads(line) for line in two.splitlines()] == [json.loads(line) for line in one.splitlines()]
    straight, again = RecordedSource(tmp_path / "a/episodes"), RecordedSource(tmp_path / "b/episodes")
    for name in straight.table.id:
        np.testing.assert_array_equal(straight.numbers(name).action, again.numbers(name).action)


def test_a_new_run_forgets_the_old_one(tmp_path):
    recording = Recording(tmp_path)
    recording.write(0, kept_of())
    recording.rewind(0)
    assert (tmp_path / "index.jsonl").read_text() == "" and not list(tmp_path.glob("*.zip"))
