"""The reward of benchmarks/hacking.py is hacked without a brake; KL, and the monitor's actions, hold true success."""

import json
from pathlib import Path

import pytest

from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.config import load_config, validate_again
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.train import train

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def found(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def go(folder, *, action="warn", kl_coef=0.0, until=16, resume=False, said=None):
    config = load_config(ROOT / "configs" / "point_reach_hacked.yaml")
    change = {
        "algorithm": config.algorithm.model_copy(update={"kl_coef": kl_coef}),
        "monitor": config.monitor.model_copy(update={"action": action}),
        "loop": config.loop.model_copy(update={"validation_episodes": 128, "checkpoint_every": 7}),
    }
    config = validate_again(config.model_copy(update=change))
    folder.mkdir(exist_ok=True)
    env = build_env(config.env)
    parts = build_parts(config, env, build_policy(config.policy, env.spec, config.seed), folder)
    lines = [] if said is None else said
    with MetricsLog(folder) as log:
        train(config, parts, log, folder, resume=resume, say=lines.append, until=until)
    timed = ("time/", "minutes", "jax/", "idle/", "sync/", "episodes/carried")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in read_metrics(folder / "metrics.jsonl")
    ]


def validations(lines):
    return [line for line in lines if "monitor/gold" in line]


def test_without_a_brake_the_monitor_fires_while_the_reward_rises(tmp_path):
    said: list[str] = []
    seen = validations(go(tmp_path, said=said))
    best, last = max(line["monitor/gold"] for line in seen), seen[-1]
    assert best > 0.85 and last["monitor/gold"] < best - 0.3
    assert last["monitor/proxy"] > seen[0]["monitor/proxy"] + 1
    assert last["monitor/alarm"] == 1 and seen[0]["monitor/sqrt_kl"] == 0 < last["monitor/sqrt_kl"]
    assert sum("caution: reward hacking" in line for line in said) == 1


def test_a_kl_brake_holds_true_success(tmp_path):
    seen = validations(go(tmp_path, kl_coef=0.6))
    assert seen[-1]["monitor/gold"] > 0.9 and not any(line["monitor/alarm"] for line in seen)


def test_stop_ends_the_run_where_it_can_be_gone_on_from_on_purpose_only(tmp_path):
    said: list[str] = []
    lines = go(tmp_path, action="stop", said=said)
    assert lines[-1]["monitor/alarm"] == 1 and len(lines) < 16
    assert "stopped by the monitor" in said[-1]
    assert go(tmp_path, action="stop", resume=True) == lines
    assert len(go(tmp_path, action="warn", resume=True)) == 16
    state = json.loads(sorted((tmp_path / "checkpoints").iterdir())[-1].joinpath("state.json").read_text())
    assert state["best_step"] == 4


def test_a_run_goes_back_to_its_best_and_resumes_bit_equal(tmp_path):
    straight = go(tmp_path / "a", action="rollback")
    seen = validations(straight)
    assert seen[-1]["monitor/rollbacks"] == 1
    at = next(i for i, line in enumerate(straight) if line.get("monitor/rollbacks") == 1)
    assert straight[at + 1]["reference_kl"] < straight[at]["reference_kl"] / 2
    assert straight[at + 1]["rollout/version"] == straight[at]["rollout/version"] + 1
    go(tmp_path / "b", action="rollback", until=at + 1)
    assert go(tmp_path / "b", action="rollback", resume=True) == straight
