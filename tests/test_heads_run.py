"""A whole run whose reward has three heads: it asks for outcomes, and resumes bit-equal with them."""

import json

import numpy as np
import pytest
from test_outcomes_offline import NEAR, demonstrations

from vla_rlaif.build import build_env, build_parts
from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.config import parse_config
from vla_rlaif.dataset import save_demonstrations
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.preferences.outcome_store import OutcomeStore
from vla_rlaif.reward_run_card import NOT_RECORDED, write_run_card
from vla_rlaif.start import start_policy
from vla_rlaif.train import train


def go(folder, data, *, until, resume=False):
    """Metrics of every step, without times, and the tensors of the newest checkpoint."""
    sections = {
        "out": str(folder),
        "env": {"type": "point_reach", "num_envs": 32, "radius": NEAR},
        "policy": {"type": "mlp", "hidden": [8]},
        "warm_start": {"data": str(data), "imitate": {"steps": 2, "batch": 8, "samples": 1}},
        "reward": {
            **{"type": "preference", "encoder": {"type": "color_points", "things": {"goal": [1, 0, 0]}}},
            **{"heads": ["return", "progress", "success"], "score": "mix", "members": 2, "hidden": [8]},
            **{"outcomes": ["demonstrations", "labeller"], "outcome_share": 0.25, "held_out": 0.25, "fit_steps": 8},
            **{"budget": 80, "initial_labels": 40, "initial_episodes": 32},
            **{"labels_per_refresh": 16, "refresh_every": 1, "false_positive_rate": 0.2},
        },
        "record": {"every": 1, "groups": 8},
        "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
        "loop": {"steps": 4, "validate_every": 9, "checkpoint_every": 1},
    }
    config = parse_config(sections, source="test")
    folder.mkdir(exist_ok=True)
    env = build_env(config.env)
    policy = start_policy(config, env, folder, lambda text: None)
    parts = build_parts(config, env, policy, folder)
    with MetricsLog(folder) as log:
        train(config, parts, log, folder, resume=resume, say=lambda text: None, until=until)
    write_run_card(config, parts, folder, lambda text: None)
    timed = ("time/", "minutes", "reward/fit_s", "jax/", "idle/", "sync/")
    lines = [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in read_metrics(folder / "metrics.jsonl")
    ]
    return lines, RunCheckpoints(folder / "checkpoints", 2).load_latest()[1]


def said(folder):
    with OutcomeStore(folder / "preferences.outcomes.sqlite") as kept:
        return {name: (one.p_success, one.step) for name, one in kept.newest().items()}


def test_a_run_with_outcomes_resumes_bit_equal(tmp_path):
    save_demonstrations(tmp_path / "demos", demonstrations(), {})
    lines, tensors = go(tmp_path / "a", tmp_path / "demos", until=3)
    go(tmp_path / "b", tmp_path / "demos", until=2)
    again, resumed = go(tmp_path / "b", tmp_path / "demos", until=3, resume=True)
    assert again == lines
    assert resumed.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert any("clips/" in name for name in tensors) and any("threshold" in name for name in tensors)
    # A quarter of the 40 labels before step 0 and of 16 at each of two refreshes.
    answers = said(tmp_path / "a")
    assert answers == said(tmp_path / "b")
    assert sorted(step for _, step in answers.values()) == [-1] * 10 + [1] * 4 + [2] * 4
    assert [line.get("labels/total") for line in lines] == [None, 56, 72]
    cards = [(tmp_path / name / "reward_card.json").read_bytes() for name in ("a", "b")]
    assert cards[0] == cards[1]
    card = json.loads(cards[0])
    assert card["threshold"] == pytest.approx(lines[-1]["reward/success_threshold"])
    assert card["accuracy"]["rate"] == pytest.approx(lines[-1]["reward/held_out_accuracy"])
    assert card["false_positives"]["rate"] == pytest.approx(lines[-1]["reward/false_positives"])
    assert {"reward/progress_error", "reward/success_threshold", "reward/false_positives"} <= lines[-1].keys()
    # All episodes of steps are recorded, and none of those before the first one.
    sides = [name for mistake in card["mistakes"] for name in (mistake["first"], mistake["second"])]
    shown = [name for name in sides if not name.startswith("start:")]
    page = (tmp_path / "a" / "reward_card.html").read_text()
    assert 0 < len(shown) < len(sides)
    assert page.count("data:image/") == 2 * len(shown)  # moving and still
    assert page.count(NOT_RECORDED) == len(sides) - len(shown)
