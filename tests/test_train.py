"""The real loop, end to end, on the smallest env and policy: it learns, resumes bit-equal, and diagnoses dead runs."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import yaml

from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.config import parse_config
from vla_rlaif.interfaces import Rollouts
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.rollout import Split
from vla_rlaif.train import train
from vla_rlaif.types import Played, Starts

BASE = {
    "name": "test",
    "env": {"type": "point_reach", "num_envs": 64},
    "policy": {"type": "gaussian"},
    "reward": {"type": "pixel_distance"},
    "algorithm": {"group_size": 16, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
    "learner": {"lr": 0.05, "minibatch": 256, "ema": 0.5, "target_kl": None},
    "loop": {"steps": 25, "validate_every": 5, "validation_episodes": 64, "checkpoint_every": 2},
}
LEARNED = {
    "type": "preference",
    "encoder": {"type": "policy"},
    "budget": 200,
    "initial_labels": 100,
    "initial_episodes": 64,
    "labels_per_refresh": 40,
    "refresh_every": 2,
    "fit_steps": 30,
}


def start(tmp_path, **sections):
    tmp_path.mkdir(exist_ok=True)
    config = parse_config({**BASE, "out": str(tmp_path), **sections}, source="test")
    env = build_env(config.env)
    policy = build_policy(config.policy, env.spec, config.seed)
    return config, build_parts(config, env, policy, tmp_path)


def go(tmp_path, *, resume=False, until=None, **sections):
    config, parts = start(tmp_path, **sections)
    with MetricsLog(tmp_path) as log:
        train(config, parts, log, tmp_path, resume=resume, say=print, until=until)
    return read_metrics(tmp_path / "metrics.jsonl")


def comparable(lines):
    """Everything but wall-clock times."""
    timed = ("time/", "minutes", "reward/fit_s", "jax/", "idle/", "sync/", "episodes/carried")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_learns_from_pixels_alone(tmp_path, backend):
    history = go(tmp_path, policy={"type": "gaussian", "backend": backend})
    first, last = (np.mean([h["rollout/success"] for h in part]) for part in (history[:3], history[-3:]))
    assert last > first + 0.3
    assert max(h.get("validation/success", 0) for h in history) > 0.8


def test_counts_of_episodes_add_up(tmp_path):
    for line in go(tmp_path, until=3):
        ends = line["episodes/trained"] + line["episodes/failed"] + line["episodes/evicted"]
        assert ends == line["episodes/ordered"] == 64


def test_resumes_bit_equal_with_a_learned_reward(tmp_path):
    straight = go(tmp_path / "a", until=8, reward=LEARNED)
    go(tmp_path / "b", until=5, reward=LEARNED)  # the newest checkpoint is of step 4: step 4 is played again
    resumed = go(tmp_path / "b", until=8, resume=True, reward=LEARNED)
    assert comparable(resumed) == comparable(straight)
    assert [line["labels/total"] for line in straight if "labels/total" in line] == [140, 180, 200]


def test_policy_update_never_reads_success(tmp_path):
    """With a learned reward, success and truth may be anything after labelling: the losses do not change."""

    class Blind:
        """Rollouts whose training episodes say the opposite of what happened; the first labels see the truth."""

        def __init__(self, rollouts: Rollouts) -> None:
            self.spec, self.num_envs, self.window = rollouts.spec, rollouts.num_envs, rollouts.window
            self._rollouts = rollouts

        def play(self, starts: Starts, *, seed: int, noise_scale: float = 1.0) -> Played:
            played = self._rollouts.play(starts, seed=seed, noise_scale=noise_scale)
            if starts.seed[0] >> 48 != Split.TRAIN:
                return played
            e = played.episodes
            assert e is not None
            return Played(episodes=replace(e, success=~e.success, truth=-e.truth))

    plain = go(tmp_path / "a", until=2, reward=LEARNED)
    config, parts = start(tmp_path / "b", reward=LEARNED)
    with MetricsLog(tmp_path / "b") as log:
        blind = replace(parts, rollouts=Blind(parts.rollouts))
        train(config, blind, log, tmp_path / "b", resume=False, say=print, until=2)
    changed = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [line["loss"] for line in changed] == [line["loss"] for line in plain]
    assert changed[0]["rollout/success"] != plain[0]["rollout/success"]


def test_an_unscorable_episode_gets_no_gradient_and_is_counted(tmp_path):
    history = go(tmp_path, until=1, reward={"type": "python", "function": "rewards_for_tests:nan_for_odd_rows"})
    assert history[0]["reward/unscorable"] == 32
    assert history[0]["episodes/trained"] <= 32


@pytest.mark.parametrize(("function", "cause"), [("all_nan", "scores no episode"), ("constant", "may be constant")])
def test_a_run_without_anything_to_learn_stops_with_a_diagnosis(tmp_path, function, cause):
    with pytest.raises(ValueError, match=f"three steps in a row.*{cause}"):
        go(tmp_path, reward={"type": "python", "function": f"rewards_for_tests:{function}"})


def test_a_killed_process_resumes_bit_equal(tmp_path):
    """SIGKILL at some moment of the real command, while steps are played ahead and checkpoints written; the resumed run
    writes the numbers of an uninterrupted one."""
    loop = {**BASE["loop"], "steps": 15, "overlap": True}
    config = {**BASE, "evaluate": {"episodes": 64, "clips": 2}, "reward": LEARNED, "loop": loop}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "vla_rlaif", "train", str(path)]
    environment = {**os.environ, "MPLBACKEND": "agg"}
    whole = subprocess.run(
        [*command, "--out", str(tmp_path / "a")], capture_output=True, text=True, timeout=300, env=environment
    )
    assert whole.returncode == 0, whole.stderr
    running = subprocess.Popen([*command, "--out", str(tmp_path / "b")], env=environment)
    deadline = time.monotonic() + 200
    metrics = tmp_path / "b" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 7):
        assert running.poll() is None and time.monotonic() < deadline, "the run ended or hung before it was killed"
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait(timeout=30)
    resumed = subprocess.run(
        [*command, "--out", str(tmp_path / "b"), "--resume"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step" in resumed.stdout
    a, b = (comparable(read_metrics(tmp_path / r / "metrics.jsonl")) for r in "ab")
    assert a == b
    results = [json.loads((tmp_path / r / "result.json").read_text()) for r in "ab"]
    for key in ("success_before", "success_after", "best_step", "labels"):
        assert results[0][key] == results[1][key], key


def test_a_step_refills_once_and_keeps_what_it_has(tmp_path):
    """Rewards have spread in even groups only: 2 of 4 are live, fewer than wanted, so one more round is played."""
    reward = {"type": "python", "function": "rewards_for_tests:spread_in_even_groups"}
    loop = {**BASE["loop"], "min_live_share": 0.75, "max_refills": 1}
    line = go(tmp_path, until=1, reward=reward, loop=loop)[0]
    assert (line["groups/refills"], line["groups/total"], line["groups/live"]) == (1, 8, 4)
    assert line["episodes/trained"] + line["episodes/failed"] + line["episodes/evicted"] == 128
    enough = go(tmp_path / "b", until=1, reward=reward, loop={**loop, "min_live_share": 0.5})[0]
    assert (enough["groups/refills"], enough["groups/total"]) == (0, 4)
